"""Attention: the right result, its division over ranks, and bits that do not depend on the company."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.facts import DType
from dynamictp.kv import KVSpec
from dynamictp.model import attention
from dynamictp.model.attention import attend, make_buckets
from dynamictp.model.attention_plan import Item, Span, divide_attention
from dynamictp.model.pages import KVArena, Scratch

DIM, HEADS, GROUP, PAGE = 32, 2, 3, 16


class Sequences:
    """Random K and V of some sequences, written to pages, and queries of their last tokens."""

    def __init__(self, lengths: list[tuple[int, int]], dtype: DType) -> None:
        """`lengths`: (start, count) of each sequence's span."""
        torch.manual_seed(3)
        blocks = [-(-(start + count) // PAGE) for start, count in lengths]
        spec = KVSpec(1, HEADS, DIM, PAGE, dtype)
        memory = torch.full((sum(blocks) * HEADS * spec.page_bytes,), 0xFF, dtype=torch.uint8)
        self.arena = KVArena(memory, spec)
        order = np.random.default_rng(0).permutation(sum(blocks) * HEADS).astype(np.int32)
        self.spans, self.tables, self.k, self.v = [], [], [], []
        offset = 0
        for (start, count), own in zip(lengths, blocks, strict=True):
            self.spans.append(Span(offset, start, count))
            offset += count
            table, order = order[: own * HEADS].reshape(own, HEADS), order[own * HEADS :]
            self.tables.append(table)
            position = torch.arange(start + count)
            pages = torch.from_numpy(table.astype(np.int64))[position // PAGE]
            k, v = torch.randn(2, start + count, HEADS, DIM).bfloat16().float()
            self.arena.write_k(0, self.arena.k_index(pages, position % PAGE), k)
            self.arena.write_v(0, self.arena.v_index(pages, position % PAGE), v)
            self.k.append(k)
            self.v.append(v)
        self.q = torch.randn(offset, HEADS * GROUP, DIM) / math.sqrt(DIM)

    def attend(self, items: tuple[Item, ...]) -> torch.Tensor:
        """[T, query heads, D]; NaN where no item wrote."""
        out = torch.full_like(self.q, torch.nan)
        scratch = Scratch()
        for bucket in make_buckets(items, self.tables, HEADS * GROUP, HEADS, self.arena):
            attend(
                bucket, 0, q=self.q.view(-1, DIM), out=out.view(-1, DIM), arena=self.arena, scratch=scratch
            )
        return out

    def reference(self) -> torch.Tensor:
        parts = []
        for span, k, v in zip(self.spans, self.k, self.v, strict=True):
            q = self.q[span.offset : span.offset + span.count].double()
            keys, values = (x.double().repeat_interleave(GROUP, 1) for x in (k, v))
            scores = torch.einsum("thd,shd->hts", q, keys)
            later = torch.arange(len(k))[None, :] > span.start + torch.arange(span.count)[:, None]
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hts,shd->thd", weights, values))
        return torch.cat(parts)


MIXED = [(0, 70), (300, 1), (17, 1), (16, 1), (130, 90), (0, 1), (255, 2), (129, 1)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_it_is_softmax_attention(dtype: DType) -> None:
    sequences = Sequences(MIXED, dtype)
    (items,) = divide_attention(sequences.spans, HEADS, GROUP, PAGE, 1)
    found = sequences.attend(items)
    assert torch.allclose(found.double(), sequences.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_any_division_gives_the_same_bits(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(MIXED, dtype)
    (items,) = divide_attention(sequences.spans, HEADS, GROUP, PAGE, 1)
    whole = sequences.attend(items)
    for world in (2, 5, 40):
        out = torch.full_like(whole, torch.nan)
        for share in divide_attention(sequences.spans, HEADS, GROUP, PAGE, world):
            part = sequences.attend(share)
            out = torch.where(part.isnan(), out, part)
        assert torch.equal(out, whole)
    monkeypatch.setattr(attention, "_MIN_FILL", 0.0)
    assert torch.equal(sequences.attend(items), whole), "padded to the longest"
    monkeypatch.setattr(attention, "_MAX_PAGES", 1)
    assert torch.equal(sequences.attend(items), whole), "one by one"
    tiny = tuple(
        msgspec.structs.replace(item, offset=item.offset + i, start=item.start + i, count=1)
        for item in items
        for i in range(item.count)
    )
    assert torch.equal(sequences.attend(tiny), whole), "token by token"


@given(
    spans=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), min_size=1, max_size=12),
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    world=st.integers(1, 9),
)
def test_division_covers_everything_once(
    spans: list[tuple[int, int]], kv_heads: int, group: int, world: int
) -> None:
    offset, made = 0, []
    for start, count in spans:
        made.append(Span(offset, start, count))
        offset += count
    shares = divide_attention(made, kv_heads, group, 64, world)
    assert len(shares) == world
    covered = [
        (item.span, item.kv_head, item.offset + i, item.start + i)
        for share in shares
        for item in share
        for i in range(item.count)
    ]
    wanted = [
        (number, head, span.offset + i, span.start + i)
        for number, span in enumerate(made)
        for head in range(kv_heads)
        for i in range(span.count)
    ]
    assert sorted(covered) == sorted(wanted)
    assert shares == divide_attention(made, kv_heads, group, 64, world)


def test_division_is_by_context_length() -> None:
    spans = [Span(0, 6400, 1), *(Span(1 + i, 640, 1) for i in range(10))]
    first, second = divide_attention(spans, 1, 3, 64, 2)
    assert [item.span for item in first] == [0]
    assert [item.span for item in second] == list(range(1, 11))
