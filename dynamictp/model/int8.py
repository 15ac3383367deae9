"""int8 weights: a scale for every 32 columns of a row, and the panels that the native kernels read.

The blocks are those of GGUF's Q8_0, 32 integers and an fp16 scale, so such tensors are taken as they are. K
is never cut: a rank has whole rows with their scales.

A panel is 16 rows in blocks of 64 columns (the last one padded with zeros): first the two groups' scales,
fp16 [2][16], then their integers [2][16 pairs][16 rows][2]. A product reads one linear stream.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamictp.errors import ModelRefused
from dynamictp.facts import PANEL_ROWS

GROUP = 32
"""Columns that share a scale."""
BLOCK = 64
"""Columns that a panel is padded to a multiple of."""

_SCALE_BYTES = BLOCK // GROUP * PANEL_ROWS * 2
_BLOCK_BYTES = _SCALE_BYTES + BLOCK * PANEL_ROWS
_LARGEST = 127


class Int8Rows(NamedTuple):
    """Rows of a matrix: values are integer · scale of the group, the last of which may have fewer columns."""

    quants: NDArray[np.int8]
    """[n, K]"""
    scales: NDArray[np.float16]
    """[n, ⌈K / 32⌉]"""


def row_bytes(columns: int) -> int:
    """Bytes of one row in a panel."""
    return -(-columns // BLOCK) * _BLOCK_BYTES // PANEL_ROWS


def quantise(rows: NDArray[Any]) -> Int8Rows:
    """fp32 or bf16 [n, K] → int8, symmetric, each group to its own largest value, rounded to nearest even.

    Raises `ModelRefused` for values beyond the range of fp16 scales.
    """
    count, columns = rows.shape
    values = _padded(np.asarray(rows, np.float32), GROUP).reshape(count, -1, GROUP)
    largest = np.maximum(values.max(2), -values.min(2))
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(_LARGEST)).astype(np.float16)
    if not np.isfinite(scales).all():
        raise ModelRefused(f"weights of up to {largest.max():.3g} are too large for int8 with fp16 scales")
    # Tiny scales have few bits: where rounding made one too small for its largest value, take the next.
    low = largest > np.float32(_LARGEST + 0.49) * scales.astype(np.float32)
    scales[low] = np.nextafter(scales[low], np.float16(np.inf))
    wide = scales.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    quants = np.rint(values * inverse[:, :, None]).astype(np.int8)
    return Int8Rows(quants.reshape(count, -1)[:, :columns], scales)


def dequantise(rows: Int8Rows) -> NDArray[np.float32]:
    """The values [n, K]."""
    columns = rows.quants.shape[1]
    return rows.quants * np.repeat(rows.scales.astype(np.float32), GROUP, axis=1)[:, :columns]


def pack_int8(rows: Int8Rows, target: NDArray[np.uint8]) -> None:
    """Write rows (a multiple of 16) into `target` [n, `row_bytes`]: its memory becomes n / 16 panels."""
    blocks = _blocks(target)
    panels, count = blocks.shape[:2]
    quants, scales = _padded(rows.quants, BLOCK), _padded(rows.scales, BLOCK // GROUP)
    stored = blocks[:, :, :_SCALE_BYTES].view(np.float16).reshape(panels, count, 2, PANEL_ROWS)
    stored[...] = scales.reshape(panels, PANEL_ROWS, count, 2).transpose(0, 2, 3, 1)
    pairs = blocks[:, :, _SCALE_BYTES:].view(np.uint16).reshape(panels, count, BLOCK // 2, PANEL_ROWS)
    words = np.ascontiguousarray(quants).view(np.uint16)
    pairs[...] = words.reshape(panels, PANEL_ROWS, count, BLOCK // 2).transpose(0, 2, 3, 1)


def unpack_int8(panels: NDArray[np.uint8], columns: int) -> Int8Rows:
    """The rows of packed memory that is viewed as [n, `row_bytes`]; a copy."""
    blocks = _blocks(panels)
    number, count = blocks.shape[:2]
    stored = blocks[:, :, :_SCALE_BYTES].view(np.float16).reshape(number, count, 2, PANEL_ROWS)
    scales = stored.transpose(0, 3, 1, 2).reshape(-1, 2 * count)
    pairs = blocks[:, :, _SCALE_BYTES:].view(np.uint16).reshape(number, count, BLOCK // 2, PANEL_ROWS)
    words = np.ascontiguousarray(pairs.transpose(0, 3, 1, 2)).reshape(len(scales), -1)
    return Int8Rows(words.view(np.int8)[:, :columns], scales[:, : -(-columns // GROUP)])


def _blocks(panels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return panels.reshape(len(panels) // PANEL_ROWS, -1, _BLOCK_BYTES)


def _padded(array: NDArray[Any], unit: int) -> NDArray[Any]:
    """Zeros after the last column, up to a multiple of `unit` columns."""
    missing = -array.shape[1] % unit
    return np.pad(array, ((0, 0), (0, missing))) if missing else array
