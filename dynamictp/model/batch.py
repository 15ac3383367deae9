"""One step's input as one rank needs it: tokens, places in the pages, attention buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dynamictp.facts import ModelFacts
from dynamictp.model.attention import Bucket, make_buckets
from dynamictp.model.attention_plan import Item, Span
from dynamictp.model.exchange_size import padded_rows
from dynamictp.model.pages import KVArena
from dynamictp.model.views import HeadUnits
from dynamictp.ranges import Range


@dataclass(frozen=True)
class StepBatch:
    """T tokens, padded to `padded_rows`; padding rows belong to no sequence and touch no page."""

    tokens: torch.Tensor
    """int64 [padded T]"""
    positions: torch.Tensor
    """int64 [padded T]"""
    count: int
    """T"""
    k_index: torch.Tensor | None
    """Where the rank's K heads go (`KVArena.k_index`), None when it has none or no token."""
    v_index: torch.Tensor | None
    buckets: tuple[Bucket, ...]
    """The rank's share of the attention."""


def make_batch(
    tokens: NDArray[np.int64],
    spans: Sequence[Span],
    tables: Sequence[NDArray[np.int32]],
    items: Sequence[Item],
    *,
    heads: HeadUnits,
    facts: ModelFacts,
    arena: KVArena,
) -> StepBatch:
    """`tokens` are those of all spans in order; `tables[span]` is a page table [blocks, KV heads] that covers
    start + count tokens; `items` is the rank's part of `divide_attention`, `heads` its part of QKV.
    """
    count = len(tokens)
    padded = np.zeros(padded_rows(count), np.int64)
    padded[:count] = tokens
    positions = np.zeros_like(padded)
    for span in spans:
        positions[span.offset : span.offset + span.count] = np.arange(span.start, span.start + span.count)
    slots = torch.from_numpy(positions[:count] % arena.spec.page_tokens)

    def index_pages(owned: Range) -> torch.Tensor | None:
        if not count or not len(owned):
            return None
        blocks = [positions[s.offset : s.offset + s.count] // arena.spec.page_tokens for s in spans]
        rows = [table[b, owned.start : owned.stop] for table, b in zip(tables, blocks, strict=True)]
        return torch.from_numpy(np.concatenate(rows).astype(np.int64))

    k_pages, v_pages = index_pages(heads.key), index_pages(heads.value)
    return StepBatch(
        tokens=torch.from_numpy(padded),
        positions=torch.from_numpy(positions),
        count=count,
        k_index=None if k_pages is None else arena.k_index(k_pages, slots),
        v_index=None if v_pages is None else arena.v_index(v_pages, slots),
        buckets=make_buckets(items, tables, facts.query_heads, facts.kv_heads, arena),
    )
