"""What to simulate, as one frozen value and as `scenario.yaml`. docs/simulator.md describes every key."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynamictp.bench.workload.classes import Prefixes, Tenant, Workload, parse_mix
from dynamictp.bench.workload.spec import ClosedArrivals, parse_arrivals
from dynamictp.control.config import ControlConfig, SloTable, build_control
from dynamictp.control.values import Mode
from dynamictp.errors import ConfigError, LayoutRefused
from dynamictp.layout import LayoutSpec
from dynamictp.sim.values import SwitchTimes

MOST_CASES = 10_000


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the engine that differ from those of the device's kind."""

    max_batched_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1)] | None = None
    max_step_ms: Annotated[float, Meta(ge=0)] | None = None
    page_tokens: Annotated[int, Meta(ge=1)] | None = None
    steps_ahead: Annotated[int, Meta(ge=0, le=8)] | None = None


class Configuration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One column of the comparison: a static layout, or a planner that begins with it."""

    layout: str
    name: str = ""
    mode: Mode = "static"
    degrees: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Degrees that the planner may use, whose weights stay resident; empty: those of `layout`."""
    memory: Mode | None = None
    """Whose memory plan counts: dynamic mode keeps 30 % of the pages free and more communicators. None: its
    own mode's. For comparisons of like with like."""
    planner: dict[str, Any] = {}
    """Parameters of docs/control-parameters.md that differ from the scenario's."""

    @property
    def label(self) -> str:
        return self.name or (self.layout if self.mode == "static" else self.mode)

    @property
    def memory_mode(self) -> Mode:
        return self.memory or self.mode


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One workload on one pool under several configurations and seeds. Texts as the benchmark takes them."""

    model: str
    """A name of the advisor's catalogue, `demo`, a folder, a config.json or a .gguf file."""
    device: str
    """A name of the advisor's table, `local`, or a YAML file."""
    configurations: Annotated[tuple[Configuration, ...], Meta(min_length=1)]
    name: str = ""
    devices: Annotated[int, Meta(ge=1, le=64)] = 8
    calibration: str = ""
    """File of `dynamictp calibrate`."""
    mix: str = "chat-rag"
    arrivals: str = "poisson:1"
    duration_s: Annotated[float, Meta(gt=0)] = 3600.0
    scale: Annotated[float, Meta(gt=0)] = 1.0
    tenants: tuple[str, ...] = ()
    prefixes: str = ""
    longest_tokens: Annotated[int, Meta(ge=0)] = 0
    """Bound of prompt + output; 0: the model's context."""
    seeds: tuple[Annotated[int, Meta(ge=0)], ...] = (0, 1, 2)
    warmup_s: Annotated[float, Meta(ge=0)] = 0.0
    """Requests that arrive earlier are played and not counted; so is the use of devices until then."""
    drain_s: Annotated[float, Meta(ge=0)] = 120.0
    """How long after the load requests may finish. Whoever has not by then counts as failed."""
    slo: SloTable = SloTable()
    planner: dict[str, Any] = {}
    """Parameters of docs/control-parameters.md for all configurations."""
    engine: Engine = Engine()
    switch: SwitchTimes = SwitchTimes()
    max_wait_s: Annotated[float, Meta(ge=0)] = 10.0
    """Requests with a longer predicted wait are refused, as the server does; 0: none is."""
    noise: Annotated[float, Meta(ge=0, le=2)] = 0.0
    """Standard deviation of the logarithm of a step's time."""
    price_per_device_hour: Annotated[float, Meta(ge=0)] = 0.0
    sweep: dict[str, tuple[Any, ...]] = {}
    """Planner parameters and the values to try: every combination is one more dynamic configuration."""
    assumptions: tuple[str, ...] = ()
    """In words, with their sources; shown in reports."""

    def workload(self, seed: int, longest_tokens: int = 0) -> Workload:
        """The benchmark's workload of that seed. Raises `ConfigError`."""
        return Workload(
            classes=parse_mix(self.mix),
            arrivals=self.arrivals,
            duration_s=self.duration_s,
            seed=seed,
            scale=self.scale,
            tenants=tuple(map(Tenant.parse, self.tenants)),
            prefixes=Prefixes.parse(self.prefixes) if self.prefixes else None,
            longest_tokens=self.longest_tokens or longest_tokens,
        )

    def control(self, configuration: Configuration) -> ControlConfig:
        """The planner's parameters. Raises `ConfigError` that names the key."""
        values = {**self.planner, **configuration.planner}
        if "slo" in values:
            raise ConfigError("slo belongs to the scenario, not to its planner: all are judged by the same")
        return build_control({**values, "slo": msgspec.to_builtins(self.slo)})

    def expanded(self) -> Scenario:
        """With a configuration for every combination of the sweep, none left to sweep."""
        if not self.sweep:
            return self
        return msgspec.structs.replace(self, configurations=(*self.configurations, *_swept(self)), sweep={})


def _swept(scenario: Scenario) -> Iterator[Configuration]:
    dynamic = [c for c in scenario.configurations if c.mode != "static"]
    if not dynamic:
        raise ConfigError("sweep: the planner's parameters need a configuration that is not static")
    names = list(scenario.sweep)
    for base in dynamic:
        for values in itertools.product(*scenario.sweep.values()):
            given = dict(zip(names, values, strict=True))
            text = ", ".join(f"{key}={value}" for key, value in given.items())
            yield msgspec.structs.replace(
                base, name=f"{base.label} ({text})", planner={**base.planner, **given}
            )


def read_scenario(path: Path) -> Scenario:
    """A checked scenario; paths in it are relative to its file. Raises `ConfigError` that names the key."""
    try:
        values = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"can't read the scenario {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no scenario: keys and values, such as 'model: demo'")
    scenario = build_scenario(values, str(path))
    beside: dict[str, Any] = {
        key: str(path.parent / text)
        for key in ("model", "device", "calibration")
        if (text := getattr(scenario, key)) and (path.parent / text).exists() and not Path(text).is_absolute()
    }
    return msgspec.structs.replace(scenario, **beside)


def build_scenario(values: Mapping[str, Any], where: str = "scenario") -> Scenario:
    """From plain values. Raises `ConfigError` that names the key."""
    for key, value in _numbers(values):
        if not math.isfinite(value):
            raise ConfigError(f"{where}: {key}: {value:g} is no finite number")
    try:
        scenario = msgspec.convert(values, Scenario)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", "`").replace(" - at `$`", "")
        raise ConfigError(f"{where}: {text}") from error
    try:
        check_scenario(scenario)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return scenario


def _numbers(value: object, key: str = "") -> Iterator[tuple[str, float]]:
    """All floats in plain values, with the key they stand at."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{key}[{index}]")


def check_scenario(scenario: Scenario) -> None:
    """Everything that can be checked without the model. Raises `ConfigError` that names the key."""
    if not scenario.seeds or len(set(scenario.seeds)) < len(scenario.seeds):
        raise ConfigError(f"seeds: expected at least one, each once, got {list(scenario.seeds)}")
    if scenario.warmup_s >= scenario.duration_s:
        raise ConfigError(
            f"warmup_s {scenario.warmup_s:g} leaves nothing of duration_s {scenario.duration_s:g}"
        )
    if isinstance(parse_arrivals(scenario.arrivals, scenario.duration_s), ClosedArrivals):
        raise ConfigError(f"arrivals: {scenario.arrivals}: closed loops are not simulated")
    scenario.workload(0)
    expanded = scenario.expanded().configurations
    if len(expanded) * len(scenario.seeds) > MOST_CASES:
        raise ConfigError(f"sweep: {len(expanded)} configurations; at most {MOST_CASES} runs are made")
    labels = [configuration.label for configuration in expanded]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"configurations: each name once, got {', '.join(labels)}")
    for configuration in expanded:
        try:
            spec = LayoutSpec.parse(configuration.layout)
        except LayoutRefused as error:
            raise ConfigError(f"configurations: {configuration.label}: layout: {error}") from error
        if spec.devices > scenario.devices:
            raise ConfigError(
                f"configurations: {configuration.label}: {spec} takes {spec.devices} of {scenario.devices} "
                "devices"
            )
        wanted = {shape.tp for shape in spec.shapes}
        if configuration.degrees and not wanted <= set(configuration.degrees):
            raise ConfigError(
                f"configurations: {configuration.label}: degrees {list(configuration.degrees)} lack one of "
                f"its layout {spec}"
            )
        if configuration.mode == "static" and configuration.planner:
            raise ConfigError(f"configurations: {configuration.label}: planner: a static one has none")
        scenario.control(configuration)
