"""Scenarios for tests: an 8B model on two devices, minutes of traffic."""

from __future__ import annotations

from typing import Any

from dynamictp.sim.scenario import Scenario, build_scenario

STATIC = {"name": "static", "layout": "tp1"}
DYNAMIC = {"name": "dynamic", "layout": "tp1", "mode": "dynamic", "degrees": [1, 2]}


def small(**values: Any) -> Scenario:
    """About 1,200 requests in five minutes."""
    plain: dict[str, Any] = {
        "model": "llama-3.1-8b",
        "device": "a100-80g",
        "devices": 2,
        "arrivals": "steps:0=2,60=8,180=2",
        "duration_s": 300,
        "seeds": [0],
        "longest_tokens": 8192,
        "configurations": [STATIC, DYNAMIC],
        "planner": {"shrink_after_s": 30},
        "switch": {"prepare_s": 0.8, "commit_s": 0.005},
    }
    return build_scenario({**plain, **values})
