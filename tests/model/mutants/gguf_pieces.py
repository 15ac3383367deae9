"""GGUF files as lists of labelled pieces, so that a mutation can aim at a count, a length or an offset."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type

ALIGNMENT = 32
_FORMATS = {Type.UINT32: "<I", Type.INT32: "<i", Type.FLOAT32: "<f", Type.BOOL: "<B"}


@dataclass(frozen=True)
class Piece:
    """`role` is `u32`, `u64` (counts, lengths, types, offsets), `text`, `value` or `data`."""

    role: str
    content: bytes


def u32(value: int) -> Piece:
    return Piece("u32", struct.pack("<I", value))


def u64(value: int) -> Piece:
    return Piece("u64", struct.pack("<Q", value))


def text(value: str) -> list[Piece]:
    content = value.encode()
    return [u64(len(content)), Piece("text", content)]


def metadata(key: str, value: Any) -> list[Piece]:
    """One entry; bool, int, float and str by type, a list by its first item."""
    if isinstance(value, list):
        kind = _kind(value[0]) if value else Type.UINT32
        head = [u32(Type.ARRAY), u32(kind), u64(len(value))]
        items = [piece for item in value for piece in _value(kind, item)]
        return [*text(key), *head, *items]
    kind = _kind(value)
    return [*text(key), u32(kind), *_value(kind, value)]


def _kind(value: Any) -> Type:
    kinds = {bool: Type.BOOL, int: Type.UINT32, float: Type.FLOAT32, str: Type.STRING}
    return kinds[type(value)]


def _value(kind: Type, value: Any) -> list[Piece]:
    if kind is Type.STRING:
        return text(value)
    return [Piece("value", struct.pack(_FORMATS[kind], value))]


@dataclass(frozen=True)
class GGUFModel:
    """A whole file: metadata, and tensors by name with stored type and row-major shape. The items of an array
    have the type of its first. Matrices are random, vectors are ones.
    """

    entries: dict[str, Any]
    tensors: dict[str, tuple[Kind, tuple[int, ...]]]

    def pieces(self) -> list[Piece]:
        head: list[Piece] = [Piece("magic", b"GGUF"), u32(3), u64(len(self.tensors)), u64(len(self.entries))]
        for key, value in self.entries.items():
            head += metadata(key, value)
        data: list[Piece] = []
        offset = 0
        for name, (kind, shape) in self.tensors.items():
            content = _stored(kind, shape)
            dimensions = [u64(size) for size in reversed(shape)]
            head += [*text(name), u32(len(shape)), *dimensions, u32(kind), u64(offset)]
            padded = content + bytes(-len(content) % ALIGNMENT)
            data.append(Piece("data", padded))
            offset += len(padded)
        size = sum(len(piece.content) for piece in head)
        return [*head, Piece("data", bytes(-size % ALIGNMENT)), *data]


@cache
def _stored(kind: Kind, shape: tuple[int, ...]) -> bytes:
    rng = np.random.default_rng(len(shape))
    values = np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape).astype(np.float32)
    try:
        return bytes(gguf.quants.quantize(values, kind).tobytes())
    except gguf.quants.QuantError:  # a mutant's shape that has no such blocks
        return values.tobytes()
