"""Scenario files: strict, and errors that name the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dynamictp.errors import ConfigError
from dynamictp.sim.machine import capacities_of, setup_of
from dynamictp.sim.scenario import read_scenario
from tests.sim.scenarios import DYNAMIC, STATIC, small

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_can_be_simulated(path: Path) -> None:
    scenario = read_scenario(path)
    for configuration in scenario.expanded().configurations:
        setup = setup_of(scenario, configuration, 0)
        assert setup.facts.kv_tokens_per_device * setup.devices > 8192


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"modle": "x"}, "modle"),
        ({"duration_s": -1}, "`duration_s`"),
        ({"arrivals": "poisson"}, "need rate="),
        ({"arrivals": "closed:users=3"}, "closed loops"),
        ({"mix": "nonsense"}, "nonsense"),
        ({"warmup_s": 300}, "warmup_s"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"planner": {"nonsense": 1}}, "nonsense"),
        ({"planner": {"slo": {}}}, "slo"),
        ({"configurations": [STATIC, STATIC]}, "each name once"),
        ({"configurations": [{"layout": "tp0"}]}, "layout"),
        ({"configurations": [{"layout": "tp3"}]}, "3 of 2 devices"),
        ({"configurations": [{**DYNAMIC, "degrees": [2]}]}, "degrees"),
        ({"configurations": [{**STATIC, "planner": {"shrink_after_s": 1}}]}, "a static one has none"),
        ({"configurations": [STATIC], "sweep": {"shrink_after_s": [1]}}, "not static"),
        ({"slo": {"ttft_p99_s": 0}}, "`slo.ttft_p99_s`"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        small(**values)


def test_a_model_that_does_not_fit_is_refused() -> None:
    scenario = small(model="llama-3.1-70b")
    with pytest.raises(ConfigError, match=r"static: .* at tp1 on 2 x a100-80g: infeasible"):
        setup_of(scenario, scenario.configurations[0], 0)


def test_paths_are_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "card.yaml").write_text("name: card\nmemory_gib: 80\nbandwidth_gbps: 2000\ntflops: 300\n")
    file = tmp_path / "scenario.yaml"
    file.write_text("model: llama-3.1-8b\ndevice: card.yaml\nconfigurations: [{layout: tp1}]\n")
    scenario = read_scenario(file)
    assert setup_of(scenario, scenario.configurations[0], 0).facts.device.name == "card"


def test_dynamic_mode_pays_for_its_memory() -> None:
    """30 % of the pages stay free, weights of both degrees are resident; `memory` compares like with like."""
    scenario = small(
        configurations=[STATIC, DYNAMIC, {"name": "as dynamic", "layout": "tp1", "memory": "dynamic"}]
    )
    static, dynamic, like = (setup_of(scenario, c, 0).facts for c in scenario.configurations)
    assert dynamic.kv_tokens_per_device < 0.72 * static.kv_tokens_per_device
    assert static.kv_tokens_per_device > like.kv_tokens_per_device >= dynamic.kv_tokens_per_device


def test_a_wider_domain_carries_more() -> None:
    scenario = small()
    carried = capacities_of(scenario, scenario.configurations[1])
    assert 1.2 < carried[2] / carried[1] < 2.2


def test_a_sweep_tries_every_combination() -> None:
    scenario = small(sweep={"target_utilisation": [0.45, 0.6], "shrink_after_s": [10, 60]})
    expanded = scenario.expanded()
    assert len(expanded.configurations) == 2 + 4
    last = expanded.configurations[-1]
    assert last.label == "dynamic (target_utilisation=0.6, shrink_after_s=60)"
    assert expanded.control(last).target_utilisation == 0.6
    assert not expanded.sweep


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"duration_s": math.inf}, r"duration_s: inf is no finite number"),
        ({"switch": {"prepare_s": math.nan}}, r"switch\.prepare_s: nan is no finite number"),
        ({"sweep": {"target_utilisation": [0.5, math.inf]}}, r"sweep\.target_utilisation\[1\]: inf"),
        ({"switch": {"prepare_s": -1.0}}, r"`switch\.prepare_s`"),
        ({"switch": {"prepared_s": 1.0}}, r"unknown field `prepared_s`"),
    ],
)
def test_times_that_make_no_sense_are_refused(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        small(**values)
