"""The rows of one domain: tokens, page table and sampling parameters of each live request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynamictp.errors import ProtocolError
from dynamictp.messages import NewRow, RowStep, SamplingParams, StepPlan


class Row:
    """One request's slot. Arrays grow by doubling, so that a step appends without copying."""

    def __init__(self, new: NewRow, kv_heads: int) -> None:
        tokens = np.frombuffer(new.tokens, "<u4")
        self.prompt_len = new.prompt_len
        self.sampling: SamplingParams = new.sampling
        self._length = len(tokens)
        self._tokens = np.empty(max(64, 2 * len(tokens)), np.int32)
        self._tokens[: len(tokens)] = tokens
        self._blocks = 0
        self._table = np.empty((16, kv_heads), np.int32)
        self.extend(new.blocks)

    def __len__(self) -> int:
        """Tokens known."""
        return self._length

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output so far, a view."""
        return self._tokens[: self._length]

    @property
    def table(self) -> NDArray[np.int32]:
        """Page table [blocks, KV heads], a view."""
        return self._table[: self._blocks]

    def append(self, token: int) -> None:
        if self._length == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self._length] = token
        self._length += 1

    def extend(self, blocks: tuple[tuple[int, ...], ...]) -> None:
        if not blocks:
            return
        total = self._blocks + len(blocks)
        if total > len(self._table):
            grown = np.empty((max(total, 2 * len(self._table)), self._table.shape[1]), np.int32)
            grown[: self._blocks] = self.table
            self._table = grown
        self._table[self._blocks : total] = blocks
        self._blocks = total


class RowTable:
    """Rows of one domain epoch by row id. Owned by the domain; only plans change it."""

    def __init__(self, kv_heads: int, page_tokens: int, pages: int) -> None:
        self._kv_heads = kv_heads
        self._page_tokens = page_tokens
        self._pages = pages
        self._rows: dict[int, Row] = {}

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    def apply(self, plan: StepPlan) -> list[Row]:
        """Drop, add and extend rows as the plan says; the rows of `plan.rows` in order.

        Raises `ProtocolError` for a plan that does not fit the rows: an unknown row, tokens that are not
        known, pages that are missing or outside the arena.
        """
        for gone in plan.gone:
            self._rows.pop(gone, None)
        for new in plan.new:
            self._check_pages(new.row, new.blocks)
            self._rows[new.row] = Row(new, self._kv_heads)
        rows = []
        for step in plan.rows:
            row = self._rows.get(step.row)
            if row is None:
                raise ProtocolError(f"step {plan.step} names row {step.row}, which does not exist")
            self._check_pages(step.row, step.new_blocks)
            row.extend(step.new_blocks)
            self._check(step, row)
            rows.append(row)
        return rows

    def _check(self, step: RowStep, row: Row) -> None:
        end = step.start + step.count
        if step.count < 1 or end > len(row) or (step.sample and end != len(row)):
            raise ProtocolError(
                f"row {step.row} has {len(row)} tokens; the plan computes {step.start} to {end}"
                + (" and samples" if step.sample else "")
            )
        needed = -(-end // self._page_tokens)
        if needed > len(row.table):
            raise ProtocolError(f"row {step.row} needs {needed} blocks and has {len(row.table)}")

    def _check_pages(self, row: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        for block in blocks:
            if len(block) != self._kv_heads or min(block) < 0 or max(block) >= self._pages:
                raise ProtocolError(
                    f"row {row}: block {block} is no {self._kv_heads} pages of an arena of {self._pages}"
                )
