"""Rotary position embedding: cos and sin tables in fp32, with the ways to stretch a context.

Frequencies follow the Hugging Face definitions of `rope_scaling` (default, linear, llama3, yarn), in their
half-split order: dimension i is rotated with dimension i + D/2.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from dynamictp.facts import ModelFacts, RopeFacts

_GROW = 2048


class RopeTable:
    """cos and sin per position, computed for as many positions as were asked for so far.

    Each entry depends on its position alone, so growing changes nothing, and every rank has the same table.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._frequencies = inverse_frequencies(facts.rope, facts.head_dim)
        self._factor = facts.rope.attention_factor
        self._tables = (torch.empty(0, facts.head_dim), torch.empty(0, facts.head_dim))

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, signed sin) for int64 [T] positions, each fp32 [T, 1, D].

        The first half of sin carries the minus of the rotation: x·cos + roll(x, D/2)·sin rotates x.
        """
        cos, sin = self._at_least(int(positions.max()) + 1 if len(positions) else 0)
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def tables(self, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(cos, sin) fp32 [at least `positions`, D/2], contiguous: the form that the native kernels read."""
        cos, sin = self._at_least(positions)
        half = cos.shape[1] // 2
        return cos[:, :half].contiguous().numpy(), sin[:, half:].contiguous().numpy()

    def _at_least(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self._tables
        if positions > len(tables[0]):
            # Both in one assignment: ranks may be threads of one process.
            tables = self._tables = self._compute(-(-positions // _GROW) * _GROW)
        return tables

    def _compute(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * self._frequencies[None, :]
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate fp32 [T, heads, D] by the rows of a `RopeTable`.

    Products and sum apart, each rounded once: a fused one is not fused in the last elements of a tensor.
    """
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def inverse_frequencies(rope: RopeFacts, head_dim: int) -> torch.Tensor:
    """fp32 [D/2] radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    return base


def _llama3(rope: RopeFacts, base: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / base
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    stretched = torch.where(wavelength > longest, base / rope.factor, between)
    return torch.where(wavelength < shortest, base, stretched)


def _yarn(rope: RopeFacts, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Dimensions that turn more than `beta_fast` times in the original context are kept, those below
    `beta_slow` turns stretched, with a linear ramp between (YaRN, arXiv 2309.00071).
    """

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return base / rope.factor * (1 - kept) + base * kept
