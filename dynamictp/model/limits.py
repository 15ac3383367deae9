"""Sanity of model facts, checked before anything is allocated from them."""

from __future__ import annotations

import math

from dynamictp.errors import ModelRefused
from dynamictp.facts import ModelFacts, RopeFacts

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")

# Far above any published dense model, far below what would exhaust memory by a corrupt header.
_MAXIMA = {
    "layers": 1024,
    "hidden": 1 << 17,
    "query_heads": 2048,
    "kv_heads": 2048,
    "head_dim": 1024,
    "intermediate": 1 << 20,
    "vocab": 1 << 22,
    "max_context": 1 << 27,
}
_MAX_ATTENTION_FACTOR = 1000.0


def check_facts(facts: ModelFacts, where: str) -> ModelFacts:
    """Return `facts` when its sizes make sense; `where` names the file in the message.

    Raises `ModelRefused` for sizes that are not positive, absurdly large, or do not fit each other.
    """
    for name, limit in _MAXIMA.items():
        value = getattr(facts, name)
        if not 1 <= value <= limit:
            raise ModelRefused(f"{where}: {name} is {value}, expected 1 to {limit}")
    if facts.query_heads % facts.kv_heads:
        raise ModelRefused(
            f"{where}: {facts.query_heads} query heads are not divisible by {facts.kv_heads} KV heads"
        )
    for name in ("hidden", "head_dim", "intermediate"):
        if getattr(facts, name) % 2:
            raise ModelRefused(f"{where}: {name} is {getattr(facts, name)}, expected an even number")
    if not 0.0 < facts.norm_eps < 1.0:
        raise ModelRefused(f"{where}: norm epsilon is {facts.norm_eps}, expected between 0 and 1")
    for token in (*facts.eos_ids, *(() if facts.bos_id is None else (facts.bos_id,))):
        if not 0 <= token < facts.vocab:
            raise ModelRefused(
                f"{where}: special token id {token} is outside the vocabulary of {facts.vocab}"
            )
    _check_rope(facts.rope, where)
    return facts


def _check_rope(rope: RopeFacts, where: str) -> None:
    if not (math.isfinite(rope.theta) and rope.theta > 1.0):
        raise ModelRefused(f"{where}: rope theta is {rope.theta}, expected a number above 1")
    if not (math.isfinite(rope.factor) and rope.factor > 0.0):
        raise ModelRefused(f"{where}: rope scaling factor is {rope.factor}, expected a positive number")
    if rope.kind in ("llama3", "yarn") and rope.original_context < 1:
        raise ModelRefused(
            f"{where}: {rope.kind} rope scaling needs the original context length, "
            f"found {rope.original_context}"
        )
    if rope.kind == "llama3" and not rope.high_freq_factor > rope.low_freq_factor > 0.0:
        raise ModelRefused(
            f"{where}: llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, "
            f"found {rope.low_freq_factor} and {rope.high_freq_factor}"
        )
    if rope.kind == "yarn" and not math.inf > rope.beta_fast >= rope.beta_slow > 0.0:
        raise ModelRefused(
            f"{where}: yarn rope scaling needs 0 < beta_slow <= beta_fast, "
            f"found {rope.beta_slow} and {rope.beta_fast}"
        )
    if not 0.0 < rope.attention_factor <= _MAX_ATTENTION_FACTOR:
        raise ModelRefused(
            f"{where}: rope attention factor is {rope.attention_factor}, "
            f"expected above 0 and up to {_MAX_ATTENTION_FACTOR:g}"
        )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature on the attention logits, applied to cos and sin (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
