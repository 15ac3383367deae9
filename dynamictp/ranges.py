"""Which rows of a model each rank serves, and which a device must hold. Pure functions.

Every tensor class (each projection's output rows, MLP columns, vocabulary) is cut evenly by itself, in
units: head units for queries, keys and values, panels of 16 rows for all else. In shared memory (a CPU
node) no rank owns a head, any degree is legal while no rank's range is empty, and a page table does not
depend on the degree. In separate memories a rank owns whole KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dynamictp.facts import PANEL_ROWS, ModelFacts

Numerics = Literal["exact", "fast"]


class HeadCounts(Protocol):
    """The part of a model's facts that decides how heads are cut."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def group(self) -> int: ...


class Sizes(HeadCounts, Protocol):
    """The part of a model's facts that decides which degrees are legal."""

    @property
    def query_heads(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def intermediate(self) -> int: ...

    @property
    def vocab(self) -> int: ...


@dataclass(frozen=True, order=True)
class Range:
    """Half-open interval [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def contains(self, other: Range) -> bool:
        """An empty range is contained in every range."""
        return not len(other) or (self.start <= other.start and other.stop <= self.stop)

    def scaled(self, unit: int, limit: int | None = None) -> Range:
        """The same range in elements, for units of `unit` elements; cut off at `limit`."""
        stop = self.stop * unit if limit is None else min(self.stop * unit, limit)
        return Range(min(self.start * unit, stop), stop)


def cut(units: int, parts: int, part: int) -> Range:
    """Part `part` of `units` cut into `parts`: sizes differ by at most one unit, larger ones spread."""
    return Range(-(-part * units // parts), -(-(part + 1) * units // parts))


def panels(rows: int) -> int:
    """Panels that hold `rows` output rows (the last one padded with zeros)."""
    return -(-rows // PANEL_ROWS)


@dataclass(frozen=True)
class ShardRanges:
    """Output rows of each tensor class that one rank computes, in rows of the canonical weights.

    `qkv` counts rows of the fused projection (query heads, K heads, V heads), `mlp` rows of gate and up,
    `hidden` rows of the output and down projections, `vocab` rows of the LM head.
    """

    qkv: Range
    hidden: Range
    mlp: Range
    vocab: Range


def shard_ranges(facts: ModelFacts, tp: int, rank: int) -> ShardRanges:
    """Ranges of `rank` of `tp` in shared memory (design 3)."""
    return ShardRanges(
        qkv=cut(facts.qkv_units, tp, rank).scaled(facts.head_dim),
        hidden=cut(panels(facts.hidden), tp, rank).scaled(PANEL_ROWS, facts.hidden),
        mlp=cut(panels(facts.intermediate), tp, rank).scaled(PANEL_ROWS, facts.intermediate),
        vocab=cut(panels(facts.vocab), tp, rank).scaled(PANEL_ROWS, facts.vocab),
    )


@dataclass(frozen=True)
class HeadRanges:
    """Heads of one rank in separate memories."""

    query: Range
    kv: Range


def head_ranges(facts: HeadCounts, tp: int, rank: int) -> HeadRanges:
    """Heads of `rank` of `tp` when every rank has its own memory (design 3).

    Up to as many ranks as KV heads, a rank has whole KV heads with all their query heads. Beyond that it
    has exactly one KV head and a part of its query heads.
    """
    if tp <= facts.kv_heads:
        kv = cut(facts.kv_heads, tp, rank)
        return HeadRanges(kv.scaled(facts.group), kv)
    head = rank * facts.kv_heads // tp
    first = -(-head * tp // facts.kv_heads)
    sharers = -(-(head + 1) * tp // facts.kv_heads) - first
    part = cut(facts.group, sharers, rank - first)
    offset = head * facts.group
    return HeadRanges(Range(offset + part.start, offset + part.stop), Range(head, head + 1))


def legal_degrees(
    facts: Sizes, numerics: Numerics = "exact", *, devices: int, communicators: bool = True
) -> tuple[int, ...]:
    """Degrees at which every rank has work, up to `devices`. Without communicators only 1.

    `exact` cuts the output rows of every class, hidden rows among them. `fast` cuts the output and down
    projections along K, by query heads and MLP columns, so hidden rows set no bound. Beyond the KV heads a
    rank of `fast` has part of one KV head's query heads: with equal groups that works up to one query head a
    rank, odd degrees included.
    """
    if not communicators:
        return (1,)
    widest = min(facts.query_heads, panels(facts.intermediate), panels(facts.vocab))
    if numerics == "exact":
        widest = min(widest, panels(facts.hidden))
    return tuple(range(1, min(widest, devices) + 1))


def hull(ranges: Iterable[Range]) -> Range:
    """Smallest interval that covers all given ranges (empty ones do not count)."""
    kept = [r for r in ranges if len(r)]
    if not kept:
        return Range(0, 0)
    return Range(min(r.start for r in kept), max(r.stop for r in kept))


def can_serve(resident: Range, needed: Range) -> bool:
    """A device serves a slice if it holds a superset of it."""
    return resident.contains(needed)


def residency(units: int, ranks: Mapping[int, int]) -> Range:
    """What a device must hold to be rank `ranks[degree]` of every degree: the hull of those ranges."""
    return hull(cut(units, degree, rank) for degree, rank in ranks.items())


def surplus(units: int, resident: Range, degree: int) -> float:
    """Memory a device holds beyond the mean share at `degree`, as a fraction of the model."""
    return len(resident) / units - 1 / degree


def member_order(units: int, degree: int, resident: Sequence[Range]) -> tuple[int, ...] | None:
    """Devices for ranks 0..degree-1 such that each holds its rank's range, or None when there is no such
    order. `resident[d]` is what device d holds, in units.

    The ranks that a device can serve are consecutive, so a greedy choice is a maximum matching (Glover
    1967): every rank takes, of the devices that hold its range, the one whose last possible rank comes
    first, and of equal ones the lower device.
    """
    if degree > units:  # some rank would have nothing to do
        return None
    needed = [cut(units, degree, rank) for rank in range(degree)]
    last_rank = [
        max((rank for rank, wanted in enumerate(needed) if can_serve(held, wanted)), default=-1)
        for held in resident
    ]
    order: list[int] = []
    free = set(range(len(resident)))
    for wanted in needed:
        able = [device for device in free if can_serve(resident[device], wanted)]
        if not able:
            return None
        device = min(able, key=lambda d: (last_rank[d], d))
        free.remove(device)
        order.append(device)
    return tuple(order)
