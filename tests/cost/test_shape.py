"""Parameters, bytes and FLOPs against published figures and hand-worked sums."""

from __future__ import annotations

import pytest

from dynamictp.cost.shape import Experts, LatentAttention, ModelShape, WeightFormat
from dynamictp.facts import ModelFacts, RopeFacts

LLAMA_2_70B = ModelShape(
    name="llama-2-70b", layers=80, hidden=8192, query_heads=64, kv_heads=8, head_dim=128,
    intermediate=28672, vocab=32000, max_context=4096,
)  # fmt: skip
LLAMA_3_8B = ModelShape(
    name="llama-3-8b", layers=32, hidden=4096, query_heads=32, kv_heads=8, head_dim=128,
    intermediate=14336, vocab=128256, max_context=8192,
)  # fmt: skip
MIXTRAL = ModelShape(
    name="mixtral", layers=32, hidden=4096, query_heads=32, kv_heads=8, head_dim=128,
    intermediate=14336, vocab=32000, max_context=32768, experts=Experts(8, 2, 14336),
)  # fmt: skip
DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3", layers=61, hidden=7168, query_heads=128, kv_heads=128, head_dim=192,
    intermediate=18432, vocab=129280, max_context=163840,
    experts=Experts(256, 8, 2048, 2048, 3), latent=LatentAttention(1536, 512, 64, 128, 128),
)  # fmt: skip


def test_kv_bytes_of_llama_2_70b() -> None:
    # Two tensors (K and V), 80 layers, 8 KV heads of 128, two bytes each.
    assert LLAMA_2_70B.kv_bytes(1) == 2 * 80 * 8 * 128 * 2 == 327_680
    assert LLAMA_2_70B.kv_bytes(1, kv_heads=1) == 40_960


def test_parts_of_llama_2_70b_add_up_to_its_checkpoint() -> None:
    parts = LLAMA_2_70B.parts
    assert parts.embedding == parts.head == 32000 * 8192
    assert parts.attention == 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024)
    assert parts.mlp == 80 * 3 * 8192 * 28672
    assert parts.norms == 161 * 8192
    assert parts.total == 68_976_648_192


def test_flops_per_token_are_two_per_parameter_and_the_attention() -> None:
    # Kaplan et al. 2020: 2N. The embedding is a look-up; score and sum are 2 FLOPs an element each.
    assert LLAMA_3_8B.flops_per_token(0) == 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert LLAMA_3_8B.flops_per_token(1000) - LLAMA_3_8B.flops_per_token(0) == 4 * 32 * 128 * 32 * 1000


def test_prefill_runs_the_head_once_and_half_the_attention() -> None:
    head = 2 * 128256 * 4096
    linear = 1000 * (LLAMA_3_8B.flops_per_token(0) - head) + head
    attention = 1000 * 500 * 4 * 32 * 128 * 32
    assert LLAMA_3_8B.prefill_flops(1000) == linear + attention


def test_mixture_of_experts_uses_a_part_of_its_parameters() -> None:
    assert MIXTRAL.parts.total == 46_702_792_704
    # 2 of 8 experts: 12.9 B active with the embedding, as the model card says; here without it.
    assert MIXTRAL.active_parameters == pytest.approx(12.88e9 - 32000 * 4096, rel=2e-3)


def test_latent_attention_is_named_and_caches_one_vector() -> None:
    assert DEEPSEEK_V3.attention == "MLA"
    # (512 + 64) elements in 61 layers, 2 bytes: 70 KB a token (DeepSeek-V2 and V3 reports).
    assert DEEPSEEK_V3.kv_bytes(1) == 576 * 61 * 2
    assert DEEPSEEK_V3.kv_bytes(1, kv_heads=16) == DEEPSEEK_V3.kv_bytes(1), "every rank holds all of it"
    # 671.03 B without the router's 58 x 256 correction biases and the prediction module; 37 B active.
    assert DEEPSEEK_V3.parts.total + 58 * 256 == 671_026_419_200
    assert DEEPSEEK_V3.active_parameters == pytest.approx(36.6e9, rel=0.01)


@pytest.mark.parametrize(("kv_heads", "kind"), [(64, "MHA"), (8, "GQA"), (1, "MQA")])
def test_attention_kinds(kv_heads: int, kind: str) -> None:
    shape = ModelShape("m", 2, 64, 64, kv_heads, 16, 128, 1000, 512)
    assert shape.attention == kind


def test_windowed_layers_cache_no_more_than_their_window() -> None:
    shape = ModelShape("m", 4, 64, 4, 2, 16, 128, 1000, 8192, window=1024, windowed_layers=3)
    per_layer = 2 * 2 * 16 * 2
    assert shape.kv_bytes(512) == 4 * 512 * per_layer
    assert shape.kv_bytes(4096) == (4096 + 3 * 1024) * per_layer


def test_quantised_weights_leave_the_embedding_wide() -> None:
    shape = ModelShape("m", 2, 64, 4, 4, 16, 128, 1000, 512, weights=WeightFormat("awq int4", 4.25))
    wide = 2 * 1000 * 64
    assert shape.weight_bytes == (shape.parts.total - wide) * 4.25 / 8 + wide * 2


def test_shape_of_what_the_server_runs() -> None:
    facts = ModelFacts(
        family="llama", layers=30, hidden=576, query_heads=9, kv_heads=3, head_dim=64, intermediate=1536,
        vocab=49152, max_context=8192, norm_eps=1e-5, rope=RopeFacts(10000.0), tied_head=True,
    )  # fmt: skip
    shape = ModelShape.of(facts, "demo")
    assert shape.parts.total == 134_515_008
    assert shape.kv_bytes(10) == 10 * facts.kv_bytes_per_token("bf16")
    assert shape.weight_bytes == 2 * 134_515_008
    assert ModelShape.of(facts, dtype="fp32").weight_bytes == 4 * 134_515_008
