"""Who attends to what: the attention of one step cut into items and spread over the ranks. Pure.

An item is a tile of consecutive tokens of one sequence with all query heads of one KV head. The bits of a
token's attention depend on its own query and pages alone, so any division over ranks gives the same result;
this one balances the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from dynamictp.model.exchange_size import MIN_ROWS

TILE_ROWS = 192
"""Query rows (tokens × heads of the group) of one item at most: its scores stay in the cache."""

_PAGE_ROWS = 12
"""Query rows whose cost equals that of reading and widening one page (measured)."""


class Span(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence in a step: batch rows offset … offset+count are its indices
    start … start+count."""

    offset: int
    start: int
    count: int


class Item(msgspec.Struct, frozen=True):
    """Attention of `count` tokens of span `span` from batch row `offset` (sequence index `start`), for the
    query heads of `kv_head`."""

    span: int
    kv_head: int
    offset: int
    start: int
    count: int

    @property
    def end(self) -> int:
        """Tokens of context that the last token attends to."""
        return self.start + self.count


def divide_attention(
    spans: Sequence[Span], kv_heads: int, group: int, page_tokens: int, world: int
) -> tuple[tuple[Item, ...], ...]:
    """Items of each rank: the longest first to the rank with the least so far, ties to the lowest rank.

    `group` is the number of query heads per KV head. Every (token, KV head) is in exactly one item.
    """
    tile = max(1, TILE_ROWS // group)
    costed: list[tuple[int, Item]] = []
    for index, span in enumerate(spans):
        offset, start, count = span.offset, span.start, span.count
        for first in range(0, count, tile):
            size = min(tile, count - first)
            pages = -(-(start + first + size) // page_tokens)
            cost = pages * (_PAGE_ROWS + max(MIN_ROWS, size * group))
            costed.extend(
                (cost, Item(index, head, offset + first, start + first, size)) for head in range(kv_heads)
            )
    if world == 1:
        return (tuple(item for _, item in costed),)
    costed.sort(key=_by_cost, reverse=True)
    loads = [(0, rank) for rank in range(world)]
    ranks: list[list[Item]] = [[] for _ in range(world)]
    for cost, item in costed:
        load, rank = loads[0]
        ranks[rank].append(item)
        heapq.heapreplace(loads, (load + cost, rank))
    return tuple(map(tuple, ranks))


def _by_cost(costed: tuple[int, Item]) -> int:
    return costed[0]
