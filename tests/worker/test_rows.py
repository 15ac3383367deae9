"""The row table: what plans may do to it, and what they may not."""

from __future__ import annotations

import pytest

from dynamictp.errors import ProtocolError
from dynamictp.messages import NewRow, RowStep, SamplingParams, StepPlan, pack_tokens
from dynamictp.worker.rows import Row, RowTable

SAMPLING = SamplingParams(seed=0, max_tokens=9)


def new_row(row: int, tokens: int, blocks: int) -> NewRow:
    pages = tuple((3 * b, 3 * b + 1, 3 * b + 2) for b in range(blocks))
    return NewRow(row, f"r{row}", 1, pack_tokens(range(tokens)), tokens, SAMPLING, pages)


def table() -> RowTable:
    return RowTable(kv_heads=3, page_tokens=16, pages=300)


def plan(*rows: RowStep, new: tuple[NewRow, ...] = (), gone: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(1, 7, rows, new, gone)


def test_a_row_grows() -> None:
    row = Row(new_row(0, 5, 1), 3)
    for token in range(5, 300):
        row.append(token)
    assert row.tokens.tolist() == list(range(300))
    for block in range(1, 40):
        row.extend(((3 * block, 3 * block + 1, 3 * block + 2),))
    assert row.table.ravel().tolist() == list(range(120))


def test_large_token_ids_survive() -> None:
    new = NewRow(0, "r", 1, pack_tokens([0, 151_935]), 2, SAMPLING)
    assert Row(new, 3).tokens.tolist() == [0, 151_935]


def test_gone_comes_before_new() -> None:
    rows = table()
    rows.apply(plan(new=(new_row(0, 5, 1),)))
    (row,) = rows.apply(plan(RowStep(0, 0, 9, True), new=(new_row(0, 9, 1),), gone=(0, 4)))
    assert len(row) == 9


def test_new_blocks_extend_the_table_first() -> None:
    rows = table()
    rows.apply(plan(new=(new_row(0, 20, 1),)))
    (row,) = rows.apply(plan(RowStep(0, 0, 20, True, ((9, 10, 11),))))
    assert row.table.tolist() == [[0, 1, 2], [9, 10, 11]]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (RowStep(1, 0, 1, False), "does not exist"),
        (RowStep(0, 0, 21, False), "has 20 tokens"),
        (RowStep(0, 0, 0, False), "has 20 tokens"),
        (RowStep(0, 0, 10, True), "and samples"),
        (RowStep(0, 0, 20, True), "needs 2 blocks"),
        (RowStep(0, 0, 20, True, ((1, 2),)), "no 3 pages"),
        (RowStep(0, 0, 20, True, ((1, 2, 300),)), "arena of 300"),
        (RowStep(0, 0, 20, True, ((-1, 2, 3),)), "arena of 300"),
    ],
)
def test_plans_that_do_not_fit_are_refused(step: RowStep, message: str) -> None:
    rows = table()
    rows.apply(plan(new=(new_row(0, 20, 1),)))
    with pytest.raises(ProtocolError, match=message):
        rows.apply(plan(step))
