"""The canonical form: one layout, the same bytes from every source, written in place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from dynamictp.errors import ModelRefused, ResourceError
from dynamictp.facts import DType
from dynamictp.model.load import open_model
from dynamictp.model.source import ModelSource
from dynamictp.model.weights import WeightIndex, load_weights, plan_weights, view_weight
from tests.model.checkpoints import VARIANTS, make_checkpoint, write_gguf

Maker = Callable[[str], Path]


def loaded(
    source: ModelSource, dtype: DType = "bf16", parts: int = 1
) -> tuple[WeightIndex, NDArray[np.uint8]]:
    index = plan_weights(source.facts, dtype)
    buffer = np.full(index.total_bytes, 0xA5, dtype=np.uint8)  # shared memory need not be zero
    for i in range(parts):
        load_weights(source, index, buffer, part=(i, parts))
    return index, buffer


def used_bytes(index: WeightIndex, buffer: NDArray[np.uint8]) -> dict[str, bytes]:
    return {name: view_weight(index, buffer, name).tobytes() for name in index.entries}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_and_safetensors_load_to_the_same_bytes(
    checkpoint: Maker, gguf_checkpoint: Maker, variant: str
) -> None:
    for dtype in ("bf16", "fp32"):
        one = loaded(open_model(str(checkpoint(variant))), dtype)
        two = loaded(open_model(str(gguf_checkpoint(variant))), dtype)
        assert one[0] == two[0]
        assert used_bytes(*one) == used_bytes(*two)


@pytest.mark.parametrize("stored", ["F16", "BF16"])
def test_the_stored_type_does_not_matter(checkpoint: Maker, tmp_path: Path, stored: str) -> None:
    exact = loaded(open_model(str(checkpoint("llama-untied-bias"))))
    folder = make_checkpoint("llama", tmp_path / "m", tied=False, bias=True, stored=stored)  # type: ignore[arg-type]
    assert used_bytes(*loaded(open_model(str(folder)))) == used_bytes(*exact)
    file = write_gguf(folder, tmp_path / "m.gguf", stored)
    assert used_bytes(*loaded(open_model(str(file)))) == used_bytes(*exact)


def test_every_weight_stands_where_the_index_says(checkpoint: Maker) -> None:
    source = open_model(str(checkpoint("llama-untied-bias")))
    index, buffer = loaded(source, "fp32")
    for layer in range(source.facts.layers):
        prefix = f"model.layers.{layer}."
        parts = [source.tensor(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"]
        fused = np.concatenate(parts)
        assert np.array_equal(view_weight(index, buffer, f"layers.{layer}.qkv")[: len(fused)], fused)
        for name, tensor in [
            ("o_bias", "self_attn.o_proj.bias"),
            ("gate", "mlp.gate_proj.weight"),
            ("up", "mlp.up_proj.weight"),
            ("down", "mlp.down_proj.weight"),
            ("mlp_norm", "post_attention_layernorm.weight"),
            ("attn_norm", "input_layernorm.weight"),
        ]:
            values = source.tensor(prefix + tensor)
            assert np.array_equal(view_weight(index, buffer, f"layers.{layer}.{name}")[: len(values)], values)
    head = source.tensor("lm_head.weight")
    assert np.array_equal(view_weight(index, buffer, "head")[: len(head)], head)


def test_rows_are_padded_to_panels_with_zeros(checkpoint: Maker) -> None:
    index, buffer = loaded(open_model(str(checkpoint("llama"))))
    embed = index.entries["embed"]
    assert (embed.shape, embed.stored_rows) == ((1000, 144), 1008)
    assert not view_weight(index, buffer, "embed")[1000:].view(np.uint16).any()
    assert "head" not in index.entries


def test_the_layout_is_aligned_without_overlap(checkpoint: Maker) -> None:
    index = plan_weights(open_model(str(checkpoint("qwen3"))).facts, "bf16")
    end = 0
    for name, entry in index.entries.items():
        assert entry.offset >= end
        assert entry.offset % (4096 if len(entry.shape) == 2 else 64) == 0, name
        assert entry.stored_rows % 16 == 0
        assert entry.dtype == ("bf16" if len(entry.shape) == 2 else "fp32")
        end = entry.offset + entry.nbytes
    assert end <= index.total_bytes
    assert index.entries["layers.0.qkv"].shape == ((9 + 2 * 3) * 32, 144)
    assert index.entries["layers.0.o"].shape == (144, 9 * 32)
    assert index.entries["layers.0.q_norm"].shape == (32,)


def test_parts_cover_everything_exactly_once(checkpoint: Maker) -> None:
    source = open_model(str(checkpoint("llama")))
    index, whole = loaded(source)
    assert used_bytes(*loaded(source, parts=3)) == used_bytes(index, whole)
    writers = np.zeros(index.total_bytes, dtype=np.uint8)
    for i in range(3):
        mine = np.full(index.total_bytes, 0xA5, dtype=np.uint8)
        load_weights(source, index, mine, part=(i, 3))
        for name, entry in index.entries.items():
            if view_weight(index, mine, name).tobytes() == view_weight(index, whole, name).tobytes():
                writers[entry.offset : entry.offset + entry.nbytes] += 1
            else:
                assert (mine[entry.offset : entry.offset + entry.nbytes] == 0xA5).all(), "written in part"
    assert all(
        (writers[entry.offset : entry.offset + entry.nbytes] == 1).all() for entry in index.entries.values()
    )


def test_float32_rounds_to_nearest_even(checkpoint: Maker, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF80FFFF], dtype=np.uint32).view(np.float32)
    embed[0, :4] = halfway
    save_file(tensors, folder / "model.safetensors")
    index, buffer = loaded(open_model(str(folder)))
    read = view_weight(index, buffer, "embed")[0, :4].view(np.uint16)
    assert read.tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF81]


@pytest.mark.parametrize("stored", ["F32", "BF16"])
def test_undefined_values_are_refused(checkpoint: Maker, tmp_path: Path, stored: str) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))
    kind = np.float32 if stored == "F32" else ml_dtypes.bfloat16
    tensors = {name: value.astype(kind) for name, value in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.down_proj\.weight has infinite or undefined"):
        loaded(open_model(str(folder)))


def test_wrong_use_is_refused(checkpoint: Maker) -> None:
    source = open_model(str(checkpoint("llama")))
    index = plan_weights(source.facts, "bf16")
    with pytest.raises(ResourceError, match="bytes"):
        load_weights(source, index, np.zeros(index.total_bytes - 1, np.uint8))
    with pytest.raises(ValueError, match="part"):
        load_weights(source, index, np.zeros(index.total_bytes, np.uint8), part=(2, 2))
    other = plan_weights(open_model(str(checkpoint("qwen2"))).facts, "bf16")
    with pytest.raises(ValueError, match="another model"):
        load_weights(source, other, np.zeros(other.total_bytes, np.uint8))


def test_a_memoryview_is_filled_in_place(checkpoint: Maker) -> None:
    source = open_model(str(checkpoint("llama")))
    index, whole = loaded(source)
    store = bytearray(index.total_bytes)
    load_weights(source, index, memoryview(store))
    assert used_bytes(index, np.frombuffer(store, np.uint8)) == used_bytes(index, whole)
