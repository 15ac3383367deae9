"""Attention over KV pages: one code path for prefill and decode, with the same bits in every batch.

What makes a row's result independent of everything but its own query and pages (design 4, measured):

- scores are one fp32 product per item with at least four query rows; a column's bits do not depend on how
  many columns there are, nor a row's on the other rows;
- the maximum is exact in any order; exponentials are elementwise;
- the sum of a row goes page by page (`_sum_pages`), its shape fixed by the page numbers, and pages beyond the
  row's context add exact zeros;
- probabilities times values goes in groups of at most 128 tokens that start at multiples of 128, added in
  order: within a group the chain is one, and its zero tail changes nothing. (The library splits sums of more
  than 192 terms in places that depend on their number, and a product that adds to a given matrix rounds
  otherwise when it is alone in its batch: so product and sum are two operations.)

Masked scores are −inf and masked values zero, so whatever a page holds beyond its tokens has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dynamictp.model.attention_plan import Item
from dynamictp.model.exchange_size import MIN_ROWS
from dynamictp.model.pages import KVArena, Scratch, ValueMask

GROUP_TOKENS = 128
_MAX_SCORES = 1 << 19
"""Score elements of one bucket at most (2 MiB), unless a single item has more."""
_MAX_PAGES = 96
"""Pages of one bucket at most, unless a single item has more: 40 KiB of scratch each at head_dim 64."""
_MIN_FILL = 0.75
"""Least share of real pages that an item may have in a bucket."""


@dataclass(frozen=True)
class Bucket:
    """Items computed together: n items, each M query rows over P pages (shorter ones padded)."""

    items: int
    rows: torch.Tensor
    """int64 [n · M] rows of [T · Nq, D] that are read from the queries and written to the output. Padding
    repeats a row, which then is written twice with the same bits."""
    pages: torch.Tensor
    """int64 [n · P]"""
    first_masked: int
    """Token of the first page that is masked for some row; everything before is seen by all."""
    hidden: torch.Tensor
    """bool [n or 1, M or 1, P · page_tokens − first_masked], True where a row must not look."""
    values: ValueMask


def make_buckets(
    items: Sequence[Item],
    tables: Sequence[NDArray[np.int32]],
    query_heads: int,
    kv_heads: int,
    arena: KVArena,
) -> tuple[Bucket, ...]:
    """`tables[span]` is the page table [blocks, KV heads] of the span's sequence."""
    group = query_heads // kv_heads
    page = arena.spec.page_tokens
    return tuple(
        _bucket(members, tables, query_heads, group, arena) for members in _gather_items(items, group, page)
    )


def _gather_items(items: Sequence[Item], group: int, page: int) -> Iterator[list[Item]]:
    """Items of one token count, and of similar length, in runs of bounded size."""
    ordered = sorted(items, key=lambda item: (item.count, item.end), reverse=True)
    run: list[Item] = []
    longest = 0
    for item in ordered:
        pages = -(-item.end // page)
        scores = max(item.count * group, MIN_ROWS) * longest * page
        if run and (
            item.count != run[0].count
            or pages < _MIN_FILL * longest
            or (len(run) + 1) * scores > _MAX_SCORES
            or (len(run) + 1) * longest > _MAX_PAGES
        ):
            yield run
            run = []
        if not run:
            longest = pages
        run.append(item)
    if run:
        yield run


def _bucket(
    items: Sequence[Item],
    tables: Sequence[NDArray[np.int32]],
    query_heads: int,
    group: int,
    arena: KVArena,
) -> Bucket:
    page = arena.spec.page_tokens
    count = items[0].count
    ends = np.array([item.end for item in items])
    longest = -(-int(ends[0]) // page)
    pages = np.empty((len(items), longest), np.int64)
    for i, item in enumerate(items):
        own = -(-item.end // page)
        pages[i, :own] = tables[item.span][:own, item.kv_head]
        pages[i, own:] = pages[i, 0]
    tokens = np.arange(count)
    offsets = np.array([item.offset for item in items])[:, None] + tokens
    heads = np.array([item.kv_head for item in items])[:, None, None] * group + np.arange(group)
    rows = (offsets[:, :, None] * query_heads + heads).reshape(len(items), -1)
    if rows.shape[1] < MIN_ROWS:
        rows = np.concatenate((rows, np.repeat(rows[:, :1], MIN_ROWS - rows.shape[1], 1)), 1)
    starts = np.array([item.start for item in items])
    if (starts == starts[0]).all():
        starts = starts[:1]
    first = int(starts.min()) // page * page
    columns = np.arange(first, longest * page)
    hidden = columns > (starts[:, None] + tokens)[:, :, None]
    if count > 1:
        hidden = np.repeat(hidden, group, 1)
        short = rows.shape[1] - hidden.shape[1]
        if short:
            hidden = np.concatenate((hidden, np.repeat(hidden[:, :1], short, 1)), 1)
    kept = np.arange(longest * page) < ends[:, None]
    return Bucket(
        len(items),
        torch.from_numpy(rows.reshape(-1)),
        torch.from_numpy(pages.reshape(-1)),
        first,
        torch.from_numpy(hidden),
        arena.value_mask(torch.from_numpy(kept.reshape(len(items), longest, page))),
    )


def attend(
    bucket: Bucket, layer: int, *, q: torch.Tensor, out: torch.Tensor, arena: KVArena, scratch: Scratch
) -> None:
    """Softmax attention of the bucket's rows.

    `q` fp32 [T · Nq, D], scaled; `out` [T · Nq, D] gets the rows named by the bucket.
    """
    page = arena.spec.page_tokens
    n, dim = bucket.items, q.shape[1]
    query = q.index_select(0, bucket.rows).view(n, -1, dim)
    keys = arena.read_k(layer, bucket.pages, n, scratch)
    scores = scratch.take("scores", (n, query.shape[1], keys.shape[2]))
    torch.bmm(query, keys, out=scores)
    scores[:, :, bucket.first_masked :].masked_fill_(bucket.hidden, -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    total = _sum_pages(scores.view(n, -1, keys.shape[2] // page, page).sum(-1))
    values = arena.read_v(layer, bucket.pages, bucket.values, n, scratch)
    result = torch.bmm(scores[:, :, :GROUP_TOKENS], values[:, :GROUP_TOKENS])
    for start in range(GROUP_TOKENS, keys.shape[2], GROUP_TOKENS):
        stop = start + GROUP_TOKENS
        result.add_(torch.bmm(scores[:, :, start:stop], values[:, start:stop]))
    result.div_(total)
    out.index_copy_(0, bucket.rows, result.view(-1, dim).to(out.dtype))


def _sum_pages(sums: torch.Tensor) -> torch.Tensor:
    """[n, M, P] → [n, M, 1]: a binary tree over the page numbers. Absent pages would add zeros, which change
    nothing, so a row's sum does not depend on P."""
    while sums.shape[-1] > 1:
        count = sums.shape[-1]
        pairs = sums[:, :, 0 : count - 1 : 2] + sums[:, :, 1::2]
        sums = torch.cat((pairs, sums[:, :, -1:]), -1) if count % 2 else pairs
    return sums
