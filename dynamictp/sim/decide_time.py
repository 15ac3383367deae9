"""How long a decision takes inside the dead band: `python -m dynamictp.sim.decide_time`.

Two pools: two cores with three legal layouts, eight devices with all sixty-six. Loads are such that nothing
is to be decided; the first decisions, which build the tables, are shown apart.
"""

from __future__ import annotations

import statistics
from time import perf_counter

from dynamictp.control.capacity import CostBook
from dynamictp.control.config import ControlConfig
from dynamictp.control.facts import PoolFacts
from dynamictp.control.planner import decide
from dynamictp.control.state import PlannerState
from dynamictp.control.values import Arrivals, Digest, Outputs, PoolSnapshot, Running
from dynamictp.cost.figures import Figure
from dynamictp.cost.hardware import DeviceFacts, EngineLimits, LinkFacts
from dynamictp.cost.shape import ModelShape
from dynamictp.layout import legal_specs

_DECISIONS = 4000
_WARM = 200


def _figure(value: float) -> Figure:
    return Figure(value, "assumed", "typical")


def _facts(*, gpus: bool) -> PoolFacts:
    if gpus:
        shape = ModelShape("8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
        device = DeviceFacts("gpu", 80e9, _figure(2e12), _figure(312e12))
        link = LinkFacts("nvlink", _figure(300e9), _figure(1.5e-6))
        return PoolFacts(shape, device, EngineLimits(), 400_000, ((2, link),))
    shape = ModelShape("135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True)
    device = DeviceFacts(
        "core", 8e9, _figure(30e9), _figure(235e9), shared_bandwidth=_figure(40e9), shared_memory=True
    )
    limits = EngineLimits(max_batched_tokens=512, max_num_seqs=64, max_step_s=0.1, page_tokens=64)
    return PoolFacts(shape, device, limits, 40_000, ((2, LinkFacts("memory", _figure(15e9), _figure(1e-6))),))


def measure(devices: int, layout: str, rate: float, *, gpus: bool) -> tuple[float, float, float, int]:
    """(first, median, P99 decision in microseconds, decisions other than to stay) of one pool."""
    legal = tuple(map(str, legal_specs(range(1, devices + 1), devices)))
    book, config, state = CostBook(_facts(gpus=gpus)), ControlConfig(), PlannerState()
    good, times, moves = Digest(200, 0.2, 0.3, 0.4), [], 0
    for tick in range(_DECISIONS):
        wobble = tick % 3 - 1
        snapshot = PoolSnapshot(
            0.5 * tick,
            layout,
            devices,
            devices,
            legal,
            arrivals_2s=Arrivals(2.0, round(2 * rate) + wobble, 100.0, 180.0),
            arrivals_10s=Arrivals(10.0, round(10 * rate) + wobble, 100.0, 180.0),
            outputs=Outputs(60, 60.0, 110.0),
            running=Running(4, 130.0, 30.0),
            ttft=good,
            tpot=good,
        )
        began = perf_counter()
        decision, state = decide(snapshot, state, config, book)
        times.append((perf_counter() - began) * 1e6)
        moves += decision.target is not None
    steady = sorted(times[_WARM:])
    return times[0], statistics.median(steady), steady[int(0.99 * len(steady))], moves


def main() -> None:
    for name, devices, layout, rate, gpus in (
        ("2 cores", 2, "tp1", 1.5, False),
        ("8 devices", 8, "tp2", 30.0, True),
    ):
        first, middle, late, moves = measure(devices, layout, rate, gpus=gpus)
        print(
            f"{name}: first {first / 1000:.1f} ms, then median {middle:.0f} us, P99 {late:.0f} us; "
            f"{moves} moves"
        )


if __name__ == "__main__":
    main()
