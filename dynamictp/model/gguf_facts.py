"""GGUF metadata → `ModelFacts`."""

from __future__ import annotations

from typing import Literal, cast

import numpy as np

from dynamictp.errors import ModelRefused
from dynamictp.facts import ModelFacts, RopeFacts
from dynamictp.model.gguf_file import GGUFFile
from dynamictp.model.limits import check_facts, yarn_attention_factor
from dynamictp.model.source import Array

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture` values; Mistral models are stored as `llama`."""

_LLAMA3_ORIGINAL_CONTEXT = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def facts_from_gguf(file: GGUFFile) -> ModelFacts:
    """Facts of the model in `file`. Raises `ModelRefused` naming what this server does not run."""
    arch = file.get("general.architecture")
    where = str(file.path)
    if arch not in SUPPORTED_ARCHITECTURES:
        raise ModelRefused(
            f"{where}: general.architecture {arch!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if file.integer("split.count", 1) > 1:
        raise ModelRefused(
            f"{where}: one of {file.integer('split.count')} parts; merge them into one file first"
        )
    if file.integer(f"{arch}.expert_count", 0) > 0:
        raise ModelRefused(f"{where}: mixture of experts is not supported; use a dense model")
    hidden, query_heads = (
        file.integer(f"{arch}.embedding_length"),
        _heads(file, f"{arch}.attention.head_count"),
    )
    context = file.integer(f"{arch}.context_length")
    head_dim = _head_dim(file, arch, hidden, query_heads)
    window = file.integer(f"{arch}.attention.sliding_window", 0)
    if 0 < window < context:
        raise ModelRefused(f"{where}: sliding-window attention (window {window}) is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelRefused(f"{where}: tensor token_embd.weight is missing")
    has = file.tensors.__contains__
    return check_facts(
        ModelFacts(
            family=cast(Literal["llama", "qwen2", "qwen3"], arch),
            layers=file.integer(f"{arch}.block_count"),
            hidden=hidden,
            query_heads=query_heads,
            kv_heads=_heads(file, f"{arch}.attention.head_count_kv", query_heads),
            head_dim=head_dim,
            intermediate=_heads(file, f"{arch}.feed_forward_length"),
            vocab=embedding.rows,
            max_context=context,
            norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope=_rope(file, arch, head_dim, context),
            tied_head=not has("output.weight"),
            qkv_bias=has("blk.0.attn_q.bias"),
            output_bias=has("blk.0.attn_output.bias"),
            mlp_bias=has("blk.0.ffn_down.bias"),
            qk_norm=arch == "qwen3",
            eos_ids=_eos_ids(file),
            bos_id=file.integer("tokenizer.ggml.bos_token_id")
            if "tokenizer.ggml.bos_token_id" in file.keys
            else None,
        ),
        where,
    )


def _heads(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A count that GGUF allows to differ by layer; here it must be the same in all."""
    value = file.get(key)
    if isinstance(value, list):
        if any(type(count) is not int for count in value):
            raise ModelRefused(f"{file.path}: {key} holds {value[:4]}, expected integers")
        if len(set(value)) != 1:
            raise ModelRefused(f"{file.path}: {key} differs between layers, which is not supported")
        return cast(int, value[0])
    return file.integer(key, default)


def _head_dim(file: GGUFFile, arch: str, hidden: int, query_heads: int) -> int:
    key_length = f"{arch}.attention.key_length"
    if key_length not in file.keys and (query_heads < 1 or hidden % query_heads):
        raise ModelRefused(f"{file.path}: embedding length {hidden} is not divisible by {query_heads} heads")
    head_dim = file.integer(key_length, hidden // max(query_heads, 1))
    value_dim = file.integer(f"{arch}.attention.value_length", head_dim)
    rotary = file.integer(f"{arch}.rope.dimension_count", head_dim)
    if value_dim != head_dim:
        raise ModelRefused(
            f"{file.path}: value heads of {value_dim} beside key heads of {head_dim} are not supported"
        )
    if rotary != head_dim:
        raise ModelRefused(f"{file.path}: partial rotary embedding ({rotary} of {head_dim}) is not supported")
    return head_dim


def _rope(file: GGUFFile, arch: str, head_dim: int, context: int) -> RopeFacts:
    theta = file.number(f"{arch}.rope.freq_base", 10000.0)
    prefix = f"{arch}.rope.scaling"
    kind = file.get(f"{prefix}.type", "none")
    legacy = f"{arch}.rope.scale_linear"
    if legacy in file.keys and f"{prefix}.type" not in file.keys and file.number(legacy) != 1.0:
        return RopeFacts(theta=theta, kind="linear", factor=file.number(legacy))
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if kind != "none":
            raise ModelRefused(
                f"{file.path}: rope_freqs.weight together with {kind} rope scaling is not supported"
            )
        if factors.kind.name != "F32" or factors.shape != (head_dim // 2,):
            raise ModelRefused(f"{file.path}: rope_freqs.weight is not {head_dim // 2} values of F32")
        return recover_llama3(file.raw(factors).view("<f4").reshape(-1), theta, str(file.path))
    if kind == "none":
        return RopeFacts(theta=theta)
    if kind == "linear":
        return RopeFacts(theta=theta, kind="linear", factor=file.number(f"{prefix}.factor"))
    if kind == "yarn":
        factor = file.number(f"{prefix}.factor")
        scale = file.number(f"{prefix}.yarn_attn_factor", file.number(f"{prefix}.attn_factor", 1.0))
        return RopeFacts(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_context=file.integer(f"{prefix}.original_context_length", context),
            beta_fast=file.number(f"{prefix}.yarn_beta_fast", 32.0),
            beta_slow=file.number(f"{prefix}.yarn_beta_slow", 1.0),
            attention_factor=scale * yarn_attention_factor(factor),
        )
    raise ModelRefused(
        f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn, llama3"
    )


def recover_llama3(factors: Array, theta: float, where: str) -> RopeFacts:
    """Rope facts behind the frequency divisors `[head_dim / 2]` that converters write for Llama 3.

    The file has only the result, so the published form (low 1, high 4, 8,192 positions) is tried and
    compared; anything else (LongRoPE has such a tensor too) is refused.
    """
    if np.all(factors == 1.0):
        return RopeFacts(theta=theta)
    rope = RopeFacts(
        theta=theta,
        kind="llama3",
        factor=float(factors.max()),
        original_context=_LLAMA3_ORIGINAL_CONTEXT,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
    )
    if not np.allclose(llama3_divisors(rope, 2 * len(factors)), factors, rtol=1e-4):
        raise ModelRefused(f"{where}: the frequency factors in rope_freqs.weight are not those of Llama 3")
    return rope


def llama3_divisors(rope: RopeFacts, head_dim: int) -> Array:
    """What each of the head_dim / 2 rotary frequencies is divided by under llama3 scaling, float64.

    Long wavelengths are divided by the factor, short ones kept, and those between interpolated.
    """
    turns = rope.original_context * rope.theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - kept) / rope.factor + kept))


def _eos_ids(file: GGUFFile) -> tuple[int, ...]:
    # End of text, of turn, and of message (Llama 3's tool turn): a model may end with any of them.
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return tuple(sorted({file.integer(key) for key in keys if key in file.keys}))
