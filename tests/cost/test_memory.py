"""Memory plans against sums worked by hand."""

from __future__ import annotations

import pytest

from dynamictp.cost.figures import Figure
from dynamictp.cost.hardware import GIB, DeviceFacts, EngineLimits
from dynamictp.cost.memory import activation_bytes, memory_plan, rank_weight_bytes, sequence_tokens
from dynamictp.cost.shape import ModelShape

LLAMA_70B = ModelShape("70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192)
TIED = ModelShape("tied", 4, 512, 8, 8, 64, 2048, 32000, 2048, tied_head=True)
A100 = DeviceFacts("a100", 80 * GIB, Figure(2.039e12, "data sheet", "x"), Figure(312e12, "data sheet", "x"))


def test_weights_of_a_rank_at_tp4() -> None:
    parts = LLAMA_70B.parts
    cut = (parts.attention + parts.mlp + parts.head) * 2 / 4
    assert rank_weight_bytes(LLAMA_70B, 4) == cut + (parts.embedding + parts.norms) * 2
    assert rank_weight_bytes(LLAMA_70B, 4) == pytest.approx(36.86e9, rel=1e-3)


def test_odd_degrees_are_charged_their_fullest_rank() -> None:
    # TP3 of 8 KV heads: 3 of 8 heads, not a third.
    parts = LLAMA_70B.parts
    even = (parts.attention + parts.mlp + parts.head) * 2 / 3 + (parts.embedding + parts.norms) * 2
    surplus = rank_weight_bytes(LLAMA_70B, 3) - even
    assert surplus == pytest.approx(parts.attention * 2 * (3 / 8 - 1 / 3), rel=0.05)


def test_a_tied_head_costs_nothing_more() -> None:
    parts = TIED.parts
    assert rank_weight_bytes(TIED, 2) == (parts.attention + parts.mlp) + (parts.norms + parts.embedding) * 2


def test_stages_divide_layers() -> None:
    whole, half = rank_weight_bytes(LLAMA_70B, 4), rank_weight_bytes(LLAMA_70B, 4, 2)
    parts = LLAMA_70B.parts
    assert half == pytest.approx(
        (parts.attention + parts.mlp + parts.norms * 4) * 2 / 8 + parts.embedding * 2
    )
    assert half < whole


def test_kv_tokens_are_what_is_left() -> None:
    plan = memory_plan(LLAMA_70B, A100, 4, limits=EngineLimits())
    assert plan.kv_per_token == 327_680 / 4
    parts = plan.weights + plan.context + plan.communicators + plan.activations + plan.reserve
    assert plan.fixed == parts
    assert plan.kv_tokens == int((80 * GIB - parts) / (327_680 / 4))
    assert plan.kv_tokens == pytest.approx(517_000, rel=0.02)


def test_weights_that_do_not_fit() -> None:
    plan = memory_plan(LLAMA_70B, A100, 1)
    assert not plan.weights_fit
    assert plan.kv_tokens == 0


def test_beyond_the_kv_heads_every_rank_keeps_a_whole_head() -> None:
    assert memory_plan(LLAMA_70B, A100, 8).kv_per_token == memory_plan(LLAMA_70B, A100, 16).kv_per_token


def test_dynamic_mode_keeps_room_for_a_switch() -> None:
    static = memory_plan(LLAMA_70B, A100, 4)
    limits = EngineLimits(kv_cap=0.7, communicators=3)
    dynamic = memory_plan(LLAMA_70B, A100, 4, limits=limits, surplus_fraction=0.1)
    assert dynamic.communicators == 3 * static.communicators
    parts = LLAMA_70B.parts
    cut = (parts.total - parts.embedding - parts.norms) * 2
    assert dynamic.surplus == pytest.approx(0.1 * cut)
    assert dynamic.kv_bytes == pytest.approx(0.7 * (dynamic.capacity - dynamic.fixed))


def test_a_shared_memory_holds_the_weights_once() -> None:
    core = DeviceFacts(
        "core", 4 * GIB, Figure(28e9, "measured", "x"), Figure(2e11, "measured", "x"),
        shared_memory=True, node_devices=2,
    )  # fmt: skip
    limits = EngineLimits(kv_bytes=2 * GIB, page_tokens=64)
    one, two = memory_plan(TIED, core, 1, limits=limits), memory_plan(TIED, core, 2, limits=limits)
    assert one.weights == two.weights == TIED.weight_bytes / 2
    assert one.kv_bytes == GIB
    assert two.kv_tokens == 2 * one.kv_tokens


def test_buffers_of_the_largest_step() -> None:
    # At TP4, per token and layer: 3 x 8,192 hidden, (64 + 16) x 128 / 4 = 2,560 of QKV, 2 x 28,672 / 4 =
    # 14,336 of the gated MLP: 41,472 elements x 2 bytes x 2 layers = 166 KB. x 2,048 tokens = 340 MB, and 256
    # rows of fp32 logits, 256 x 128,256 x 4 = 131 MB.
    found = activation_bytes(LLAMA_70B, 4, EngineLimits(max_batched_tokens=2048, max_num_seqs=256))
    assert found == 2048 * 41_472 * 4 + 256 * 128_256 * 4
    assert found == pytest.approx(471e6, rel=2e-3)


def test_a_sequence_holds_half_a_page_more() -> None:
    assert sequence_tokens(100, 16) == 108
