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
    the highest numbers, and takes the lowest free ones.
    """
    grants = arbitrate(demands, len(devices))
    kept: dict[str, frozenset[int]] = {}
    for demand in demands:
        mine = held.get(demand.model, frozenset()) & frozenset(devices)
        busy = sorted(mine & used.get(demand.model, frozenset()))
        idle = sorted(mine - frozenset(busy))
        kept[demand.model] = frozenset(busy + idle[: max(0, grants[demand.model] - len(busy))])
    free = sorted(frozenset(devices).difference(*kept.values()))
    for demand in sorted(demands, key=lambda demand: -demand.priority):
        missing = grants[demand.model] - len(kept[demand.model])
        if missing > 0:
            kept[demand.model] |= frozenset(free[:missing])
            del free[:missing]
    return kept


def allowance(demands: Sequence[Demand], devices: int, held: Held) -> Mapping[str, int]:
    """Devices that each model's planner may count on: its grant, as far as it holds them."""
    grants = arbitrate(demands, devices)
    return {model: min(grant, len(held.get(model, frozenset()))) for model, grant in grants.items()}
