"""Several models on one pool: which model may use which device. Pure.

Each model has an engine that knows all devices of the pool; those of the others are leased as far as it is
concerned (`SetDevices`), so it never puts a domain there. Devices change hands in two steps: a model that
has more than its grant is told how many it may have and leaves the rest; what it has left goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dynamictp.control.arbitration import Demand, arbitrate

Held = Mapping[str, frozenset[int]]


def divide(demands: Sequence[Demand], devices: Collection[int], held: Held, used: Held) -> Held:
    """The devices of each model from now on: disjoint sets.

    `devices` are those that no outside job has. A model keeps what it uses until it has left it, also beyond
    its grant; `used` of a model whose layout is changing are all that it holds. It gives up the devices with
    the highest numbers, and takes the lowest free ones; devices that a demand names are left to it.
    """
    grants = arbitrate(demands, len(devices))
    kept: dict[str, frozenset[int]] = {}
    for demand in demands:
        mine = held.get(demand.model, frozenset()) & frozenset(devices)
        busy = mine & used.get(demand.model, frozenset())
        idle = sorted(_may_have(demand, demands, mine - busy))
        room = len(idle) if demand.at else max(0, grants[demand.model] - len(busy))
        kept[demand.model] = busy | frozenset(idle[:room])
    free = frozenset(devices).difference(*kept.values())
    for demand in sorted(demands, key=lambda demand: -demand.priority):
        allowed = sorted(_may_have(demand, demands, free))
        missing = len(allowed) if demand.at else max(0, grants[demand.model] - len(kept[demand.model]))
        taken = frozenset(allowed[:missing])
        kept[demand.model] |= taken
        free -= taken
    return kept


def allowance(demands: Sequence[Demand], devices: int, held: Held) -> Mapping[str, int]:
    """Devices that each model's planner may count on: its grant, as far as it holds them."""
    grants = arbitrate(demands, devices)
    return {model: min(grant, len(held.get(model, frozenset()))) for model, grant in grants.items()}


def reach(greedy: Demand, demands: Sequence[Demand], devices: int, held: Held, free: int) -> int:
    """Devices that a model could have at once: what arbitration would grant it if its demand were `greedy`
    instead of the one in `demands`, as far as it holds them or nobody does (`free` of `devices`).

    Less than its layout takes means that it has to give devices up.
    """
    asking = [greedy if demand.model == greedy.model else demand for demand in demands]
    grants = arbitrate(asking, devices)
    return min(grants[greedy.model], len(held.get(greedy.model, ())) + free)


def deadlocked(wanted: Held, held: Held, free: Collection[int]) -> tuple[str, ...]:
    """Models that would wait for each other's devices for ever, if each may leave what it holds only once it
    has all of `wanted`; empty: each gets there. Models without named devices are not in `wanted`.
    """
    waiting = dict(wanted)
    spare = set(free)
    while waiting:
        ready = [model for model, devices in waiting.items() if devices <= held[model] | spare]
        if not ready:
            return tuple(waiting)
        for model in ready:
            spare |= held[model]
            spare -= waiting.pop(model)
    return ()


def _may_have(demand: Demand, demands: Sequence[Demand], devices: frozenset[int]) -> frozenset[int]:
    """Of `devices` those it named, or, without names, those that nobody else named."""
    if demand.at:
        return devices & demand.at
    return devices.difference(*(other.at for other in demands if other is not demand))
