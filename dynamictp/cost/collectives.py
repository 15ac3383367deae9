"""Time of collectives from volume, bandwidth and latency (Hockney's α–β model). Pure.

Ring and tree forms: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005); Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009). Two all-reduces per
layer and pass: Shoeybi et al., "Megatron-LM" (2019). Bytes, seconds, bytes per second.
"""

from __future__ import annotations

import math

from dynamictp.cost.figures import Corner
from dynamictp.cost.hardware import Assumptions, LinkFacts
from dynamictp.cost.shape import ModelShape

COLLECTIVES_PER_LAYER = 2
"""Row-parallel output and down projections end in an all-reduce each (Megatron-LM, figure 4)."""
EXCHANGES_PER_LAYER = 5
"""Shared memory: queries and pages, attention output, o_proj, gated MLP, down_proj (design 4)."""


def ring_factor(ranks: int) -> float:
    """Bytes each rank sends per byte reduced, 2(n−1)/n: a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) / ranks


def ring_all_reduce_s(nbytes: float, ranks: int, bandwidth: float, hop_s: float) -> float:
    """2(n−1) hops of nbytes/n each."""
    if ranks == 1:
        return 0.0
    return ring_factor(ranks) * nbytes / bandwidth + 2 * (ranks - 1) * hop_s


def tree_all_reduce_s(nbytes: float, ranks: int, bandwidth: float, hop_s: float) -> float:
    """Reduce up and broadcast down a pipelined double binary tree: 2⌈log₂n⌉ hops, 2·nbytes per rank."""
    if ranks == 1:
        return 0.0
    return 2 * nbytes / bandwidth + 2 * math.ceil(math.log2(ranks)) * hop_s


def one_shot_all_reduce_s(nbytes: float, ranks: int, bandwidth: float, hop_s: float) -> float:
    """Every rank reads the whole vector of every peer at once and adds: 1 hop, (n−1)·nbytes read."""
    if ranks == 1:
        return 0.0
    return (ranks - 1) * nbytes / bandwidth + hop_s


def all_gather_s(nbytes: float, ranks: int, bandwidth: float, hop_s: float) -> float:
    """Ring: n−1 hops; `nbytes` is the gathered size, of which a rank receives (n−1)/n."""
    if ranks == 1:
        return 0.0
    return (ranks - 1) / ranks * nbytes / bandwidth + (ranks - 1) * hop_s


def all_reduce_s(
    nbytes: float, ranks: int, link: LinkFacts, assumptions: Assumptions, corner: Corner
) -> float:
    """The fastest form for this size, as a collectives library chooses, plus the start of its kernel."""
    if ranks == 1:
        return 0.0
    bandwidth = link.bandwidth.at(corner) * assumptions.link_efficiency.at(corner)
    hop_s = link.latency_s.at(corner)
    forms = [
        ring_all_reduce_s(nbytes, ranks, bandwidth, hop_s),
        tree_all_reduce_s(nbytes, ranks, bandwidth, hop_s),
    ]
    if link.direct:
        forms.append(one_shot_all_reduce_s(nbytes, ranks, bandwidth, hop_s))
    return min(forms) + assumptions.collective_base_s.at(corner)


def send_s(nbytes: float, link: LinkFacts, assumptions: Assumptions, corner: Corner) -> float:
    """One message between pipeline stages."""
    bandwidth = link.bandwidth.at(corner) * assumptions.link_efficiency.at(corner)
    return nbytes / bandwidth + link.latency_s.at(corner) + assumptions.collective_base_s.at(corner)


def activation_bytes(shape: ModelShape, tokens: float, bytes_per_element: float = 2.0) -> float:
    """Message of one collective, tokens × hidden × bytes (A3); also what crosses a pipeline boundary."""
    return tokens * shape.hidden * bytes_per_element


def tp_volume_bytes(shape: ModelShape, tp: int, tokens: float, bytes_per_element: float = 2.0) -> float:
    """Bytes each rank sends for a pass over `tokens` tokens: 2 ring all-reduces per layer."""
    reduced = COLLECTIVES_PER_LAYER * shape.layers * activation_bytes(shape, tokens, bytes_per_element)
    return reduced * ring_factor(tp)


def bubble_fraction(stages: int, micro_batches: float) -> float:
    """Idle part of a pipeline, (P−1)/(M+P−1): GPipe (Huang et al. 2019); Narayanan et al. 2021 state it as
    (P−1)/M of the ideal time, which is the same quantity relative to the busy part.
    """
    return (stages - 1) / (micro_batches + stages - 1)
