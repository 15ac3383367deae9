"""What it costs to change from the recommendation to another candidate, and when it pays. Pure."""

from __future__ import annotations

import msgspec

from dynamictp.advisor.search import Candidate, Plan
from dynamictp.cost.hardware import GB
from dynamictp.cost.shares import residency
from dynamictp.cost.switching import SwitchPrice, break_even_s, switch_price

_SHOWN = 3


class SwitchOption(msgspec.Struct, frozen=True):
    """A change of configuration."""

    source: str
    target: str
    price: SwitchPrice
    extra_weight_bytes: float
    """Weights a device must hold beyond its share of the source (D1), or fetch before the switch."""
    gain_devices: float
    """Devices' worth of serving won: freed, or as added capacity."""
    break_even_s: float
    """Infinite when the change wins nothing."""


def switch_options(plan: Plan) -> tuple[SwitchOption, ...]:
    """From the recommendation to the next candidates of other degrees, without stages."""
    best = plan.best
    if best is None or best.pp > 1:
        return ()
    seen = {(best.tp, best.replicas)}
    options = []
    for other in plan.candidates:
        if other.pp > 1 or not other.runs or (other.tp, other.replicas) in seen:
            continue
        if other.tp in {tp for tp, _ in seen}:
            continue
        seen.add((other.tp, other.replicas))
        options.append(_option(plan, best, other))
        if len(options) == _SHOWN:
            break
    return tuple(options)


def _option(plan: Plan, source: Candidate, target: Candidate) -> SwitchOption:
    question = plan.question
    shape, machine = question.shape, question.machine
    here, there = source.performance, target.performance
    assert here is not None
    assert there is not None
    devices = max(source.devices, target.devices)
    held = residency((source.tp, target.tp), devices)
    missing = (
        0.0 if machine.device.shared_memory else max(0.0, held.mean - 1 / source.tp) * shape.weight_bytes
    )
    narrow, wide = sorted((source.tp, target.tp))
    running = here.batch * source.replicas * shape.kv_bytes(question.workload.running_context)
    link = source.placement[0].link or target.placement[0].link
    price = switch_price(
        devices=devices,
        shared_memory=machine.device.shared_memory,
        missing_weight_bytes=0.0,
        running_kv_bytes=running,
        kv_stays=narrow / wide,
        bandwidth=link.bandwidth.value if link is not None else machine.device.pcie_gbps * GB,
    )
    freed = source.devices - target.devices
    added = (there.capacity.estimate / here.capacity.estimate - 1) * source.devices
    as_good = target.stable and (target.meets_targets or not source.meets_targets)
    gain = float(freed) if freed > 0 and as_good else max(0.0, added)
    return SwitchOption(
        source=source.name,
        target=target.name,
        price=price,
        extra_weight_bytes=missing,
        gain_devices=gain,
        break_even_s=break_even_s(price, gain),
    )
