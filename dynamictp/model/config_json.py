"""Hugging Face `config.json` → `ModelFacts`.

Both generations of the file are read: `rope_theta` beside `rope_scaling` with `type` or `rope_type`
(transformers 4) and one `rope_parameters` object (transformers 5). What the forward pass does not implement
is refused by name instead of being ignored: an ignored key is a model that answers nonsense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from dynamictp.errors import ModelRefused
from dynamictp.facts import ModelFacts, RopeFacts
from dynamictp.model.limits import (
    SUPPORTED_ARCHITECTURES,
    SUPPORTED_ROPE,
    check_facts,
    yarn_attention_factor,
)

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

MAX_JSON_BYTES = 64 << 20
"""No configuration file is larger; tokenizer files have their own reader."""

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelRefused` when it is missing, too large or not an object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelRefused(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB, not a configuration file")
        value = json.loads(path.read_text(encoding="utf-8"))
        # Half a surrogate pair is legal JSON and no text: tokenizers and templates fail on it.
        json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise ModelRefused(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, endless digits
        raise ModelRefused(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_facts(folder: Path) -> ModelFacts:
    """Facts of the model in a Hugging Face folder.

    End-of-sequence ids are the union of `config.json` and `generation_config.json`. Raises `ModelRefused`.
    """
    config = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    return facts_from_config(config, generation, where=str(folder / "config.json"))


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """The sampling values a model's `generation_config.json` recommends; empty without that file.

    `do_sample: false` becomes temperature 0: the file's other sampling values are then not in effect.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        return {}
    values = {key: value for key, value in read_json(file).items() if key in _SAMPLING_KEYS}
    if values.pop("do_sample", None) is False:
        return {"temperature": 0.0}
    return {key: value for key, value in values.items() if type(value) in (int, float)}


def facts_from_config(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, where: str = "config.json"
) -> ModelFacts:
    """Facts from parsed `config.json` and `generation_config.json`. Raises `ModelRefused`."""
    family = _family(config, where)
    _refuse_unsupported(config, family, where)
    fields = _Fields(config, where)
    hidden = fields.integer("hidden_size")
    query_heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional_integer("num_key_value_heads")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if family == "qwen3":
            head_dim = 128  # the class default: hidden // heads is wrong for most Qwen3 models
        elif query_heads < 1 or hidden % query_heads:
            raise ModelRefused(
                f"{where}: hidden_size {hidden} is not divisible by {query_heads} attention heads"
            )
        else:
            head_dim = hidden // query_heads
    max_positions = fields.integer("max_position_embeddings")
    rope = _rope(config, max_positions, where)
    attention_bias = fields.flag("attention_bias") and family in ("llama", "qwen3")
    facts = ModelFacts(
        family=family,
        layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        query_heads=query_heads,
        kv_heads=query_heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        max_context=_max_context(rope, max_positions),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tied_head=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        eos_ids=_eos_ids((config, generation or {}), where),
        bos_id=fields.optional_integer("bos_token_id"),
    )
    _refuse_sliding_window(config, facts, where)
    return check_facts(facts, where)


class _Fields:
    """Typed access to one JSON object; every failure names the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def integer(self, key: str) -> int:
        value = self.optional_integer(key)
        if value is None:
            raise ModelRefused(f"{self._where}: {key} is missing")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self._values.get(key)
        if value is not None and type(value) is not int:
            raise ModelRefused(f"{self._where}: {key} is {value!r}, expected an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        if value is None:
            value = default
        try:
            if type(value) in (int, float) and math.isfinite(number := float(cast(float, value))):
                return number
        except OverflowError:  # an integer beyond every float
            pass
        raise ModelRefused(f"{self._where}: {key} is {value!r}, expected a finite number")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise ModelRefused(f"{self._where}: {key} is {value!r}, expected true or false")
        return value


def _family(config: Mapping[str, Any], where: str) -> Family:
    architectures = config.get("architectures")
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ModelRefused(f"{where}: architectures is {architectures!r}, expected one of {supported}")
    family = SUPPORTED_ARCHITECTURES.get(str(architectures[0]))
    if family is None:
        raise ModelRefused(
            f"{where}: architecture {architectures[0]} is not supported; supported: {supported}"
        )
    return cast(Family, family)


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    if config.get("auto_map"):
        raise ModelRefused(
            f"{where}: the model brings its own code (auto_map), which is never run here (there is no "
            "trust_remote_code); use a checkpoint of a supported architecture without it"
        )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise ModelRefused(
            f"{where}: quantization_config ({method}) is not supported; "
            "use an unquantised checkpoint (F32, F16, BF16) or a GGUF file"
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            raise ModelRefused(f"{where}: mixture of experts ({key}) is not supported; use a dense model")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelRefused(f"{where}: activation {activation!r} is not supported; supported: silu")
    for scope in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        factor = scope.get("partial_rotary_factor", 1.0) if isinstance(scope, Mapping) else 1.0
        if factor not in (None, 1.0):
            raise ModelRefused(f"{where}: partial_rotary_factor {factor} is not supported; supported: 1.0")


def _refuse_sliding_window(config: Mapping[str, Any], facts: ModelFacts, where: str) -> None:
    """Sliding windows are refused only where they would really cut attention."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types") or ()
    if not isinstance(kinds, (list, tuple)):
        raise ModelRefused(f"{where}: layer_types is {kinds!r}, expected a list")
    in_effect = any(kind != "full_attention" for kind in kinds)
    if facts.family == "mistral" and "sliding_window" not in config:
        window = 4096  # the class default
    if facts.family == "mistral" or (facts.family in ("qwen2", "qwen3") and config.get("use_sliding_window")):
        in_effect = in_effect or window is not None
    if not in_effect:
        return
    if window is None or type(window) is not int or window < facts.max_context:
        raise ModelRefused(
            f"{where}: sliding-window attention (window {window}, context {facts.max_context}) is not "
            "supported; to serve without it, set sliding_window to null and max_position_embeddings to "
            "the window"
        )


def _rope(config: Mapping[str, Any], max_positions: int, where: str) -> RopeFacts:
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        entry = config.get(key)
        if entry is None:
            continue
        if not isinstance(entry, dict):
            raise ModelRefused(f"{where}: {key} is {entry!r}, expected an object or null")
        merged.update(entry)
    fields = _Fields(merged, f"{where}: rope")
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in SUPPORTED_ROPE:
        raise ModelRefused(
            f"{where}: rope kind {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE)}"
        )
    default_theta = _Fields(config, where).number("rope_theta", 10000.0)
    theta = fields.number("rope_theta", default_theta)
    if kind == "default":
        return RopeFacts(theta=theta)
    factor = fields.number("factor")
    original = fields.optional_integer("original_max_position_embeddings") or max_positions
    if kind == "linear":
        return RopeFacts(theta=theta, kind="linear", factor=factor)
    if kind == "llama3":
        return RopeFacts(
            theta=theta,
            kind="llama3",
            factor=factor,
            original_context=original,
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
        )
    return _yarn(fields, theta, factor, original)


def _yarn(fields: _Fields, theta: float, factor: float, original: int) -> RopeFacts:
    mscale, mscale_all = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        whole = yarn_attention_factor(factor, mscale_all)
        # A quotient that does not exist is refused with the other attention factors.
        attention = yarn_attention_factor(factor, mscale) / whole if whole else math.nan
    else:
        attention = yarn_attention_factor(factor)
    return RopeFacts(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=fields.number("attention_factor", attention),
        truncate=fields.flag("truncate", default=True),
    )


def _max_context(rope: RopeFacts, max_positions: int) -> int:
    # Qwen's instructions add YaRN to config.json without raising max_position_embeddings.
    if rope.kind == "yarn":
        # Far beyond what `check_facts` lets pass, and still an integer.
        stretched = min(rope.original_context, 1 << 62) * rope.factor
        return max(max_positions, int(min(stretched, 1 << 62)))
    return max_positions


def _eos_ids(scopes: tuple[Mapping[str, Any], ...], where: str) -> tuple[int, ...]:
    ids: set[int] = set()
    for scope in scopes:
        value = scope.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if type(token) is not int:
                raise ModelRefused(f"{where}: eos_token_id {value!r} is not an integer or a list of them")
            ids.add(token)
    return tuple(sorted(ids))
