"""What the most loaded rank of a degree has to do. Pure.

There is a barrier after each tensor class, so a step is as slow as the largest part of every class, and an
uneven cut costs time as well as memory. The cuts are those of `dynamictp.ranges` (design 3).
"""

from __future__ import annotations

from functools import cache

import msgspec

from dynamictp.cost.shape import ModelShape
from dynamictp.ranges import cut, head_ranges, hull, legal_degrees, panels


class RankShare(msgspec.Struct, frozen=True):
    """Largest part of each tensor class over the ranks of one degree, as fractions of the class.

    `qkv` and `out` are the attention projections, `heads` the attention itself, `kv` the cached heads.
    """

    qkv: float
    out: float
    heads: float
    kv: float
    mlp: float
    down: float
    experts: float
    vocab: float
    kv_heads: int
    """KV heads of that rank; all of them where the memory is shared."""


def share(shape: ModelShape, tp: int, *, shared_memory: bool = False) -> RankShare:
    """Parts of the most loaded rank of `tp`.

    Separate memories: whole KV heads with their query heads up to as many ranks as KV heads; beyond, one KV
    head per rank and a part of its query heads. Shared memory: head units cut evenly, attention divided by
    KV length, hidden rows for the output and down projections.
    """
    expert = shape.experts.intermediate if shape.experts is not None else shape.intermediate
    mlp, vocab, experts = (_part(panels(units), tp) for units in (shape.intermediate, shape.vocab, expert))
    if shared_memory:
        hidden = _part(panels(shape.hidden), tp)
        qkv = _part(shape.query_heads + 2 * shape.kv_heads, tp)
        return RankShare(qkv, hidden, 1 / tp, 1 / tp, mlp, hidden, experts, vocab, shape.kv_heads)
    query, kv = _heads(shape.kv_heads, shape.group, tp)
    units = shape.query_heads + 2 * shape.kv_heads
    heads = query / shape.query_heads
    cached = 1.0 if shape.latent is not None else kv / shape.kv_heads
    return RankShare((query + 2 * kv) / units, heads, heads, cached, mlp, mlp, experts, vocab, kv)


class _Heads(msgspec.Struct, frozen=True):
    kv_heads: int
    group: int


@cache
def _heads(kv_heads: int, group: int, tp: int) -> tuple[int, int]:
    ranks = [head_ranges(_Heads(kv_heads, group), tp, rank) for rank in range(tp)]
    return max(len(r.query) for r in ranks), max(len(r.kv) for r in ranks)


def _part(units: int, tp: int) -> float:
    return -(-units // tp) / units


def degrees(shape: ModelShape, devices: int, *, shared_memory: bool = False) -> tuple[int, ...]:
    """Degrees that the range rules allow on up to `devices` devices, odd ones included."""
    legal = legal_degrees(shape, "exact" if shared_memory else "fast", devices=devices)
    widest = panels(shape.experts.intermediate) if shape.experts is not None else devices
    return tuple(degree for degree in legal if degree <= widest)


class Residency(msgspec.Struct, frozen=True):
    """What devices must hold to serve several degrees (D1). Fractions of the model's cut tensors."""

    mean: float
    largest: float
    static: float
    """Share of a device of the widest domain alone, 1 / widest degree: what static TP would hold."""

    @property
    def surplus(self) -> float:
        """Mean memory beyond static TP, as a fraction of the model: shown, never hidden."""
        return self.mean - self.static


def residency(degrees_used: tuple[int, ...], devices: int, units: int | None = None) -> Residency:
    """Hull per device of its ranges under every degree that may be used on `devices` devices.

    Device r is rank ⌊r·d/devices⌋ of the domain of degree d, so neighbours hold neighbouring ranges and
    narrow domains tile the node. `units` is the number of units of the class (None: a fine cut). The case of
    D1: 8 devices, degrees 4, 6, 8 → 0.27 on average, 0.33 at most.
    """
    fine = units or devices * _product(degrees_used)
    held = [
        len(hull(cut(fine, degree, device * degree // devices) for degree in degrees_used)) / fine
        for device in range(devices)
    ]
    return Residency(sum(held) / devices, max(held), 1 / max(degrees_used))


def _product(values: tuple[int, ...]) -> int:
    product = 1
    for value in values:
        product *= value
    return product
