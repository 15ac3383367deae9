"""KV pages: the one place that knows how K and V lie in the arena.

The arena is [layers, 2 (K, V), pages, elements]. A page holds `page_tokens` tokens of one KV head: K as
[D/2][tokens][2], V as [tokens/2][D][2], so that the pairs of a bf16 dot product stand together. Pages say
nothing about ranks or degrees.

In bf16 a pair is read as one 32-bit word: its first element, shifted up by 16 bits (an integer product,
which is vectorised), and its second, with the
lower 16 bits cleared, are the fp32 values. Both are whole-vector operations, and V's mask rides on them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dynamictp.errors import ConfigError
from dynamictp.facts import PANEL_ROWS
from dynamictp.kv import KVSpec
from dynamictp.model.exchange import TORCH_DTYPE

_UPPER_HALF = -65536  # 0xffff0000 as int32
_SHIFT_UP = 65536  # as a factor: wraps like a shift by 16


class KVArena:
    """All pages of a memory. Owns nothing: the tensor is a view of the shared mapping."""

    def __init__(self, memory: torch.Tensor, spec: KVSpec) -> None:
        """`memory`: uint8, at least one page long. Raises `ConfigError` for an unsuitable page size."""
        if spec.page_tokens % PANEL_ROWS:
            raise ConfigError(
                f"page_tokens is {spec.page_tokens}; exact numerics on this kernel path need a multiple of "
                f"{PANEL_ROWS}"
            )
        self.spec = spec
        self.pages = len(memory) // spec.page_bytes
        flat = memory[: self.pages * spec.page_bytes].view(TORCH_DTYPE[spec.dtype])
        self.tensor = flat.view(spec.layers, 2, self.pages, spec.plane_elements)
        """[layers, 2, pages, page_tokens · D]"""
        self._words = self.tensor.view(torch.int32) if spec.dtype == "bf16" else self.tensor
        # K in words of one pair of dimensions; a view per layer made once, as making one costs as much as
        # a small operation.
        self._k_flat = [self._words[layer, 0].view(-1) for layer in range(spec.layers)]
        self._v_flat = [self.tensor[layer, 1].view(-1) for layer in range(spec.layers)]
        self.k_words = [self._words[layer, 0] for layer in range(spec.layers)]
        self.v_words = [self._words[layer, 1] for layer in range(spec.layers)]

    def write_k(self, layer: int, index: torch.Tensor, k: torch.Tensor) -> None:
        """Write fp32 or bf16 [T, heads, D] where `k_index` of those tokens and heads says."""
        rows = k.reshape(-1).to(self.tensor.dtype)
        if self.spec.dtype == "bf16":
            rows = rows.view(torch.int32)
        self._k_flat[layer].index_copy_(0, index, rows)

    def write_v(self, layer: int, index: torch.Tensor, v: torch.Tensor) -> None:
        """Write fp32 or bf16 [T, heads, D] where `v_index` of those tokens and heads says."""
        self._v_flat[layer].index_copy_(0, index, v.reshape(-1).to(self.tensor.dtype))

    def k_index(self, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Flat index for `write_k`. `pages` int64 [T, heads], `slots` [T]: the token's place in its page."""
        spec = self.spec
        base = pages * spec.plane_elements + (slots * 2)[:, None]
        pairs = base[:, :, None] + torch.arange(spec.head_dim // 2) * (2 * spec.page_tokens)
        if spec.dtype == "bf16":
            return (pairs // 2).reshape(-1)
        return torch.stack((pairs, pairs + 1), -1).reshape(-1)

    def v_index(self, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Flat index for `write_v`. `pages` int64 [T, heads], `slots` [T]: the token's place in its page."""
        spec = self.spec
        inside = slots // 2 * (2 * spec.head_dim) + slots % 2
        base = pages * spec.plane_elements + inside[:, None]
        return (base[:, :, None] + torch.arange(spec.head_dim) * 2).reshape(-1)

    def value_mask(self, kept: torch.Tensor) -> ValueMask:
        """How `read_v` zeroes tokens. `kept` bool [items, pages, page_tokens]."""
        if self.spec.dtype != "bf16":
            return ValueMask(~kept[..., None], None)
        pairs = kept.view(*kept.shape[:2], -1, 2, 1).to(torch.int32)
        return ValueMask(pairs[..., 0, :] * _SHIFT_UP, pairs[..., 1, :] * _UPPER_HALF)

    def read_k(self, layer: int, pages: torch.Tensor, items: int, scratch: Scratch) -> torch.Tensor:
        """K of int64 [items · P] pages as fp32 [items, D, P · page_tokens], dimensions down, tokens along."""
        spec = self.spec
        count = len(pages) // items
        words = scratch.gather(self.k_words[layer], pages)
        out = scratch.take("k", (items, spec.head_dim, count * spec.page_tokens))
        if spec.dtype == "bf16":
            source = words.view(items, count, spec.head_dim // 2, spec.page_tokens)
            pairs = out.view(torch.int32).view(items, spec.head_dim // 2, 2, count, spec.page_tokens)
            target = pairs.permute(0, 3, 1, 2, 4)
            torch.mul(source, _SHIFT_UP, out=target[:, :, :, 0])
            torch.bitwise_and(source, _UPPER_HALF, out=target[:, :, :, 1])
        else:
            source = words.view(items, count, spec.head_dim // 2, spec.page_tokens, 2)
            target = out.view(items, spec.head_dim // 2, 2, count, spec.page_tokens)
            target.copy_(source.permute(0, 2, 4, 1, 3))
        return out

    def read_v(
        self, layer: int, pages: torch.Tensor, mask: ValueMask, items: int, scratch: Scratch
    ) -> torch.Tensor:
        """V of int64 [items · P] pages as fp32 [items, P · page_tokens, D]; tokens outside the mask are zero
        whatever the memory holds, so that 0 · V never meets a stale NaN.
        """
        spec = self.spec
        count = len(pages) // items
        words = scratch.gather(self.v_words[layer], pages)
        out = scratch.take("v", (items, count * spec.page_tokens, spec.head_dim))
        if mask.second is not None:
            source = words.view(items, count, spec.page_tokens // 2, spec.head_dim)
            target = out.view(torch.int32).view(items, count, spec.page_tokens // 2, 2, spec.head_dim)
            torch.mul(source, mask.first, out=target[:, :, :, 0])
            torch.bitwise_and(source, mask.second, out=target[:, :, :, 1])
        else:
            source = words.view(items, count, spec.page_tokens // 2, spec.head_dim, 2)
            target = out.view(items, count, spec.page_tokens // 2, 2, spec.head_dim)
            target.copy_(source.permute(0, 1, 2, 4, 3))
            out.view(items, count, spec.page_tokens, spec.head_dim).masked_fill_(mask.first, 0.0)
        return out


class ValueMask(NamedTuple):
    """bf16: int32 factors and masks [items, P, page_tokens/2, 1] of the pairs' first and second token.
    fp32: `first` is True [items, P, page_tokens, 1] where V is to be zero."""

    first: torch.Tensor
    second: torch.Tensor | None


class Scratch:
    """Buffers that one rank reuses from step to step, by name; each grows to the largest ever asked for."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uninitialised [shape], valid until `name` is taken again."""
        count = 1
        for size in shape:
            count *= size
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count or buffer.dtype != dtype:
            buffer = self._buffers[name] = torch.empty(count, dtype=dtype)
        return buffer[:count].view(shape)

    def gather(self, plane: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Rows `pages` of [pages, elements], copied."""
        out = self.take("pages", (len(pages), plane.shape[1]), plane.dtype)
        return torch.index_select(plane, 0, pages, out=out)
