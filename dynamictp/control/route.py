"""Which domain takes a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DomainLoad:
    """A serving domain at the time of routing. `rows_free` and `blocks_free` are what admission may take."""

    epoch: int
    devices: int
    running: int
    rows_free: int
    blocks_free: int


@dataclass(frozen=True, slots=True)
class RequestNeed:
    """What a request takes on each domain: `blocks[i]` are the blocks new to domain i's account."""

    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class RouteState:
    """What routing remembers: how many requests it has routed (equal domains take turns)."""

    routed: int = 0


def route(request: RequestNeed, domains: Sequence[DomainLoad], state: RouteState) -> DomainLoad | None:
    """The domain that can hold the request with the least load per device, then the most blocks left per
    device; equals take turns. None when no domain can hold it now.
    """
    best: DomainLoad | None = None
    best_score: tuple[float, float, int] | None = None
    for index, domain in enumerate(domains):
        left = domain.blocks_free - request.blocks[index]
        if not domain.rows_free or left < 0:
            continue
        turn = (index - state.routed) % len(domains)
        score = ((domain.running + 1) / domain.devices, -left / domain.devices, turn)
        if best_score is None or score < best_score:
            best, best_score = domain, score
    return best
