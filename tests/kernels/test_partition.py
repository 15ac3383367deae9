"""How attention is divided over ranks: every row once, in order, pieces equal but for one row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamictp import native

OVERHEAD = 16  # of a row, in keys


def divide(
    spans: list[tuple[int, int]], kv_heads: int, group: int, world: int
) -> list[list[tuple[int, ...]]]:
    call = native.require().divide_attention
    return [call(spans, kv_heads, group, rank, world) for rank in range(world)]


def row_costs(spans: list[tuple[int, int]], part: list[tuple[int, ...]], group: int) -> list[int]:
    return [
        spans[sequence][0] + row // group + 1 + OVERHEAD
        for sequence, _, first, last in part
        for row in range(first, last)
    ]


@given(
    spans=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 40)), max_size=12),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 5),
    world=st.integers(1, 9),
)
def test_every_row_belongs_to_one_rank(
    spans: list[tuple[int, int]], kv_heads: int, group: int, world: int
) -> None:
    parts = divide(spans, kv_heads, group, world)
    given_out = [
        (sequence, head, row)
        for part in parts
        for sequence, head, first, last in part
        for row in range(first, last)
    ]
    assert given_out == [
        (sequence, head, row)
        for sequence, (_, count) in enumerate(spans)
        for head in range(kv_heads)
        for row in range(count * group)
    ]
    costs = [row_costs(spans, part, group) for part in parts]
    longest = max((cost for part in costs for cost in part), default=0)
    share = sum(map(sum, costs)) / world
    assert all(abs(sum(part) - share) <= longest for part in costs)


def test_one_decoding_sequence_is_cut_between_query_heads() -> None:
    assert divide([(127, 1)], 3, 3, 2) == [[(0, 0, 0, 3), (0, 1, 0, 2)], [(0, 1, 2, 3), (0, 2, 0, 3)]]


def test_nine_ranks_have_a_query_head_each() -> None:
    assert divide([(9, 1)], 3, 3, 9) == [[(0, rank // 3, rank % 3, rank % 3 + 1)] for rank in range(9)]


def test_no_tokens_are_no_work() -> None:
    assert divide([], 3, 3, 2) == [[], []]
