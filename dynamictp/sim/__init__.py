"""Serving on virtual time: an event loop, domains whose steps take what the cost model says, and the
production policies (planner, router, reconciler, admission) deciding. No process, no torch, no wall clock.

`simulate(read_scenario(path))` is all there is to know; docs/simulator.md describes scenarios.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamictp.sim.checks import SimulationError
    from dynamictp.sim.outcome import Outcome
    from dynamictp.sim.run import simulate
    from dynamictp.sim.scenario import Scenario, build_scenario, read_scenario

__all__ = ["Outcome", "Scenario", "SimulationError", "build_scenario", "read_scenario", "simulate"]

_WHERE = {
    "Outcome": "outcome",
    "Scenario": "scenario",
    "SimulationError": "checks",
    "build_scenario": "scenario",
    "read_scenario": "scenario",
    "simulate": "run",
}


def __getattr__(name: str) -> Any:
    """The API is imported when it is used: it needs the advisor, which tests of the core do not."""
    from importlib import import_module  # noqa: PLC0415

    if name not in _WHERE:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
