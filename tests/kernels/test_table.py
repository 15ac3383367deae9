"""Each level's linear kernels against fp64, and their bits over batch, cut and stride."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynamictp import native
from dynamictp.model.int8 import GROUP, Int8Rows, dequantise, pack_int8, quantise, row_bytes
from dynamictp.model.panels import pack
from tests.kernels.models import USABLE

TYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp32": np.float32}
Array = NDArray[Any]


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def values(seed: int, *shape: int, dtype: str) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(TYPES[dtype])


def pack_new(rows: Array) -> Array:
    target = np.empty_like(rows)
    pack(rows, target)
    return target


def linear(
    level: str, dtype: str, weights: Array, x: Array, bias: Array | None = None
) -> NDArray[np.float32]:
    """x·Wᵀ through the kernel, weights packed whole."""
    out = np.full((len(x), len(weights) + 5), np.nan, np.float32)
    table = native.require().KernelTable(level, dtype)
    table.linear(
        address(weights),
        len(weights) // 16,
        weights.shape[1],
        0 if bias is None else address(bias),
        address(x),
        x.strides[0] // x.itemsize,
        len(x),
        address(out),
        out.shape[1],
    )
    assert np.isnan(out[:, len(weights) :]).all()
    return out[:, : len(weights)]


def linear_int8(level: str, dtype: str, weights: Int8Rows, x: Array) -> NDArray[np.float32]:
    rows, columns = weights.quants.shape
    panels = np.empty((rows, row_bytes(columns)), np.uint8)
    pack_int8(weights, panels)
    out = np.empty((len(x), rows), np.float32)
    table = native.require().KernelTable(level, dtype)
    stride = x.strides[0] // x.itemsize
    table.linear_int8(address(panels), rows // 16, columns, 0, address(x), stride, len(x), address(out), rows)
    return out


def gated(level: str, dtype: str, gate: Array, up: Array, x: Array) -> Array:
    out = np.zeros((len(x), len(gate)), x.dtype)
    table = native.require().KernelTable(level, dtype)
    stride = x.strides[0] // x.itemsize
    table.gated(
        address(gate),
        address(up),
        len(gate) // 16,
        gate.shape[1],
        address(x),
        stride,
        len(x),
        address(out),
        len(gate),
    )
    return out


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("level", USABLE)
def test_linear_is_a_product(level: str, dtype: str) -> None:
    weights, x = values(0, 112, 96, dtype=dtype), values(1, 19, 96, dtype=dtype)
    bias = values(2, 112, dtype="fp32")
    expected = x.astype(np.float64) @ weights.astype(np.float64).T + bias
    got = linear(level, dtype, pack_new(weights), x, bias)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("level", USABLE)
def test_gated_is_silu_times_up(level: str, dtype: str) -> None:
    gate, up = values(0, 48, 80, dtype=dtype), values(1, 48, 80, dtype=dtype)
    x = values(2, 5, 80, dtype=dtype)
    x[0] *= 30  # far into both flat ends of the sigmoid
    wide = x.astype(np.float64)
    left, right = wide @ gate.astype(np.float64).T, wide @ up.astype(np.float64).T
    with np.errstate(over="ignore"):
        expected = left / (1 + np.exp(-left)) * right
    got = gated(level, dtype, pack_new(gate), pack_new(up), x).astype(np.float64)
    # One rounding to bf16 is 2^-9 at most.
    np.testing.assert_allclose(got, expected, rtol=2e-3 if dtype == "fp32" else 6e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("level", USABLE)
@pytest.mark.parametrize("columns", [96, 80, 16])
def test_int8_products_are_nearly_exact(level: str, dtype: str, columns: int) -> None:
    weights = quantise(values(0, 48, columns, dtype="fp32"))
    x = values(1, 19, columns, dtype=dtype)
    x[3] *= 1e4
    x[4, :5] = 0
    wide, exact = x.astype(np.float64), dequantise(weights).astype(np.float64)
    got = linear_int8(level, dtype, weights, x)
    # An activation is off by at most half a step of its group; bf16 would be by 2^-9 of itself.
    groups = np.abs(np.pad(wide, ((0, 0), (0, -columns % GROUP)))).reshape(len(x), -1, GROUP).max(2)
    steps = np.repeat(groups, GROUP, 1)[:, :columns] / 32767
    bound = 0.5 * steps @ np.abs(exact).T + 1e-5 * np.abs(wide) @ np.abs(exact).T
    assert (np.abs(got - wide @ exact.T) <= bound).all()


@pytest.mark.parametrize("level", USABLE)
def test_int8_integers_are_exact_at_their_limits(level: str) -> None:
    """The largest sums of a group, and fp16 scales from the smallest to the largest."""
    scales = np.array([2**-24, 2**-14, 1e-3, 1.5, 65504], np.float16).repeat(16)[:, None]
    weights = Int8Rows(np.full((80, GROUP), -128, np.int8), scales)
    x = np.full((1, GROUP), 3.0, np.float32)
    got = linear_int8(level, "fp32", weights, x)
    np.testing.assert_allclose(got[0], -128.0 * 3 * GROUP * scales[:, 0].astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("level", USABLE)
def test_int8_keeps_undefined_and_tiny_activations(level: str) -> None:
    x = np.ones((4, 2 * GROUP), np.float32)
    x[0, 7], x[1, 40], x[2] = np.nan, np.inf, 1e-40
    got = linear_int8(level, "fp32", quantise(np.ones((16, 2 * GROUP), np.float32)), x)
    assert np.isnan(got[0]).all()
    assert not np.isfinite(got[1]).any()
    assert (got[2] == 0).all()
    np.testing.assert_allclose(got[3], 2 * GROUP, rtol=1e-3)


@pytest.mark.parametrize("level", USABLE)
@settings(max_examples=15)
@given(rows=st.integers(1, 150), columns=st.integers(1, 20), panels=st.integers(1, 7), data=st.data())
def test_int8_bits_do_not_depend_on_batch_or_cut(
    *, level: str, rows: int, columns: int, panels: int, data: st.DataObject
) -> None:
    weights = quantise(values(panels, 16 * panels, 16 * columns, dtype="fp32"))
    x = values(rows, rows, 16 * columns, dtype="bf16")
    whole = linear_int8(level, "bf16", weights, x)
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, min(rows - first, 20)))
    start = data.draw(st.integers(0, panels - 1))
    stop = data.draw(st.integers(start + 1, panels))
    part = Int8Rows(weights.quants[16 * start : 16 * stop], weights.scales[16 * start : 16 * stop])
    got = linear_int8(level, "bf16", part, x[first : first + count])
    assert np.array_equal(got, whole[first : first + count, 16 * start : 16 * stop])


@pytest.mark.parametrize("level", USABLE)
@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=15)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 40),
    panels=st.integers(1, 9),
    data=st.data(),
)
def test_bits_do_not_depend_on_batch_or_cut(
    *, level: str, dtype: str, rows: int, columns: int, panels: int, data: st.DataObject
) -> None:
    weights = pack_new(values(panels, 16 * panels, 2 * columns, dtype=dtype))
    x = np.zeros((rows, 2 * columns + 32), TYPES[dtype])[:, : 2 * columns]
    x[...] = values(rows, rows, 2 * columns, dtype=dtype)
    whole, whole_gated = linear(level, dtype, weights, x), gated(level, dtype, weights, weights, x)
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, min(rows - first, 20)))
    start = data.draw(st.integers(0, panels - 1))
    stop = data.draw(st.integers(start + 1, panels))
    part, sub = weights[16 * start : 16 * stop], x[first : first + count]
    assert np.array_equal(
        linear(level, dtype, part, sub), whole[first : first + count, 16 * start : 16 * stop]
    )
    assert np.array_equal(
        gated(level, dtype, part, part, sub), whole_gated[first : first + count, 16 * start : 16 * stop]
    )


@pytest.mark.parametrize("level", USABLE)
@given(
    size=st.integers(1, 100).map(lambda n: 16 * n),
    peaks=st.lists(st.integers(0, 1599), min_size=1, max_size=5),
)
def test_arg_max_is_the_lowest_of_equals(level: str, size: int, peaks: list[int]) -> None:
    logits = np.random.default_rng(size).standard_normal(size, np.float32)
    logits[[peak % size for peak in peaks]] = 9.0
    table = native.require().KernelTable(level, "fp32")
    assert table.arg_max(address(logits), size) == min(peak % size for peak in peaks)


def test_a_level_must_exist() -> None:
    with pytest.raises(ValueError, match="unknown kernel level"):
        native.require().KernelTable("sse9", "bf16")
