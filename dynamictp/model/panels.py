"""Packed weight panels, the form that the native kernels read.

A panel is 16 output rows. In bf16 it is [K/2][16][2]: the pairs of a bf16 dot product stand together, and one
64-byte line holds a pair of columns of all 16 rows. In fp32 it is [K][16]. Panels follow each other, so any
range of them is a view, and a product reads one linear stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamictp.facts import PANEL_ROWS

Array = NDArray[Any]


def pack(rows: Array, target: Array) -> None:
    """Write `rows` (bf16 or fp32 [n, K], n a multiple of 16; K even in bf16) into `target` [n, K] of the same
    type: its memory, contiguous, becomes n / 16 panels.
    """
    source, panels = _words(rows), _words(target)
    columns = source.shape[1]
    shape = (len(source) // PANEL_ROWS, PANEL_ROWS, columns)
    panels.reshape(shape[0], columns, PANEL_ROWS)[...] = source.reshape(shape).transpose(0, 2, 1)


def unpack(panels: Array) -> Array:
    """The rows [n, K] of packed memory that is viewed as [n, K]; a copy."""
    source = _words(panels)
    columns = source.shape[1]
    rows = source.reshape(-1, columns, PANEL_ROWS).transpose(0, 2, 1)
    return np.ascontiguousarray(rows).reshape(-1, columns).view(panels.dtype)


def _words(matrix: Array) -> Array:
    """Pairs of bf16 as one word, fp32 as it is."""
    return matrix.view(np.uint32) if matrix.dtype.itemsize == 2 else matrix
