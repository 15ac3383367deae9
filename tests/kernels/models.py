"""Random models in packed form, and the levels this processor has."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from dynamictp import native
from dynamictp.facts import DType, ModelFacts, WeightType
from dynamictp.kernels.native import NativeModel
from dynamictp.kernels.select import LEVELS
from dynamictp.kv import KVSpec
from dynamictp.model.int8 import dequantise, unpack_int8
from dynamictp.model.panels import unpack
from dynamictp.model.rope import RopeTable
from dynamictp.model.weights import WeightIndex, plan_weights, view_weight
from dynamictp.testing.harness import TINY, random_weights
from dynamictp.testing.native_domain import pack_weights, shared_bytes

if native.load() is None:
    pytest.skip("the native extension is not installed", allow_module_level=True)

BEST = LEVELS.index(native.require().kernel_level())
USABLE = LEVELS[: BEST + 1]

VARIANTS: dict[str, ModelFacts] = {
    "llama": msgspec.structs.replace(TINY, tied_head=True),
    "bias": msgspec.structs.replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qk-norm": msgspec.structs.replace(TINY, qk_norm=True, head_dim=32),
}


@cache
def row_weights(variant: str, dtype: DType) -> tuple[WeightIndex, NDArray[np.uint8]]:
    return random_weights(VARIANTS[variant], 3, dtype)


@cache
def packed(variant: str, dtype: DType, weights: WeightType = "") -> tuple[WeightIndex, NDArray[np.uint8]]:
    return pack_weights(VARIANTS[variant], *row_weights(variant, dtype), weights)


@cache
def int8_as_fp32(variant: str, dtype: DType) -> tuple[ModelFacts, WeightIndex, NDArray[np.uint8]]:
    """The values of the int8 weights, row-major in fp32, the head by itself: for references."""
    facts = msgspec.structs.replace(VARIANTS[variant], tied_head=False)
    index, (stored, memory) = plan_weights(facts, "fp32"), packed(variant, dtype, "int8")
    buffer = np.zeros(index.total_bytes, np.uint8)
    for name, entry in index.entries.items():
        source, target = view_weight(stored, memory, name), view_weight(index, buffer, name)
        if stored.entries[name].dtype == "int8":
            target[...] = dequantise(unpack_int8(source, entry.shape[1]))
        elif len(entry.shape) == 2:
            target[...] = unpack(source)
        else:
            target[...] = source
    return facts, index, buffer


def make_model(
    variant: str,
    dtype: DType,
    weights: WeightType = "",
    *,
    level: str = USABLE[-1],
    blocks: int = 16,
    page_tokens: int = 16,
) -> NativeModel:
    """A model with an arena of its own, whose free pages hold NaN in every element."""
    facts = VARIANTS[variant]
    spec = KVSpec.of(facts, page_tokens, dtype)
    arena = shared_bytes(blocks * spec.block_bytes)
    arena[:] = 0xFF
    index, memory = packed(variant, dtype, weights)
    return NativeModel(facts, index, memory, arena, spec, RopeTable(facts), level)
