"""Configuration of `dynamictp serve`: one frozen value from defaults, a YAML file and flags, in that order.

Keys of the file are the long flags with `_` for `-`. Unknown keys, wrong types and values that are not built
yet are a `ConfigError` that names the key. Nothing writes into a configuration after it is built.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from dynamictp.control.config import ControlConfig, build_control
from dynamictp.errors import ConfigError, LayoutRefused
from dynamictp.layout import parse_layout

GIB = 1 << 30
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS = {**_DECIMAL, "ki": 1 << 10, "mi": 1 << 20, "gi": GIB, "ti": 1 << 40}


MAX_MODELS = 8
MAX_MODEL_PRIORITY = 1000
_MODEL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""What a layout's text can name."""


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of several models. What is left out (None) is as the server's own key of that name says."""

    name: str
    path: str
    """A folder, a file.gguf, or `demo`."""
    layout: str = "tp1"
    priority: int = 0
    """Of models that compete for devices the higher one gets what it wants first."""
    kv_share: float = 1.0
    """Its part of `kv_memory`, relative to the others'."""
    max_devices: int = 0
    """Most devices that it may ever have; 0: all that leave one for each other model."""
    dtype: Literal["bf16", "fp32"] | None = None
    weights: Literal["", "int8"] | None = None
    kernels: Literal["auto", "torch", "native"] | None = None
    page_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_step_ms: float | None = None
    chat_template: str | None = None
    generation_config: Literal["", "auto"] | None = None
    calibration: str | None = None


_OF_ENTRIES = frozenset({"name", "path", "layout", "priority", "kv_share", "max_devices"})
_NOT_BESIDE_MODELS = ("model", "layout", "served_model_name", "chat_template", "calibration")
"""Keys that say something of one model."""


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of a server. 0 or an empty text mean: derived from the machine or the model."""

    model: str = "demo"
    devices: int = 0
    cores_per_device: int = 1
    layout: str = "tp1"
    mode: Literal["static", "dynamic", "dry-run"] = "dynamic"
    dtype: Literal["bf16", "fp32"] = "bf16"
    weights: Literal["", "int8"] = ""
    kernels: Literal["auto", "torch", "native"] = "auto"
    numerics: Literal["exact", "fast"] = "exact"
    kv_memory: str = ""
    page_tokens: int = 64
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    max_step_ms: float = 100.0
    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False
    admin_host: str = ""
    admin_port: int = 0
    api_key_file: str = ""
    admin_key_file: str = ""
    public_metrics: bool = False
    allowed_hosts: str = ""
    max_waiting: int = 10_000
    max_waiting_tokens: int = 16_000_000
    max_wait_s: float = 10.0
    request_timeout_s: float = 0.0
    metrics_alias: Literal["", "vllm"] = ""
    otlp_traces_endpoint: str = ""
    served_model_name: str = ""
    chat_template: str = ""
    generation_config: Literal["", "auto"] = ""
    collective_deadline_s: float = 30.0
    hang_s: float = 2.0
    crash_budget: int = 20
    trust_remote_code: bool = False
    drain_s: float = 30.0
    calibration: str = ""
    journal: str = ""
    models: tuple[ModelEntry, ...] = ()
    """Several models, only in a file; empty: `model` alone."""
    control: ControlConfig = ControlConfig()
    """In files and flags its fields stand beside the others."""

    @property
    def model_name(self) -> str:
        """Name in the API: `--served-model-name`, else the last part of the model's path."""
        return self.served_model_name or Path(self.model).name

    def of_model(self, entry: ModelEntry) -> ServeConfig:
        """The configuration of one of `models`, as if it were alone. `kv_memory` stays that of all."""
        own = {
            key: value
            for key in ModelEntry.__struct_fields__
            if key not in _OF_ENTRIES and (value := getattr(entry, key)) is not None
        }
        journal = Path(self.journal)
        return msgspec.structs.replace(
            self,
            model=entry.path,
            served_model_name=entry.name,
            layout=entry.layout,
            models=(),
            journal=str(journal.with_stem(f"{journal.stem}-{entry.name}")) if self.journal else "",
            **own,
        )

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Host and port of the admin interface if it has a port of its own."""
        return (self.admin_host or "127.0.0.1", self.admin_port) if self.admin_port else None

    @property
    def admin_on_main(self) -> bool:
        """The admin interface is on the API's port: nobody else reaches that, and no other was given."""
        return is_loopback(self.host) and not self.admin_port


NOT_BUILT: dict[str, tuple[object, ...]] = {"numerics": ("fast",)}
"""Values that the public contract names and this version refuses."""

_LIMITS: dict[str, tuple[float, float]] = {
    "devices": (0, 1024),
    "cores_per_device": (1, 1024),
    "page_tokens": (2, 1024),
    "max_model_len": (0, 1 << 24),
    "max_num_seqs": (1, 4096),
    "max_batched_tokens": (16, 65536),
    "max_step_ms": (1, 60_000),
    "port": (0, 65535),
    "admin_port": (0, 65535),
    "max_waiting": (1, 1_000_000),
    "max_waiting_tokens": (1, 1 << 30),
    "max_wait_s": (0, 86_400),
    "request_timeout_s": (0, 86_400),
    "collective_deadline_s": (0.1, 3600),
    "hang_s": (0.5, 3600),
    "crash_budget": (0, 1_000_000),
    "drain_s": (0, 86_400),
}


def parse_size(text: str) -> int:
    """Bytes of `8GiB`, `512M`, `1000000`. Raises `ConfigError`."""
    lowered = text.strip().lower().removesuffix("b")
    number = lowered.rstrip("kmgti")
    try:
        size = float(number) * _UNITS[lowered[len(number) :]]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"'{text}' is no size: expected a number with K, M, G, KiB, MiB or GiB") from error
    if not 0 < size < 1 << 50:
        raise ConfigError(f"'{text}' is out of range for a size")
    return int(size)


def build_config(flags: dict[str, Any], file: str | None = None) -> ServeConfig:
    """Flags over file over defaults. `flags` holds only what the user gave. Raises `ConfigError`."""
    merged: dict[str, Any] = {}
    if file is not None:
        merged.update(_read_file(file))
    slo = {**(_mapping(merged, "slo")), **flags.get("slo", {})}
    merged.update(flags)
    if slo:
        merged["slo"] = slo
    control = {key: merged.pop(key) for key in ControlConfig.__struct_fields__ if key in merged}
    if "control" in merged:
        raise ConfigError("configuration: 'control' is no key; its parameters stand beside the others")
    if "models" in merged:
        if not merged["models"]:
            raise ConfigError("configuration: 'models' names no model; leave the key out to serve one")
        beside = next((key for key in _NOT_BESIDE_MODELS if merged.get(key)), None)
        if beside is not None:
            raise ConfigError(f"configuration: '{beside}' stands inside each of 'models', not beside them")
    try:
        config = msgspec.convert({**merged, "control": build_control(control)}, ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}".replace("`$.", "`").replace("- at `$`", "")) from error
    _check(config)
    return config


def to_yaml(config: ServeConfig) -> str:
    """As a file that gives the same configuration."""
    values = msgspec.to_builtins(config)
    values |= values.pop("control")
    models = [{k: v for k, v in entry.items() if v is not None} for entry in values.pop("models")]
    if models:
        values = {k: v for k, v in values.items() if k not in _NOT_BESIDE_MODELS} | {"models": models}
    return msgspec.yaml.encode(values).decode()


def _mapping(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"configuration: '{key}' must be a mapping, such as {key}: {{ttft_p99_s: 2}}")
    return value


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: one of the two is not what was meant."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"key '{twice}' is there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _read_file(path: str) -> dict[str, Any]:
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # noqa: S506  (a SafeLoader)
    except OSError as error:
        raise ConfigError(f"can't read the configuration file {path}: {error.strerror}") from error
    except Exception as error:  # the library raises whatever a value of a wrong form leads to
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if content is None or content == {}:
        raise ConfigError(
            f"{path} sets nothing: expected a mapping of flags, such as 'model: demo'; without --config the "
            "defaults hold"
        )
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path} must hold a mapping of flags, such as 'port: 8000'")
    return content


def _check(config: ServeConfig) -> None:
    for key, values in NOT_BUILT.items():
        if getattr(config, key) in values:
            raise ConfigError(f"--{key} {getattr(config, key)} is not built yet")
    if config.trust_remote_code:
        raise ConfigError(
            "--trust-remote-code: this server never runs code that comes with a model; "
            "models of the families it knows need none"
        )
    for key, (low, high) in _LIMITS.items():
        if not low <= getattr(config, key) <= high:
            flag = key.replace("_", "-")
            raise ConfigError(f"--{flag} goes from {low:g} to {high:g}, not {getattr(config, key)}")
    if config.page_tokens % 16:
        raise ConfigError(f"--page-tokens must be a multiple of 16, not {config.page_tokens}")
    if config.kv_memory:
        parse_size(config.kv_memory)
    if not config.model:
        raise ConfigError("no model: give a folder, a file.gguf or 'demo'")
    try:
        config.model_name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the name {config.model_name!r} is no text: give --served-model-name") from error
    try:
        parse_layout(config.layout)
    except LayoutRefused as error:
        raise ConfigError(f"--layout: {error}") from error
    _check_access(config)
    _check_models(config)


def _check_models(config: ServeConfig) -> None:
    if len(config.models) > MAX_MODELS:
        raise ConfigError(f"models: at most {MAX_MODELS} models in one server, not {len(config.models)}")
    twice = [name for name, count in Counter(entry.name for entry in config.models).items() if count > 1]
    if twice:
        raise ConfigError(f"models: the name '{twice[0]}' is there twice")
    for entry in config.models:
        if not _MODEL_NAME.fullmatch(entry.name):
            raise ConfigError(
                f"models: the name {entry.name!r} can't stand in a layout: a letter, then up to 63 letters, "
                "digits, _ . or -"
            )
        if not 0 < entry.kv_share <= 1e6:
            raise ConfigError(
                f"model {entry.name}: kv_share is a number above 0 and up to 1e6, not {entry.kv_share:g}"
            )
        if not 0 <= entry.max_devices <= _LIMITS["devices"][1]:
            raise ConfigError(f"model {entry.name}: max_devices can't be {entry.max_devices}")
        if abs(entry.priority) > MAX_MODEL_PRIORITY:
            raise ConfigError(f"model {entry.name}: priority goes from -1000 to 1000, not {entry.priority}")
        try:
            _check(config.of_model(entry))
        except ConfigError as error:
            raise error.of_model(entry.name) from error


def _check_access(config: ServeConfig) -> None:
    """Nothing is open to others by accident."""
    if not (config.insecure or config.api_key_file or is_loopback(config.host)):
        raise ConfigError(
            f"--host {config.host} is reachable from outside: give --api-key-file, use 127.0.0.1, or "
            "--insecure if everyone in the network may use the server"
        )
    if config.admin_host and not config.admin_port:
        raise ConfigError("--admin-host needs --admin-port")
    admin = config.admin_address
    if admin is None:
        return
    if config.admin_port == config.port:
        raise ConfigError(
            f"--admin-port and --port are both {config.port}; the admin interface needs its own"
        )
    if not (config.insecure or config.admin_key_file or is_loopback(admin[0])):
        raise ConfigError(
            f"--admin-host {admin[0]} is reachable from outside: give --admin-key-file, use 127.0.0.1, or "
            "--insecure if everyone in the network may change the layout"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
