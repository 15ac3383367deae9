"""int8 weights: rounding, panels, and that a GGUF's Q8_0 blocks are taken as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynamictp.errors import ModelRefused
from dynamictp.model.int8 import (
    GROUP,
    Int8Rows,
    dequantise,
    pack_int8,
    quantise,
    row_bytes,
    unpack_int8,
)
from dynamictp.model.load import open_model
from dynamictp.model.weights import WeightIndex, load_weights, plan_weights, view_weight
from tests.model.checkpoints import make_checkpoint, write_gguf

Loaded = tuple[WeightIndex, NDArray[np.uint8]]


def stored(loaded: Loaded, name: str) -> Int8Rows:
    index, buffer = loaded
    entry = index.entries[name]
    rows = unpack_int8(view_weight(index, buffer, name), entry.shape[1])
    assert not rows.quants[entry.shape[0] :].any()
    return Int8Rows(*(part[: entry.shape[0]] for part in rows))


def load(path: str, parts: int = 1) -> Loaded:
    source = open_model(path)
    index = plan_weights(source.facts, "bf16", "panels", "int8")
    buffer = np.full(index.total_bytes, 0xA5, np.uint8)
    for part in range(parts):
        load_weights(source, index, buffer, part=(part, parts))
    return index, buffer


@given(
    rows=st.integers(1, 3), columns=st.integers(1, 100), power=st.integers(-30, 15), seed=st.integers(0, 99)
)
def test_values_are_off_by_half_a_step(rows: int, columns: int, power: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32) * np.float32(2.0**power)
    found = quantise(values)
    steps = np.repeat(found.scales.astype(np.float64), GROUP, axis=1)[:, :columns]
    assert (np.abs(dequantise(found) - values) <= 0.501 * steps).all()
    assert np.abs(found.quants.astype(int)).max() <= 127


def test_large_values_have_no_scale_and_zeros_stay() -> None:
    with pytest.raises(ModelRefused, match="too large for int8"):
        quantise(np.full((1, 32), 1e7, np.float32))
    assert not quantise(np.zeros((1, 40), ml_dtypes.bfloat16)).quants.any()


def test_order_in_a_panel() -> None:
    quants = np.arange(32 * 100).reshape(32, 100).astype(np.int8)
    scales = np.arange(32 * 4).reshape(32, 4).astype(np.float16)
    target = np.empty((32, row_bytes(100)), np.uint8)
    pack_int8(Int8Rows(quants, scales), target)
    assert target.nbytes == 2 * 2 * (64 + 1024)
    blocks = target.reshape(2, 2, 1088)
    for row, column in ((0, 0), (5, 33), (15, 64), (16, 3), (31, 99)):
        block, within = blocks[row // 16, column // 64], column % 64
        assert block[:64].view(np.float16)[within // 32 * 16 + row % 16] == scales[row, column // 32]
        at = 64 + within // 2 * 32 + row % 16 * 2 + column % 2
        assert block[at : at + 1].view(np.int8)[0] == quants[row, column]
    assert not blocks[:, 1, 64 + 36 // 2 * 32 :].any()
    found = unpack_int8(target, 100)
    assert np.array_equal(found.quants, quants)
    assert np.array_equal(found.scales, scales)


def test_all_matrices_but_the_embedding_are_quantised(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama")
    source, (index, buffer) = open_model(str(path)), load(str(path), parts=3)
    assert source.facts.tied_head
    kinds = {name: entry.dtype for name, entry in index.entries.items() if len(entry.shape) == 2}
    assert kinds.pop("embed") == "bf16"
    assert set(kinds.values()) == {"int8"}
    assert "head" in kinds
    values = source.tensor("model.layers.1.mlp.down_proj.weight")
    assert np.array_equal(stored((index, buffer), "layers.1.down").quants, quantise(values).quants)
    embedding = source.tensor("model.embed_tokens.weight")
    assert np.array_equal(stored((index, buffer), "head").scales, quantise(embedding).scales)
    plain = plan_weights(source.facts, "bf16", "panels")
    assert index.total_bytes < plain.total_bytes
    with pytest.raises(ValueError, match="packed panels"):
        plan_weights(source.facts, "bf16", "rows", "int8")


def test_q8_0_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("llama", tmp_path / "m", hidden=288, head_dim=32)
    file = str(write_gguf(folder, tmp_path / "m.gguf", "Q8_0"))
    monkeypatch.setattr("dynamictp.model.weights.quantise", lambda _: pytest.fail("quantised again"))
    source, loaded = open_model(file), load(file)
    names = {"o": ("self_attn.o",), "down": ("mlp.down",), "qkv": tuple(f"self_attn.{x}" for x in "qkv")}
    for name, stack in names.items():
        values = [source.tensor(f"model.layers.0.{part}_proj.weight") for part in stack]
        assert np.array_equal(dequantise(stored(loaded, f"layers.0.{name}")), np.concatenate(values))


def test_undefined_scales_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "m", hidden=288, head_dim=32)
    file = write_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    reader = gguf.GGUFReader(file, "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
    tensor.data[3, :2] = 0xFF  # the scale of a block
    reader.data.flush()
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.down_proj\.weight has infinite or undefined"):
        load(str(file))
