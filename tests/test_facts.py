"""Facts about a model: derived sizes, and the way between processes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.facts import DTYPE_BYTES, PANEL_ROWS, ModelFacts, RopeFacts

SMOLLM2 = ModelFacts(
    family="llama", layers=30, hidden=576, query_heads=9, kv_heads=3, head_dim=64, intermediate=1536,
    vocab=49152, max_context=8192, norm_eps=1e-5, rope=RopeFacts(theta=100_000.0), tied_head=True,
    eos_ids=(0, 2),
)  # fmt: skip


def changed(**fields: Any) -> ModelFacts:
    facts: ModelFacts = msgspec.structs.replace(SMOLLM2, **fields)
    return facts


def test_smollm2() -> None:
    assert SMOLLM2.qkv_units == 15
    assert SMOLLM2.group == 3
    assert SMOLLM2.kv_bytes_per_token("bf16") == 23_040
    assert SMOLLM2.kv_bytes_per_token("fp32") == 46_080
    assert SMOLLM2.hidden % PANEL_ROWS == 0


@given(st.integers(1, 128), st.integers(1, 32), st.integers(1, 16), st.sampled_from((64, 80, 128)))
def test_derived_sizes(layers: int, kv_heads: int, group: int, head_dim: int) -> None:
    facts = changed(layers=layers, kv_heads=kv_heads, query_heads=kv_heads * group, head_dim=head_dim)
    assert facts.group == group
    assert facts.qkv_units * head_dim == (facts.query_heads + kv_heads + kv_heads) * head_dim
    for dtype in ("bf16", "fp32"):
        one_head = layers * head_dim * DTYPE_BYTES[dtype]
        assert facts.kv_bytes_per_token(dtype) == 2 * kv_heads * one_head


def test_facts_are_values() -> None:
    assert changed() == SMOLLM2
    assert changed(layers=31) != SMOLLM2
    with pytest.raises(AttributeError):
        SMOLLM2.layers = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "rope",
    [
        RopeFacts(theta=10_000.0),
        RopeFacts(theta=500_000.0, kind="llama3", factor=8.0, original_context=8192),
        RopeFacts(theta=1e6, kind="yarn", factor=4.0, original_context=32768, attention_factor=1.14),
    ],
)
def test_facts_travel_between_processes(rope: RopeFacts) -> None:
    facts = changed(rope=rope, bos_id=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=ModelFacts) == facts
    assert msgspec.json.decode(msgspec.json.encode(facts), type=ModelFacts) == facts


def test_an_unknown_family_or_rope_kind_is_no_fact() -> None:
    for facts in (changed(family="mamba"), changed(rope=RopeFacts(theta=1.0, kind="new"))):  # type: ignore[arg-type]
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=ModelFacts)
