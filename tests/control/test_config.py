"""Parameters: ranges, conditions between them, overrides, reload."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamictp.control.config import ControlConfig, Slo, build_control, parameters, reloaded
from dynamictp.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"unheard_of": 1}, "unheard_of"),
        ({"ewma_alpha": 0}, "ewma_alpha"),
        ({"target_utilisation": "high"}, "target_utilisation"),
        ({"slo": {"tpot_p99_ms": -1}}, "slo.tpot_p99_ms"),
        ({"slo": {"classes": {"chat": {"ttft": 1}}}}, "ttft"),
        ({"shrink_load": 0.6}, "shrink_load"),
        ({"min_devices": 3, "max_devices": 2}, "max_devices"),
        ({"ramp_steps": [0.5, 0.2, 1.0]}, "ramp_steps"),
        ({"ramp_steps": [0.5]}, "ramp_steps"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        build_control(values)


def test_a_tenants_targets_go_over_a_classs_over_everyones() -> None:
    slo = build_control(
        {
            "slo": {
                "ttft_p99_s": 1.0,
                "classes": {"rag": {"ttft_p99_s": 5.0, "ttft_per_token_ms": 1.0}},
                "tenants": {"gold": {"tpot_p99_ms": 50.0, "ttft_p99_s": 0.5}},
            }
        }
    ).slo
    assert slo.of("chat", "free").ttft_target_s(1000) == 1.0
    assert slo.of("rag").ttft_target_s(1000) == pytest.approx(6.0)
    both = slo.of("rag", "gold")
    assert (both.ttft_p99_s, both.ttft_per_token_ms, both.tpot_target_s) == (0.5, 1.0, 0.05)


def test_a_reload_changes_what_may_change() -> None:
    old = ControlConfig()
    assert reloaded(old, build_control({"slo": {"ttft_p99_s": 1}})).slo.ttft_p99_s == 1
    with pytest.raises(ConfigError, match="interval_s"):
        reloaded(old, build_control({"interval_s": 1.0}))


def test_every_parameter_has_an_effect_and_a_default_in_its_range() -> None:
    fields = {name for name in ControlConfig.__struct_fields__ if name != "slo"}
    assert {p.name for p in parameters(ControlConfig)} == fields
    assert {p.name for p in parameters(Slo)} == set(Slo.__struct_fields__)
    plain = msgspec.to_builtins(ControlConfig())
    assert msgspec.convert(plain, ControlConfig) == ControlConfig()
