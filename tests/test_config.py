"""Configuration: precedence, and every wrong value named."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamictp.config import GIB, build_config, is_loopback, parse_size, to_yaml
from dynamictp.errors import ConfigError


def test_flag_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 9000\nlayout: tp2\n")
    config = build_config({"layout": "tp1+tp1"}, str(file))
    assert (config.port, config.layout, config.host) == (9000, "tp1+tp1", "127.0.0.1")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("prot: 9000", "prot"),
        ("port: many", "port"),
        ("- port", "mapping"),
        ("", "sets nothing"),
        ("# port: 9000", "sets nothing"),
        ("{}", "sets nothing"),
        ("[]", "mapping"),
        ("port: [", "YAML"),
        ("models: []", "models"),
        ("mode: automatic", "automatic"),
        ("shrink_after_s: -1", "shrink_after_s"),
        ("slo: 5", "slo"),
        ("slo: {ttft: 5}", "ttft"),
        ("shrink_load: 0.7", "shrink_load"),
        ("control: {}", "beside the others"),
        ("weights: int4", "int4"),
        ("numerics: fast", "fast"),
        ("layout: tp0x", "tp0x"),
        ("page_tokens: 24", "page-tokens"),
        ("port: 70000", "port"),
        ("max_num_seqs: 0", "max-num-seqs"),
        ("kv_memory: lots", "lots"),
        ("host: 0.0.0.0", "insecure"),
        ("host: '::'", "api-key-file"),
        ("admin_host: 127.0.0.1", "admin-port"),
        ("admin_port: 8000", "both 8000"),
        ("{admin_port: 9000, admin_host: 0.0.0.0}", "admin-key-file"),
        ("max_waiting: 0", "max-waiting"),
        ("trust_remote_code: true", "never runs code"),
        ("request_timeout_s: -1", "request-timeout-s"),
        ("model: ''", "model"),
        ("port: 2024-99-99", "is not YAML"),
        ("port: !!int x", "is not YAML"),
        ("port: " + "9" * 5000, "is not YAML"),
        ("port: " + "[" * 400, "is not YAML"),
        ("port: " + "- " * 400 + "a", "is not YAML"),
        ("port: 1\nport: 2", "'port' is there twice"),
        ("layout: !!python/object/apply:os.system ['false']", "is not YAML"),
        ("port: 1\n---\nport: 2", "is not YAML"),
        ("port: &a [*a]", "port"),
        ("1: 2", "mapping"),
        ("max_step_ms: .nan", "max-step-ms"),
        ("hang_s: 1e999", "hang_s"),
        ("devices: 1.5", "devices"),
        ("insecure: 1", "insecure"),
        ("layout: null", "layout"),
        ("layout: " + "tp1+" * 100_000 + "tp1", "layout"),
        ('model: "\\ud800"', "served-model-name"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=named):
        build_config({}, str(file))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\x00", b"port: \x80", bytes(range(256))])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "serve.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"serve\.yaml is not YAML"):
        build_config({}, str(file))


PIECES = [
    *("port", "layout", "kv_memory", "hang_s", "host", "1", "1e999", ".nan", "tp1", "~", "0x", "2024-99-99"),
    *(
        ": ",
        "\n",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "&a ",
        "*a",
        "!!int ",
        "!!binary ",
        "'",
        '"',
        "|",
        "%",
        "---",
        "\t",
    ),
]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_file_is_a_configuration_or_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with contextlib.suppress(ConfigError):
        build_config({}, str(file))


@pytest.mark.parametrize(
    "given",
    [
        {"host": "0.0.0.0", "api_key_file": "keys"},
        {"host": "0.0.0.0", "insecure": True},
        {"admin_host": "0.0.0.0", "admin_port": 9000, "admin_key_file": "keys"},
        {"admin_host": "0.0.0.0", "admin_port": 9000, "insecure": True},
    ],
)
def test_a_public_address_needs_keys_or_the_word_insecure(given: dict[str, object]) -> None:
    build_config(given)


def test_where_the_admin_interface_is() -> None:
    alone, apart = build_config({}), build_config({"admin_port": 9000})
    public = build_config({"host": "0.0.0.0", "api_key_file": "keys"})
    assert (alone.admin_on_main, alone.admin_address) == (True, None)
    assert (apart.admin_on_main, apart.admin_address) == (False, ("127.0.0.1", 9000))
    assert (public.admin_on_main, public.admin_address) == (False, None)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        build_config({}, str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GIB),
        ("512M", 512_000_000),
        ("1000000", 1_000_000),
        ("1.5 GiB", 3 * GIB // 2),
        ("2g", 2 * 10**9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "0", "nanG", "infG", "1XB", "9999999TiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_loopback() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


def test_parameters_of_the_control_plane_stand_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "mode: dynamic\nshrink_after_s: 20\nramp_steps: [0.5, 1]\n"
        "slo: {ttft_p99_s: 3, tenants: {gold: {ttft_p99_s: 1}}}\n"
    )
    config = build_config({"min_interval_s": 1.0, "slo": {"tpot_p99_ms": 50.0}}, str(file))
    control = config.control
    assert (config.mode, control.shrink_after_s, control.min_interval_s) == ("dynamic", 20, 1)
    assert control.ramp_steps == (0.5, 1.0)
    assert (control.slo.ttft_p99_s, control.slo.tpot_p99_ms) == (3, 50)
    assert control.slo.of(tenant="gold").ttft_p99_s == 1
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert build_config({}, str(again)) == config


MODELS = """
kv_memory: 4GiB
journal: decisions.jsonl
max_num_seqs: 32
models:
  - {name: big, path: a/b, layout: tp2, priority: 1, kv_share: 3}
  - {name: small, path: demo, max_devices: 1, weights: int8, max_num_seqs: 8}
"""


def test_several_models_stand_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(MODELS)
    config = build_config({}, str(file))
    big, small = (config.of_model(entry) for entry in config.models)
    assert (big.model, big.model_name, big.layout, big.weights, big.max_num_seqs) == (
        "a/b", "big", "tp2", "", 32,
    )  # fmt: skip
    assert (small.model, small.model_name, small.layout, small.weights, small.max_num_seqs) == (
        "demo", "small", "tp1", "int8", 8,
    )  # fmt: skip
    assert (big.journal, small.journal) == ("decisions-big.jsonl", "decisions-small.jsonl")
    assert big.models == ()
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert build_config({}, str(again)) == config


@pytest.mark.parametrize(
    ("models", "named"),
    [
        ("[{name: a}]", "path"),
        ("[{name: a, path: demo}, {name: a, path: demo}]", "'a' is there twice"),
        ("[{name: 'a b', path: demo}]", "can't stand in a layout"),
        ("[{name: 'tp:1', path: demo}]", "can't stand in a layout"),
        ("[{name: a, path: demo, port: 1}]", "port"),
        ("[{name: a, path: demo, layout: tp}]", "model a: layout"),
        ("[{name: a, path: demo, kv_share: 0}]", "kv_share"),
        ("[{name: a, path: demo, max_devices: -1}]", "max_devices"),
        ("[{name: a, path: demo, priority: 5000}]", "priority"),
        ("[{name: a, path: demo, page_tokens: 20}]", "model a: page_tokens"),
        ("[{name: a, path: ''}]", "model a: no model"),
        ("[demo]", "models"),
        ("{a: demo}", "models"),
        (str([{"name": f"m{i}", "path": "demo"} for i in range(9)]), "at most 8 models"),
    ],
)
def test_wrong_models_are_named(tmp_path: Path, models: str, named: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models: {models}")
    with pytest.raises(ConfigError, match=named):
        build_config({}, str(file))


def test_what_is_of_one_model_is_refused_beside_several(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: [{name: a, path: demo}]")
    for key in ("model", "layout", "served_model_name", "chat_template", "calibration"):
        with pytest.raises(ConfigError, match=f"'{key}' stands inside"):
            build_config({key: "tp1"}, str(file))
