"""The canonical form of a model's weights: one buffer, one index, whatever file they came from.

The buffer is shared memory mapped by every worker. Matrices have their output rows first, padded with zero
rows to whole panels, so that any range of panels is a view. They are row-major, or packed panels
(`model.panels`, or `model.int8` when quantised): what the kernel path reads, never both. Q, K and V are fused
into one matrix; norms and biases are float32. `plan_weights` is pure: every process computes the same index
from the facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamictp.errors import ModelRefused, ResourceError
from dynamictp.facts import DTYPE_BYTES, PANEL_ROWS, DType, ModelFacts, WeightType
from dynamictp.model.int8 import Int8Rows, pack_int8, quantise, row_bytes
from dynamictp.model.panels import pack
from dynamictp.model.source import Array, ModelSource, widen

VECTOR_ALIGNMENT = 64
MATRIX_ALIGNMENT = 4096
_CHUNK_ELEMENTS = 1 << 18  # converted at a time: 1 MiB of float32 stays in cache
WeightLayout = Literal["rows", "panels"]
StoredType = Literal["bf16", "fp32", "int8"]
_NUMPY: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "int8": np.dtype(np.uint8),  # with the scales between them
}


class WeightEntry(msgspec.Struct, frozen=True):
    """Where one weight lies. `shape` is `(rows, columns)` or `(elements,)`, without the padding."""

    offset: int
    """Bytes from the start of the buffer."""
    shape: tuple[int, ...]
    stored_rows: int
    """`shape[0]` rounded up to whole panels; the rows beyond `shape[0]` are zero."""
    dtype: StoredType

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the array that `view_weight` gives: bytes of panels when quantised."""
        if self.dtype == "int8":
            return (self.stored_rows, self.row_bytes)
        return (self.stored_rows, *self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        if self.dtype == "int8":
            return row_bytes(self.shape[1])
        return DTYPE_BYTES[self.dtype] * (self.shape[1] if len(self.shape) == 2 else 1)

    @property
    def nbytes(self) -> int:
        """Bytes stored, padding included."""
        return self.stored_rows * self.row_bytes


class WeightIndex(msgspec.Struct, frozen=True):
    """Every weight of a model by canonical name, in the order of their offsets.

    `embed` [V,H]; per layer, under `layers.{i}.`: `attn_norm` [H], `qkv` [(Nq+2Nkv)·D, H] (Q rows, then K,
    then V), `qkv_bias`, `q_norm` and `k_norm` [D], `o` [H, Nq·D], `o_bias`, `mlp_norm` [H], `gate` and `up`
    [I,H], `gate_bias`, `up_bias`, `down` [H,I], `down_bias`; `final_norm` [H]; `head` [V,H] unless it is
    tied to `embed` and stored in the same type.
    """

    entries: dict[str, WeightEntry]
    dtype: DType
    """Type of the matrices that are not quantised."""
    total_bytes: int
    layout: WeightLayout = "rows"
    """Form of the matrices; `view_weight` shows raw memory. Packed rows keep place and size."""
    weights: WeightType = ""
    """Quantisation of all matrices but the embedding."""


class _Weight(NamedTuple):
    """One canonical weight and the checkpoint tensors whose rows it stacks."""

    name: str
    tensors: tuple[str, ...]
    shape: tuple[int, ...]


def plan_weights(
    facts: ModelFacts, dtype: DType, layout: WeightLayout = "rows", weights: WeightType = ""
) -> WeightIndex:
    """Lay out every weight of the model: matrices in `dtype` or quantised, vectors in float32. Pure.

    Raises `ModelRefused` for packed panels of a model whose heads are not whole panels, `ValueError` for
    quantised weights that are not packed.
    """
    if weights and layout != "panels":
        raise ValueError(f"{weights} weights are packed panels, not {layout}")
    if layout == "panels" and facts.head_dim % PANEL_ROWS:
        raise ModelRefused(f"head_dim is {facts.head_dim}; packed weights need a multiple of {PANEL_ROWS}")
    entries: dict[str, WeightEntry] = {}
    end = 0
    for weight in _weights(facts, weights):
        matrix = len(weight.shape) == 2
        quantised = weights if matrix and weight.name != "embed" else ""
        entry = WeightEntry(
            offset=_round_up(end, MATRIX_ALIGNMENT if matrix else VECTOR_ALIGNMENT),
            shape=weight.shape,
            stored_rows=_round_up(weight.shape[0], PANEL_ROWS),
            dtype=quantised or (dtype if matrix else "fp32"),
        )
        entries[weight.name] = entry
        end = entry.offset + entry.nbytes
    total_bytes = _round_up(end, MATRIX_ALIGNMENT)
    return WeightIndex(entries=entries, dtype=dtype, total_bytes=total_bytes, layout=layout, weights=weights)


def load_weights(
    source: ModelSource,
    index: WeightIndex,
    buffer: memoryview | NDArray[np.uint8],
    *,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Read part `i` of `n` of the weights into `buffer` (at least `index.total_bytes`, writable).

    Each weight belongs to exactly one part, so `n` processes can share the work without touching each other's
    bytes. float32 → bf16 rounds to nearest even; int8 that the source has in the same form is taken as it is.
    Holds one slice of one matrix at a time.
    Raises `ModelRefused` for infinite or undefined values, `ResourceError` for a buffer that is too small.
    """
    i, n = part
    if not 0 <= i < n:
        raise ValueError(f"part {part}: expected 0 <= i < n")
    if plan_weights(source.facts, index.dtype, index.layout, index.weights) != index:
        raise ValueError("the index was planned for another model")
    target = np.frombuffer(buffer, dtype=np.uint8)
    if target.nbytes < index.total_bytes:
        raise ResourceError(f"the weight buffer has {target.nbytes} bytes, {index.total_bytes} are needed")
    mine = _share(index, n)[i]
    for weight in _weights(source.facts, index.weights):
        if weight.name in mine:
            packed = index.layout == "panels" and len(weight.shape) == 2
            _load_one(source, weight, view_weight(index, target, weight.name), packed=packed)


def view_weight(index: WeightIndex, buffer: memoryview | NDArray[np.uint8], name: str) -> Array:
    """Weight `name` in `buffer` with its padding rows: bfloat16 or float32 `stored_shape`, uint8 when it is
    quantised; no copy.
    """
    entry = index.entries[name]
    flat = np.frombuffer(buffer, dtype=np.uint8, count=entry.nbytes, offset=entry.offset)
    return flat.view(_NUMPY[entry.dtype]).reshape(entry.stored_shape)


def _weights(facts: ModelFacts, weights: WeightType = "") -> Iterator[_Weight]:
    """The one mapping between canonical names and checkpoint names."""
    hidden, wide, dim = facts.hidden, facts.intermediate, facts.head_dim
    yield _Weight("embed", ("model.embed_tokens.weight",), (facts.vocab, hidden))
    for layer in range(facts.layers):
        to, source = f"layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = f"{source}self_attn.", f"{source}mlp."
        qkv = tuple(f"{attention}{name}_proj" for name in "qkv")
        linears: list[tuple[str, tuple[str, ...], tuple[int, int], bool]] = [
            ("qkv", qkv, (facts.qkv_units * dim, hidden), facts.qkv_bias),
            ("o", (f"{attention}o_proj",), (hidden, facts.query_heads * dim), facts.output_bias),
            ("gate", (f"{mlp}gate_proj",), (wide, hidden), facts.mlp_bias),
            ("up", (f"{mlp}up_proj",), (wide, hidden), facts.mlp_bias),
            ("down", (f"{mlp}down_proj",), (hidden, wide), facts.mlp_bias),
        ]
        yield _Weight(f"{to}attn_norm", (f"{source}input_layernorm.weight",), (hidden,))
        if facts.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield _Weight(f"{to}{name}", (f"{attention}{name}.weight",), (dim,))
        yield _Weight(f"{to}mlp_norm", (f"{source}post_attention_layernorm.weight",), (hidden,))
        for name, modules, shape, bias in linears:
            yield _Weight(to + name, tuple(f"{module}.weight" for module in modules), shape)
            if bias:
                yield _Weight(f"{to}{name}_bias", tuple(f"{module}.bias" for module in modules), shape[:1])
    yield _Weight("final_norm", ("model.norm.weight",), (hidden,))
    if weights or not facts.tied_head:
        head = "model.embed_tokens" if facts.tied_head else "lm_head"
        yield _Weight("head", (f"{head}.weight",), (facts.vocab, hidden))


def _share(index: WeightIndex, parts: int) -> list[set[str]]:
    """Weights of each part, by bytes: the largest first to the part with the least so far."""
    shares: list[set[str]] = [set() for _ in range(parts)]
    loads = [0] * parts
    for name, entry in sorted(index.entries.items(), key=lambda item: (-item[1].nbytes, item[0])):
        least = loads.index(min(loads))
        shares[least].add(name)
        loads[least] += entry.nbytes
    return shares


def _load_one(source: ModelSource, weight: _Weight, target: Array, *, packed: bool) -> None:
    start = 0
    for tensor in weight.tensors:
        rows = source.shape(tensor)[0]
        if packed:
            # Only the last tensor of a stack may end inside a panel: heads are whole panels.
            _pack_rows(source, tensor, target[start : _round_up(start + rows, PANEL_ROWS)], rows)
        else:
            _copy_rows(source, tensor, target[start : start + rows])
        start += rows
    if not packed:
        target[start:] = 0


def _copy_rows(source: ModelSource, tensor: str, target: Array) -> None:
    for start, stop in _steps(source, tensor, len(target)):
        target[start:stop] = _values(source, tensor, start, stop)


def _pack_rows(source: ModelSource, tensor: str, target: Array, rows: int) -> None:
    """Write `rows` rows as panels into the memory of `target`, a whole number of panels."""
    for start, stop in _steps(source, tensor, rows):
        part = target[start : _round_up(stop, PANEL_ROWS)]
        if target.dtype == np.uint8:
            pack_int8(_int8_rows(source, tensor, start, stop, len(part)), part)
        else:
            chunk = np.zeros(part.shape, part.dtype)
            chunk[: stop - start] = _values(source, tensor, start, stop)
            pack(chunk, part)


def _int8_rows(source: ModelSource, tensor: str, start: int, stop: int, stored_rows: int) -> Int8Rows:
    """Rows [start, stop) and zero rows up to `stored_rows`."""
    rows = source.int8_rows(tensor, start, stop)
    if rows is None:
        rows = quantise(_values(source, tensor, start, stop))
    elif not np.isfinite(rows.scales).all():
        raise _not_finite(source, tensor, start, stop)
    missing = ((0, stored_rows - (stop - start)), (0, 0))
    return Int8Rows(np.pad(rows.quants, missing), np.pad(rows.scales, missing))


def _steps(source: ModelSource, tensor: str, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows to convert at a time: whole panels, except at the end."""
    columns = source.shape(tensor)[1] if len(source.shape(tensor)) == 2 else 1
    step = _round_up(max(1, _CHUNK_ELEMENTS // columns), PANEL_ROWS)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _values(source: ModelSource, tensor: str, start: int, stop: int) -> Array:
    """Rows [start, stop), checked. Raises `ModelRefused`."""
    values = widen(source.rows(tensor, start, stop))
    if not _finite(values):
        raise _not_finite(source, tensor, start, stop)
    return values


def _not_finite(source: ModelSource, tensor: str, start: int, stop: int) -> ModelRefused:
    return ModelRefused(
        f"{source.path}: tensor {tensor} has infinite or undefined values (rows {start} to {stop})"
    )


def _finite(values: Array) -> bool:
    if values.dtype == _NUMPY["bf16"]:
        # All exponent bits set means infinite or undefined; ten times faster than asking the type itself.
        return not bool(((values.view(np.uint16) & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(values).all())


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
