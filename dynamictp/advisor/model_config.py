"""Hugging Face `config.json` → `ModelShape`, beyond what this server runs.

`dynamictp.model.config_json` refuses what the forward pass does not implement; here mixtures of experts,
latent attention, sliding windows and quantised checkpoints are understood, because they decide the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamictp.cost.shape import Experts, LatentAttention, ModelShape, WeightFormat
from dynamictp.errors import ModelRefused
from dynamictp.model.config_json import read_json

DENSE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MIXTURES = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
}
_TYPES = {family: family for family in (DENSE | MIXTURES).values()} | {
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
}
"""`model_type`, for a file without `architectures`."""
_MAXIMUM = 1 << 28


def shape_from_config(config: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """Sizes from a parsed `config.json`. Raises `ModelRefused` naming the key at fault."""
    family = _family(config, where)
    fields = _Reader(config, where)
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    latent = _latent(fields) if family == "deepseek" else None
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelRefused(f"{where}: {heads} query heads are not divisible by {kv_heads} KV heads")
    head_dim = fields.size("head_dim", 128 if family.startswith("qwen3") else hidden // heads)
    if latent is not None:
        head_dim = latent.nope_dim + latent.rope_dim
    layers = fields.size("num_hidden_layers")
    window, windowed = _window(fields, family, layers)
    weights = _weight_format(config, where)
    attention_bias = bool(config.get("attention_bias")) and family in ("llama", "qwen3", "qwen3_moe")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.size("intermediate_size"),
        vocab=fields.size("vocab_size"),
        max_context=fields.size("max_position_embeddings"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family.startswith("qwen2"),
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")) and family == "llama",
        qk_norm=family.startswith("qwen3"),
        experts=_experts(fields, family, layers) if family in MIXTURES.values() else None,
        latent=latent,
        window=window,
        windowed_layers=windowed,
        weights=weights,
        note="" if weights.name == "bf16" else f"weights stored as {weights.name}",
    )


def read_config_folder(folder: Path) -> ModelShape:
    """Sizes of the model in a Hugging Face folder (only `config.json` is read)."""
    file = folder / "config.json"
    return shape_from_config(read_json(file), folder.resolve().name, str(file))


class _Reader:
    """Positive integers by key; every failure names the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int or not 1 <= value <= _MAXIMUM:
            shown = "missing" if value is None else repr(value)
            raise ModelRefused(f"{self.where}: {key} is {shown}, expected a positive integer")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """Like `size`, with 0 (or null) allowed."""
        value = self.values.get(key)
        return default if value is None else 0 if value == 0 else self.size(key)


def _family(config: Mapping[str, Any], where: str) -> str:
    architectures = config.get("architectures")
    known = DENSE | MIXTURES
    if isinstance(architectures, list) and architectures:
        what, family = f"architecture {architectures[0]!r}", known.get(str(architectures[0]))
    else:
        what = f"`architectures` is missing and model_type {config.get('model_type')!r}"
        family = _TYPES.get(str(config.get("model_type")))
    if family is None:
        raise ModelRefused(f"{where}: {what} is not known to the advisor; known: {', '.join(known)}")
    return family


def _latent(fields: _Reader) -> LatentAttention:
    return LatentAttention(
        q_rank=fields.count("q_lora_rank"),
        kv_rank=fields.size("kv_lora_rank"),
        rope_dim=fields.size("qk_rope_head_dim"),
        nope_dim=fields.size("qk_nope_head_dim"),
        v_dim=fields.size("v_head_dim"),
    )


def _experts(fields: _Reader, family: str, layers: int) -> Experts:
    if family == "mixtral":
        return Experts(
            count=fields.size("num_local_experts"),
            per_token=fields.size("num_experts_per_tok"),
            intermediate=fields.size("intermediate_size"),
        )
    width = fields.size("moe_intermediate_size")
    per_token = fields.size("num_experts_per_tok")
    if family == "deepseek":
        shared = fields.count("n_shared_experts") * width
        first = fields.count("first_k_dense_replace")
        return Experts(fields.size("n_routed_experts"), per_token, width, shared, first)
    shared = fields.count("shared_expert_intermediate_size") if family == "qwen2_moe" else 0
    step = fields.count("decoder_sparse_step", 1)
    plain = fields.values.get("mlp_only_layers") or []
    sparse = sum(1 for layer in range(layers) if layer not in plain and step and (layer + 1) % step == 0)
    return Experts(fields.size("num_experts"), per_token, width, shared, layers - sparse)


def _window(fields: _Reader, family: str, layers: int) -> tuple[int, int]:
    """(window, layers that have it) where a sliding window is in force."""
    values = fields.values
    kinds = values.get("layer_types")
    window = fields.count("sliding_window")
    if not window:
        return 0, 0
    if isinstance(kinds, list):
        return window, sum(kind == "sliding_attention" for kind in kinds)
    if family in ("mistral", "mixtral"):
        return window, layers
    if values.get("use_sliding_window"):
        return window, layers - min(layers, fields.count("max_window_layers", layers))
    return 0, 0


def _weight_format(config: Mapping[str, Any], where: str) -> WeightFormat:
    """Stored bits per parameter, with the scales of the usual group sizes."""
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if not quantisation:
        return WeightFormat("fp32", 32.0, 32.0) if config.get("torch_dtype") == "float32" else WeightFormat()
    if not isinstance(quantisation, dict):
        raise ModelRefused(f"{where}: quantization_config is {quantisation!r}, expected an object")
    method = str(quantisation.get("quant_method", "?"))
    if method in ("gptq", "awq"):
        bits = quantisation.get("bits", quantisation.get("w_bit", 4))
        group = quantisation.get("group_size", quantisation.get("q_group_size", 128))
        if type(bits) is not int or type(group) is not int or not 2 <= bits <= 8:
            raise ModelRefused(f"{where}: {method} with bits {bits!r} and group_size {group!r} is not usable")
        # Each group has a 16-bit scale and a zero point of the weights' own width.
        scales = (16 + bits) / group if group > 0 else 0.0
        return WeightFormat(f"{method} int{bits}", bits + scales)
    if method == "bitsandbytes":
        return WeightFormat("nf4", 4.5) if quantisation.get("load_in_4bit") else WeightFormat("int8", 8.0)
    if method in ("fp8", "fbgemm_fp8"):
        return WeightFormat("fp8", 8.0 + _block_scale_bits(quantisation), compute="fp8")
    if method in ("compressed-tensors", "modelopt"):
        bits, kind = _first_group(quantisation)
        return WeightFormat(f"{kind}{bits}", float(bits), compute="fp8" if kind == "fp" else "bf16")
    raise ModelRefused(
        f"{where}: quantization_config method {method!r} is not known; known: gptq, awq, bitsandbytes, fp8, "
        "fbgemm_fp8, compressed-tensors, modelopt; pass --weight-bits to say how many bits a weight has"
    )


def _block_scale_bits(quantisation: Mapping[str, Any]) -> float:
    block = quantisation.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block):
        return 32.0 / float(block[0] * block[1])
    return 0.0


def _first_group(quantisation: Mapping[str, Any]) -> tuple[int, str]:
    groups = quantisation.get("config_groups")
    first: Mapping[str, Any] = next(iter(groups.values()), {}) if isinstance(groups, dict) else {}
    weights = first.get("weights") or {}
    bits = weights.get("num_bits", 8)
    return (bits if type(bits) is int else 8), "fp" if weights.get("type") == "float" else "int"
