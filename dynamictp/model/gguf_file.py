"""Header of a GGUF file: metadata and tensor directory, bounds-checked, memory-mapped.

The `gguf` package's reader builds a memory map per string and takes two seconds for a vocabulary of 49,000
tokens; this one notes where arrays lie and decodes them when asked. Block formats and their sizes come from
the package. Every length and offset is compared with the file's size before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from dynamictp.errors import ModelRefused
from dynamictp.model.source import Array

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ENTRIES = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_KEY_BYTES = 1 << 16
_LITTLE_ENDIAN = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_NUMPY = {kind: np.dtype(code) for kind, code in _LITTLE_ENDIAN.items()}
_U64 = struct.Struct("<Q")


class GGUFTensor(msgspec.Struct, frozen=True):
    """One tensor of the directory. `shape` is row-major (the file stores dimensions innermost first)."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    """Absolute, in bytes."""
    nbytes: int

    @property
    def rows(self) -> int:
        """Rows of a matrix, elements of a vector."""
        return self.shape[0]


class _ArraySpan(msgspec.Struct, frozen=True):
    """Where an array value lies; decoded on demand, vocabularies are large and most readers skip them."""

    kind: GGUFValueType
    count: int
    offset: int


class GGUFFile:
    """Owns the memory map of one file. `keys` and `tensors` are complete after construction.

    Raises `ModelRefused` when the file is not GGUF, truncated, or inconsistent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        try:
            with path.open("rb") as file:
                if file.seek(0, 2) < 24:
                    raise ModelRefused(f"{path}: too short to be a GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelRefused(f"{path}: cannot be read: {error.strerror or error}") from error
        cursor = _Cursor(self._map, path)
        tensor_count, key_count = cursor.preamble()
        for _ in range(key_count):
            key = cursor.text(_MAX_KEY_BYTES)
            if key in self._values:
                raise ModelRefused(f"{path}: metadata key {key!r} appears twice")
            self._values[key] = cursor.value(key)
        self.tensors = self._directory(cursor, tensor_count)

    @property
    def keys(self) -> frozenset[str]:
        """Names of the metadata entries."""
        return frozenset(self._values)

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata value: int, float, bool or str; a list for an array; `default` when the key is absent."""
        value = self._values.get(key, default)
        if isinstance(value, _ArraySpan):
            return _Cursor(self._map, self.path, value.offset).array(value)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer value. Raises `ModelRefused` when it is absent without a default, or of another type."""
        value = self._values.get(key, default)
        if type(value) is not int:
            raise ModelRefused(f"{self.path}: metadata key {key} is {_shown(value)}, expected an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float (or integer) value. Raises `ModelRefused` like `integer`."""
        value = self._values.get(key, default)
        if type(value) not in (int, float):
            raise ModelRefused(f"{self.path}: metadata key {key} is {_shown(value)}, expected a number")
        return float(cast(float, value))

    def text(self, key: str, default: str | None = None) -> str | None:
        """A text; `default` when the key is absent. Raises `ModelRefused` when it is of another type."""
        value = self._values.get(key, default)
        if value is not None and type(value) is not str:
            raise ModelRefused(f"{self.path}: metadata key {key} is {_shown(value)}, expected a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean value. Raises `ModelRefused` when it is of another type."""
        value = self._values.get(key, default)
        if type(value) is not bool:
            raise ModelRefused(f"{self.path}: metadata key {key} is {_shown(value)}, expected true or false")
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings. Raises `ModelRefused` when it is absent or of another type."""
        value = self._values.get(key)
        if not isinstance(value, _ArraySpan) or value.kind is not GGUFValueType.STRING:
            raise ModelRefused(
                f"{self.path}: metadata key {key} is {_shown(value)}, expected an array of strings"
            )
        return _Cursor(self._map, self.path, value.offset).array(value)

    def raw(self, tensor: GGUFTensor) -> Array:
        """Stored bytes of a tensor as uint8 `[rows, row bytes]`: a view of the map, not a copy."""
        stored = np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        return stored.reshape(tensor.rows, -1)

    def _directory(self, cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
        alignment = self.integer("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment < 8 or alignment & (alignment - 1):
            raise ModelRefused(f"{self.path}: general.alignment is {alignment}, expected a power of two")
        relative = {}
        for _ in range(count):
            name = cursor.text(_MAX_KEY_BYTES)
            if name in relative:
                raise ModelRefused(f"{self.path}: tensor {name!r} appears twice")
            relative[name] = cursor.tensor_info(name)
        start = -(-cursor.offset // alignment) * alignment
        tensors = {}
        for name, info in relative.items():
            offset = start + info.offset
            if info.offset % alignment:
                raise ModelRefused(f"{self.path}: tensor {name} is not aligned to {alignment} bytes")
            if offset + info.nbytes > cursor.size:
                raise ModelRefused(
                    f"{self.path}: tensor {name} ends at byte {offset + info.nbytes}, "
                    f"the file has {cursor.size}: truncated or corrupt, download it again"
                )
            tensors[name] = msgspec.structs.replace(info, offset=offset)
        self._refuse_overlap(tensors)
        return tensors

    def _refuse_overlap(self, tensors: dict[str, GGUFTensor]) -> None:
        """Tensors that share bytes are no model, and could call for many times the file's size in memory."""
        placed = sorted(tensors, key=lambda name: tensors[name].offset)
        for before, name in pairwise(placed):
            if tensors[before].offset + tensors[before].nbytes > tensors[name].offset:
                raise ModelRefused(f"{self.path}: tensors {before} and {name} overlap: corrupt")


def _shown(value: object) -> str:
    return "missing" if value is None else "an array" if isinstance(value, _ArraySpan) else repr(value)[:80]


class _Cursor:
    """Reads forward through the map; any read past the end is a `ModelRefused`."""

    def __init__(self, data: mmap.mmap, path: Path, offset: int = 0) -> None:
        self._data = data
        self._path = path
        self.offset = offset
        self.size = len(data)

    def preamble(self) -> tuple[int, int]:
        """(tensor count, metadata count) after checking magic and version."""
        if self._data[:4] != MAGIC:
            raise ModelRefused(f"{self._path}: not a GGUF file (it starts with {bytes(self._data[:4])!r})")
        self.offset = 4
        version = self.scalar(GGUFValueType.UINT32)
        if version not in VERSIONS:
            raise ModelRefused(
                f"{self._path}: GGUF version {version} (or big-endian) is not supported; "
                f"supported: {', '.join(map(str, VERSIONS))}, little-endian"
            )
        tensors, keys = self.scalar(GGUFValueType.UINT64), self.scalar(GGUFValueType.UINT64)
        if max(tensors, keys) > _MAX_ENTRIES:
            raise ModelRefused(f"{self._path}: header counts {tensors} tensors and {keys} keys: corrupt")
        return tensors, keys

    def scalar(self, kind: GGUFValueType) -> Any:
        dtype = _NUMPY[kind]
        value = np.frombuffer(self._data, dtype=dtype, count=1, offset=self._advance(dtype.itemsize))[
            0
        ].item()
        if kind is GGUFValueType.FLOAT32:
            return float(str(np.float32(value)))  # the decimal that was meant: 1e-05, not 9.999999747e-06
        return bool(value) if kind is GGUFValueType.BOOL else value

    def text(self, limit: int | None = None) -> str:
        length = self.scalar(GGUFValueType.UINT64)
        if limit is not None and length > limit:
            raise ModelRefused(f"{self._path}: a name of {length} bytes at byte {self.offset}: corrupt")
        start = self._advance(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelRefused(f"{self._path}: text at byte {start} is not UTF-8: {error}") from error

    def value(self, key: str) -> Any:
        kind = self._kind(key)
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is not GGUFValueType.ARRAY:
            return self.scalar(kind)
        item = self._kind(key)
        count = self.scalar(GGUFValueType.UINT64)
        span = _ArraySpan(kind=item, count=count, offset=self.offset)
        if item is GGUFValueType.ARRAY:
            raise ModelRefused(f"{self._path}: metadata key {key} nests arrays, which no known model does")
        if item is GGUFValueType.STRING:
            self._skip_strings(count)
        else:
            self._advance(count * _NUMPY[item].itemsize)
        return span

    def array(self, span: _ArraySpan) -> list[Any]:
        if span.kind is GGUFValueType.STRING:
            return [self.text() for _ in range(span.count)]
        if not span.count:
            return []
        values = np.frombuffer(self._data, dtype=_NUMPY[span.kind], count=span.count, offset=span.offset)
        items: list[Any] = (values.astype(bool) if span.kind is GGUFValueType.BOOL else values).tolist()
        return items

    def tensor_info(self, name: str) -> GGUFTensor:
        """A directory entry, its offset still relative to the data section."""
        dimensions = self.scalar(GGUFValueType.UINT32)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelRefused(f"{self._path}: tensor {name} has {dimensions} dimensions: corrupt")
        shape = tuple(reversed([self.scalar(GGUFValueType.UINT64) for _ in range(dimensions)]))
        code = self.scalar(GGUFValueType.UINT32)
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise ModelRefused(f"{self._path}: tensor {name} has unknown type {code}") from None
        offset = self.scalar(GGUFValueType.UINT64)
        block, block_bytes = GGML_QUANT_SIZES.get(kind, (0, 0))
        elements = math.prod(shape)
        if elements < 1 or block < 1 or shape[-1] % block:
            raise ModelRefused(
                f"{self._path}: tensor {name} of shape {shape} is not made of {kind.name} blocks of {block}"
            )
        return GGUFTensor(kind=kind, shape=shape, offset=offset, nbytes=elements // block * block_bytes)

    def _kind(self, key: str) -> GGUFValueType:
        code = self.scalar(GGUFValueType.UINT32)
        try:
            return GGUFValueType(code)
        except ValueError:
            raise ModelRefused(f"{self._path}: metadata key {key} has unknown type {code}: corrupt") from None

    def _skip_strings(self, count: int) -> None:
        # The hot loop of opening a file: one length per vocabulary entry and merge.
        data, offset, last, read = self._data, self.offset, self.size - _U64.size, _U64.unpack_from
        for _ in range(count):
            if offset > last:
                self.offset = self.size
                self._advance(1)
            offset += _U64.size + read(data, offset)[0]
        self.offset = offset
        self._advance(0)

    def _advance(self, nbytes: int) -> int:
        start = self.offset
        if start + nbytes > self.size:
            raise ModelRefused(
                f"{self._path}: the header reaches past the end of the file ({self.size} bytes): "
                "truncated or corrupt, download it again"
            )
        self.offset = start + nbytes
        return start
