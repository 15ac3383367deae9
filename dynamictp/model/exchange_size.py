"""Sizes of the buffers through which the ranks of a domain exchange activations. Pure, without torch."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from dynamictp.facts import DTYPE_BYTES, DType, ModelFacts

MIN_ROWS = 4
"""Every matrix product has at least this many rows: with fewer, its bits depend on their number."""

_ALIGNMENT = 64


def padded_rows(count: int) -> int:
    """Rows to which a step of `count` tokens is padded: a power of two, or one and a half times one.

    The matrix library keeps a compiled kernel of about 0.5 MB for every number of rows it has seen, and takes
    0.7 ms to make one (measured); few sizes keep both small.
    """
    rows = MIN_ROWS
    while rows < count:
        rows = rows * 3 // 2 if rows * 3 // 2 >= count and rows > MIN_ROWS else rows * 2
    return rows


BufferName = Literal["q", "attn", "o", "mlp", "down", "logits", "tokens"]


class Buffer(NamedTuple):
    """One exchange buffer: bytes from the start of the payload, [rows, columns], element type."""

    offset: int
    shape: tuple[int, int]
    dtype: Literal["bf16", "fp32", "int64"]

    @property
    def nbytes(self) -> int:
        width = 8 if self.dtype == "int64" else DTYPE_BYTES[self.dtype]
        return math.prod(self.shape) * width


def exchange_layout(
    facts: ModelFacts, dtype: DType, max_tokens: int, max_rows: int
) -> dict[BufferName, Buffer]:
    """Where each buffer lies for steps of up to `max_tokens` tokens and `max_rows` sampled rows.

    Queries are fp32, already rotated and scaled; what enters a matrix product has the model's type.
    """
    tokens, rows = padded_rows(max_tokens), max(max_rows, MIN_ROWS)
    heads = facts.query_heads * facts.head_dim
    shapes: dict[BufferName, tuple[int, int, Literal["bf16", "fp32", "int64"]]] = {
        "q": (tokens, heads, "fp32"),
        "attn": (tokens, heads, dtype),
        "o": (tokens, facts.hidden, dtype),
        "mlp": (tokens, facts.intermediate, dtype),
        "down": (tokens, facts.hidden, dtype),
        "logits": (rows, facts.vocab, "fp32"),
        "tokens": (rows, 1, "int64"),
    }
    layout: dict[BufferName, Buffer] = {}
    end = 0
    for name, (height, width, kind) in shapes.items():
        layout[name] = Buffer(-(-end // _ALIGNMENT) * _ALIGNMENT, (height, width), kind)
        end = layout[name].offset + layout[name].nbytes
    return layout


def exchange_bytes(facts: ModelFacts, dtype: DType, max_tokens: int, max_rows: int) -> int:
    """Bytes of one domain's exchange payload."""
    last = exchange_layout(facts, dtype, max_tokens, max_rows)["tokens"]
    return -(-(last.offset + last.nbytes) // _ALIGNMENT) * _ALIGNMENT
