"""Dividing the devices of a pool between models. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """What a model wants, in devices."""

    model: str
    wanted: int
    priority: int = 0
    """Higher goes first."""
    least: int = 1
    """Devices below which it can't serve at all."""
    at: frozenset[int] = frozenset()
    """The very devices, where a layout names them; empty: any."""


def arbitrate(demands: Sequence[Demand], devices: int) -> Mapping[str, int]:
    """Devices of each model. Everyone gets its least first, by priority; then by priority what it wants;
    models of equal priority take turns, one device each, the first of `demands` first. What nobody wants
    stays free.
    """
    ordered = sorted(demands, key=lambda demand: -demand.priority)
    grants = dict.fromkeys((demand.model for demand in ordered), 0)
    left = devices
    for demand in ordered:
        if demand.least <= left:
            grants[demand.model] = demand.least
            left -= demand.least
    for priority in sorted({demand.priority for demand in ordered}, reverse=True):
        peers = [d for d in ordered if d.priority == priority and grants[d.model]]
        while left and (hungry := [d for d in peers if grants[d.model] < d.wanted]):
            poorest = min(hungry, key=lambda d: grants[d.model] / d.wanted)
            grants[poorest.model] += 1
            left -= 1
    return grants
