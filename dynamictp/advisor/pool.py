"""The planner's facts from what the advisor knows: a machine, its links, a calibration."""

from __future__ import annotations

from collections.abc import Sequence

from dynamictp.advisor.machine import Machine
from dynamictp.advisor.placement import place_replicas
from dynamictp.control.facts import PoolFacts
from dynamictp.cost.calibration import Calibration
from dynamictp.cost.hardware import Assumptions, EngineLimits, LinkFacts
from dynamictp.cost.shape import ModelShape


def pool_facts(
    shape: ModelShape,
    machine: Machine,
    *,
    degrees: Sequence[int],
    limits: EngineLimits,
    assumptions: Assumptions,
    kv_tokens_per_device: float,
    calibration: Calibration | None = None,
) -> PoolFacts:
    """Facts of a pool of the machine's devices. The link of a degree is that of its first placement.

    A calibration's ratios refer to the device as it was then: build `machine` from `measured_by(calibration)`
    where that gives something (see `dynamictp.advisor.local`).
    """
    links: list[tuple[int, LinkFacts]] = []
    for tp in sorted(set(degrees)):
        placed = place_replicas(machine, tp, 1) if 1 < tp <= machine.per_node else ()
        if placed and placed[0].link is not None:
            links.append((tp, placed[0].link))
    return PoolFacts(
        shape=shape,
        device=machine.device,
        limits=limits,
        kv_tokens_per_device=kv_tokens_per_device,
        links=tuple(links),
        assumptions=assumptions,
        calibration=calibration,
    )
