"""The most loaded rank, and residency, against the rules of design 3 and D1."""

from __future__ import annotations

import pytest

from dynamictp.cost.shape import Experts, ModelShape
from dynamictp.cost.shares import degrees, residency, share

LLAMA_70B = ModelShape("70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192)
SMOL = ModelShape("smol", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True)


@pytest.mark.parametrize(
    ("tp", "kv_heads", "heads"),
    [
        (1, 8, 1.0),
        (2, 4, 1 / 2),
        (3, 3, 3 / 8),
        (4, 2, 1 / 4),
        (5, 2, 2 / 8),
        (6, 2, 2 / 8),
        (7, 2, 2 / 8),
        (8, 1, 1 / 8),
    ],
)
def test_whole_kv_heads_up_to_their_number(tp: int, kv_heads: int, heads: float) -> None:
    # Eight KV heads over 5, 6 or 7 ranks: someone has two, so attention is no faster than at TP4.
    part = share(LLAMA_70B, tp)
    assert part.kv_heads == kv_heads
    assert part.heads == heads
    assert part.kv == kv_heads / 8


def test_beyond_the_kv_heads_a_rank_keeps_one_and_part_of_its_queries() -> None:
    part = share(LLAMA_70B, 16)
    assert part.kv_heads == 1
    assert part.heads == 4 / 64
    assert part.kv == 1 / 8, "the cache no longer shrinks"


def test_a_shared_memory_divides_attention_by_length() -> None:
    part = share(SMOL, 2, shared_memory=True)
    assert part.heads == part.kv == 0.5
    assert part.qkv == 8 / 15, "15 head units: 8 and 7"
    assert part.out == 18 / 36, "hidden rows in panels of 16"


def test_mlp_is_cut_in_panels() -> None:
    assert share(LLAMA_70B, 3).mlp == 598 / 1792, "1,792 panels: 598, 597, 597"


def test_odd_degrees_are_legal_and_the_widest_is_one_query_head() -> None:
    assert degrees(LLAMA_70B, 8) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert degrees(SMOL, 16, shared_memory=True) == tuple(range(1, 10))


def test_small_experts_bound_the_degree() -> None:
    shape = ModelShape("moe", 2, 512, 64, 8, 128, 1024, 32000, 512, experts=Experts(8, 2, 48))
    assert degrees(shape, 8) == (1, 2, 3), "48 columns are three panels"


def test_residency_of_degrees_4_6_8_is_that_of_d1() -> None:
    held = residency((4, 6, 8), 8)
    assert held.mean == pytest.approx(0.27, abs=0.002)
    assert held.largest == pytest.approx(1 / 3)
    assert held.static == 1 / 8
    assert held.surplus == pytest.approx(0.1458, abs=1e-3)


def test_residency_of_one_degree_has_no_surplus() -> None:
    assert residency((4,), 4).surplus == 0
