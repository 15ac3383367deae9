"""One rank's slices of the weights: views of the shared mapping, never copies.

Every matrix is cut on output rows, at whole panels; slices include the padding rows of the last panel, so
that a cut never changes the form of a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from dynamictp.errors import ModelRefused
from dynamictp.facts import PANEL_ROWS, ModelFacts
from dynamictp.model.exchange import TORCH_DTYPE
from dynamictp.model.weights import WeightIndex
from dynamictp.ranges import Range, ShardRanges, panels

_MIN_COLUMNS = 80
"""Products with fewer columns take another kernel when they have few rows, with other bits."""


@dataclass(frozen=True)
class Linear:
    """Rows `rows` of a matrix: `weight` [padded rows, K]; `bias` fp32 [rows] if the model has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    rows: Range


@dataclass(frozen=True)
class LayerViews:
    """One decoder layer. Norms are fp32 and whole on every rank; linears are the rank's rows."""

    attn_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class ModelViews:
    """All weights that one rank reads. The embedding is whole on every rank."""

    embed: torch.Tensor
    layers: tuple[LayerViews, ...]
    final_norm: torch.Tensor
    head: Linear

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every weight tensor of the rank."""
        yield from (self.embed, self.final_norm)
        yield from _tensors(self.head)
        for layer in self.layers:
            for field in fields(layer):
                value = getattr(layer, field.name)
                if isinstance(value, Linear):
                    yield from _tensors(value)
                elif value is not None:
                    yield value


@dataclass(frozen=True)
class HeadUnits:
    """Heads whose projections a rank computes."""

    query: Range
    key: Range
    value: Range


def head_units(facts: ModelFacts, qkv: Range) -> HeadUnits:
    """Split a range of fused QKV rows into query, key and value heads."""
    start, stop = qkv.start // facts.head_dim, qkv.stop // facts.head_dim

    def part(first: int, count: int) -> Range:
        low = min(max(start - first, 0), count)
        return Range(low, min(max(stop - first, low), count))

    keys = facts.query_heads
    values = keys + facts.kv_heads
    return HeadUnits(part(0, keys), part(keys, facts.kv_heads), part(values, facts.kv_heads))


def check_exact(facts: ModelFacts) -> None:
    """Raises `ModelRefused` for a model whose shapes this kernel path can't compute exactly."""
    if facts.head_dim % PANEL_ROWS:
        raise ModelRefused(
            f"head_dim is {facts.head_dim}; exact numerics cut at multiples of {PANEL_ROWS} rows, so it must "
            "be one"
        )
    columns = min(facts.hidden, facts.intermediate, facts.query_heads * facts.head_dim)
    if columns < _MIN_COLUMNS:
        raise ModelRefused(
            f"hidden, intermediate and attention widths must be at least {_MIN_COLUMNS}, not {columns}"
        )


def build_views(
    mapping: torch.Tensor, index: WeightIndex, facts: ModelFacts, ranges: ShardRanges
) -> ModelViews:
    """Views of `mapping` (uint8, `index.total_bytes` long) for one rank. Raises `ModelRefused`."""
    check_exact(facts)

    def whole(name: str) -> torch.Tensor:
        entry = index.entries[name]
        flat = mapping[entry.offset : entry.offset + entry.nbytes].view(TORCH_DTYPE[entry.dtype])
        return flat.view(entry.stored_shape)

    def vector(name: str) -> torch.Tensor:
        return whole(name)[: index.entries[name].shape[0]]

    def optional(name: str) -> torch.Tensor | None:
        return vector(name) if name in index.entries else None

    def linear(name: str, rows: Range) -> Linear:
        bias = optional(f"{name}_bias")
        stop = panels(rows.stop) * PANEL_ROWS
        weight = whole(name)[rows.start : stop]
        return Linear(weight, None if bias is None else bias[rows.start : rows.stop], rows)

    def layer(i: int) -> LayerViews:
        at = f"layers.{i}."
        return LayerViews(
            attn_norm=vector(f"{at}attn_norm"),
            qkv=linear(f"{at}qkv", ranges.qkv),
            q_norm=optional(f"{at}q_norm"),
            k_norm=optional(f"{at}k_norm"),
            o=linear(f"{at}o", ranges.hidden),
            mlp_norm=vector(f"{at}mlp_norm"),
            gate=linear(f"{at}gate", ranges.mlp),
            up=linear(f"{at}up", ranges.mlp),
            down=linear(f"{at}down", ranges.hidden),
        )

    return ModelViews(
        embed=whole("embed"),
        layers=tuple(layer(i) for i in range(facts.layers)),
        final_norm=vector("final_norm"),
        head=linear("embed" if facts.tied_head else "head", ranges.vocab),
    )


def copied_bytes(views: ModelViews, mapping: torch.Tensor) -> int:
    """Bytes of weights that do not lie inside `mapping`: 0 unless something copied them."""
    start = mapping.data_ptr()
    stop = start + mapping.nbytes
    return sum(
        tensor.nbytes
        for tensor in views.tensors()
        if not (start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= stop)
    )


def _tensors(linear: Linear) -> Iterator[torch.Tensor]:
    yield linear.weight
    if linear.bias is not None:
        yield linear.bias
