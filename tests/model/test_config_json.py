"""`config.json` → facts: both generations of the file, and refusal of what the forward pass lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamictp.errors import ModelRefused
from dynamictp.facts import RopeFacts
from dynamictp.model.config_json import facts_from_config, read_facts, read_json, read_sampling_defaults

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN2 = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 131072,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_a_llama_config_gives_its_sizes_and_every_end_token() -> None:
    facts = facts_from_config(LLAMA, {"eos_token_id": 128009, "bos_token_id": 1})
    assert (facts.family, facts.layers, facts.hidden, facts.head_dim) == ("llama", 32, 4096, 128)
    assert (facts.query_heads, facts.kv_heads, facts.vocab, facts.max_context) == (32, 8, 128256, 131072)
    assert facts.eos_ids == (128001, 128008, 128009)
    assert facts.rope == RopeFacts(theta=500000.0)
    assert not any((facts.tied_head, facts.qkv_bias, facts.output_bias, facts.mlp_bias, facts.qk_norm))


def test_end_tokens_are_the_union_of_both_files() -> None:
    facts = facts_from_config({**QWEN2, "eos_token_id": 7}, {"eos_token_id": [9, 7]})
    assert facts.eos_ids == (7, 9)
    assert facts.qkv_bias
    assert not facts.output_bias


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_ROPE}},
    ],
    ids=["v4", "v4 old spelling", "v5"],
)
def test_every_spelling_of_llama3_scaling_means_the_same(rope: dict[str, Any]) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    facts = facts_from_config({**config, **rope})
    assert facts.rope == RopeFacts(theta=5e5, kind="llama3", factor=8.0, original_context=8192)


def test_yarn_carries_its_temperature_and_lengthens_the_context() -> None:
    config = {
        **QWEN2,
        "max_position_embeddings": 32768,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }
    facts = facts_from_config(config)
    assert facts.max_context == 131072
    assert facts.rope.attention_factor == pytest.approx(1.138629436)
    given = {**config["rope_scaling"], "attention_factor": 1.5, "beta_fast": 16, "truncate": False}
    rope = facts_from_config({**config, "rope_scaling": given}).rope
    assert (rope.attention_factor, rope.beta_fast, rope.truncate) == (1.5, 16.0, False)


def test_qwen3_has_explicit_heads_and_their_norms() -> None:
    config = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 1024}
    facts = facts_from_config(config)
    assert (facts.head_dim, facts.query_heads, facts.qk_norm, facts.qkv_bias) == (128, 32, True, False)


def test_llama_biases_are_read() -> None:
    facts = facts_from_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert facts.qkv_bias
    assert facts.output_bias
    assert facts.mlp_bias


def test_sliding_windows_that_never_cut_are_accepted() -> None:
    assert facts_from_config(MISTRAL).max_context == 131072
    assert facts_from_config(QWEN2).max_context == 131072
    window = {"sliding_window": 4096, "max_position_embeddings": 4096}
    assert facts_from_config({**MISTRAL, **window}).max_context == 4096


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (
            LLAMA,
            {"architectures": ["GemmaForCausalLM"]},
            "GemmaForCausalLM is not supported; supported: Llama",
        ),
        (LLAMA, {"architectures": None}, "architectures"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (LLAMA, {"num_local_experts": 8}, "mixture of experts"),
        (LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "its own code"),
        (LLAMA, {"hidden_act": "gelu"}, "gelu"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*supported: default"),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (LLAMA, {"rope_scaling": 4}, "rope_scaling"),
        (LLAMA, {"num_key_value_heads": 7}, "KV heads"),
        (LLAMA, {"num_attention_heads": 33, "num_key_value_heads": 33}, "not divisible"),
        (LLAMA, {"hidden_size": "4096"}, "hidden_size"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"num_hidden_layers": 0}, "layer"),
        (LLAMA, {"vocab_size": 1 << 40}, "vocab is"),
        (LLAMA, {"num_hidden_layers": 10**9}, "layers is"),
        (LLAMA, {"eos_token_id": 128256}, "outside the vocabulary"),
        (LLAMA, {"rms_norm_eps": 0}, "epsilon"),
        (LLAMA, {"rope_theta": float("nan")}, "theta"),
        (MISTRAL, {"sliding_window": 4096}, "sliding-window"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
        (QWEN2, {"layer_types": 2.5}, "layer_types"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 32, "sliding_window": 4096}, "sliding-window"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelRefused, match=named):
        facts_from_config({**base, **change})


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", '{"architectures": ["LlamaForCausalLM"]}'])
def test_unsound_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelRefused, match=r"config\.json"):
        read_facts(tmp_path)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"bos_token": "\\ud83d\\ude00"}')
    assert read_json(file) == {"bos_token": "\U0001f600"}
    file.write_text('{"bos_token": "\\ud83d"}')
    with pytest.raises(ModelRefused, match="not readable"):
        read_json(file)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="no such file"):
        read_facts(tmp_path)


def test_sampling_defaults_follow_the_generation_config(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None}))
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    file.write_text(json.dumps({"temperature": 0.6, "do_sample": False}))
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.0}
