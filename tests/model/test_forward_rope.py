"""Rotary embedding against transformers' definitions, and tables that grow without changing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from dynamictp.facts import ModelFacts, RopeFacts
from dynamictp.model.load import open_model
from dynamictp.model.rope import RopeTable, rotate
from dynamictp.testing.harness import TINY


def with_rope(rope: RopeFacts) -> ModelFacts:
    return msgspec.structs.replace(TINY, rope=rope)


@pytest.mark.parametrize("variant", ["llama", "llama-linear", "llama-rope3", "qwen2-yarn"])
def test_tables_equal_transformers(variant: str, checkpoint: Callable[[str], Path]) -> None:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    folder = checkpoint(variant)
    facts = open_model(str(folder)).facts
    reference = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(folder))
    positions = torch.tensor([0, 1, 5, 100, 1023, 2040])
    x = torch.randn(1, 2, len(positions), facts.head_dim)
    cos, sin = reference(x, positions[None])
    expected = apply_rotary_pos_emb(x, x, cos, sin)[0][0].transpose(0, 1)
    found = rotate(x[0].transpose(0, 1).contiguous(), *RopeTable(facts).rows(positions))
    assert torch.allclose(found, expected, atol=2e-4)
    assert torch.allclose(found[:3], expected[:3], atol=1e-6)


def test_tables_grow_without_changing() -> None:
    grown, whole = RopeTable(TINY), RopeTable(TINY)
    positions = torch.arange(0, 5000, 7)
    grown.rows(torch.tensor([3]))
    grown.rows(torch.tensor([2500]))
    for a, b in zip(grown.rows(positions), whole.rows(positions), strict=True):
        assert torch.equal(a, b)


def test_the_attention_factor_scales_both() -> None:
    plain = RopeTable(with_rope(RopeFacts(theta=1e4)))
    scaled = RopeTable(with_rope(RopeFacts(theta=1e4, attention_factor=2.0)))
    positions = torch.arange(9)
    for a, b in zip(plain.rows(positions), scaled.rows(positions), strict=True):
        assert torch.equal(2 * a, b)
