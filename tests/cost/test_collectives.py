"""Closed forms of communication against hand-worked examples."""

from __future__ import annotations

import pytest

from dynamictp.cost.collectives import (
    activation_bytes,
    all_gather_s,
    all_reduce_s,
    bubble_fraction,
    one_shot_all_reduce_s,
    ring_all_reduce_s,
    ring_factor,
    send_s,
    tp_volume_bytes,
    tree_all_reduce_s,
)
from dynamictp.cost.figures import Corner, Figure
from dynamictp.cost.hardware import Assumptions, LinkFacts
from dynamictp.cost.shape import ModelShape

GPT3 = ModelShape("gpt-3", 96, 12288, 96, 96, 128, 49152, 51200, 2048)
FIXED = Assumptions(
    link_efficiency=Figure(0.5, "assumed", "test", ideal=1.0),
    collective_base_s=Figure(1e-5, "assumed", "test"),
)


def link(bandwidth: float, latency: float, *, direct: bool = False) -> LinkFacts:
    return LinkFacts("test", Figure(bandwidth, "assumed", "test"), Figure(latency, "assumed", "test"), direct)


def test_ring_moves_twice_the_vector_less_one_part() -> None:
    # Patarasuk and Yuan 2009: 2(n-1)/n. Eight ranks: 7/4.
    assert ring_factor(2) == 1
    assert ring_factor(8) == 1.75


def test_ring_of_eight_by_hand() -> None:
    # 100 MB at 25 GB/s: 1.75 x 4 ms = 7 ms, and 14 hops of 2 us.
    assert ring_all_reduce_s(100e6, 8, 25e9, 2e-6) == pytest.approx(7e-3 + 28e-6)


def test_tree_pays_fewer_hops_and_more_bytes() -> None:
    assert tree_all_reduce_s(100e6, 8, 25e9, 2e-6) == pytest.approx(8e-3 + 6 * 2e-6)
    assert tree_all_reduce_s(1e3, 8, 25e9, 2e-6) < ring_all_reduce_s(1e3, 8, 25e9, 2e-6)


def test_one_shot_pays_one_hop() -> None:
    assert one_shot_all_reduce_s(16e3, 8, 25e9, 2e-6) == pytest.approx(7 * 16e3 / 25e9 + 2e-6)


def test_all_gather_receives_all_but_its_own_part() -> None:
    assert all_gather_s(80e6, 8, 20e9, 1e-6) == pytest.approx(70e6 / 20e9 + 7e-6)


@pytest.mark.parametrize("form", [ring_all_reduce_s, tree_all_reduce_s, one_shot_all_reduce_s, all_gather_s])
def test_a_single_rank_communicates_nothing(form: object) -> None:
    assert callable(form)
    assert form(1e9, 1, 1e9, 1e-3) == 0


def test_the_library_takes_the_fastest_form() -> None:
    # Small: one hop and the kernel's start. Large: the ring's bytes at half of the link.
    small = all_reduce_s(1e3, 8, link(50e9, 1e-6, direct=True), FIXED, Corner.EXPECTED)
    assert small == pytest.approx(7 * 1e3 / 25e9 + 1e-6 + 1e-5)
    large = all_reduce_s(1e9, 8, link(50e9, 1e-6), FIXED, Corner.EXPECTED)
    assert large == pytest.approx(1.75 * 1e9 / 25e9 + 14e-6 + 1e-5)


def test_the_ideal_corner_is_never_slower() -> None:
    expected = all_reduce_s(1e6, 4, link(50e9, 1e-6), FIXED, Corner.EXPECTED)
    assert all_reduce_s(1e6, 4, link(50e9, 1e-6), FIXED, Corner.IDEAL) < expected


def test_megatron_volume_of_gpt_3() -> None:
    # Megatron-LM: two all-reduces of tokens x hidden per layer and pass. 2,048 tokens x 12,288 x 2 bytes =
    # 50.3 MB; x 2 x 96 layers = 9.66 GB reduced; TP8 sends 1.75 of it.
    assert activation_bytes(GPT3, 2048) == 50_331_648
    assert tp_volume_bytes(GPT3, 8, 2048) == pytest.approx(1.75 * 2 * 96 * 50_331_648)


def test_a_send_is_latency_and_bytes() -> None:
    assert send_s(1e6, link(10e9, 5e-6), FIXED, Corner.EXPECTED) == pytest.approx(1e6 / 5e9 + 5e-6 + 1e-5)


def test_pipeline_bubble() -> None:
    # GPipe, figure 2: (P-1)/(M+P-1). Four stages: 3/7 idle with 4 micro-batches, 3/35 with 32.
    assert bubble_fraction(4, 4) == 3 / 7
    assert bubble_fraction(4, 32) == 3 / 35
    assert bubble_fraction(1, 8) == 0
