"""The least time a decode step can take on this machine: the bytes it must read ÷ the bandwidth of the probe.

Roofline: Williams, Waterman, Patterson (2009). At one stream a step is bound by memory alone, so the roofline
is its bandwidth side: every matrix once, and the keys and values of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamictp.bench.machine import MemoryState
from dynamictp.facts import DType, ModelFacts
from dynamictp.kv import KVSpec
from dynamictp.model.load import open_model
from dynamictp.model.weights import plan_weights


@dataclass(frozen=True, slots=True)
class DecodeBytes:
    """What a decode step reads: all `weights` bytes once, and `kv_per_token` bytes per token of context."""

    weights: int
    kv_per_token: int

    def step(self, context_tokens: float, streams: int = 1) -> float:
        """Bytes of one step of `streams` sequences of `context_tokens` tokens."""
        return self.weights + streams * context_tokens * self.kv_per_token


def decode_bytes(facts: ModelFacts, dtype: DType) -> DecodeBytes:
    """From the model's sizes. An embedding that is not the head too is read by single rows: not counted."""
    entries = plan_weights(facts, dtype).entries
    weights = sum(entry.nbytes for name, entry in entries.items() if name != "embed" or "head" not in entries)
    kv = KVSpec.of(facts, 2, dtype)
    return DecodeBytes(weights, kv.block_bytes // kv.page_tokens)


def served_bytes(model: str, serve_flags: Sequence[str]) -> DecodeBytes | None:
    """Of `model` as a server with these flags computes it; None when the weights are stored otherwise.

    Raises `ModelRefused` for a model that can't be opened.
    """
    words = [word for flag in serve_flags for word in flag.split("=", 1)]
    given = {name: words[i + 1] for i, name in enumerate(words[:-1]) if name.startswith("--")}
    if "--weights" in given and given["--weights"] != given.get("--dtype", "bf16"):
        return None
    dtype: DType = "fp32" if given.get("--dtype") == "fp32" else "bf16"
    return decode_bytes(open_model(model).facts, dtype)


def roofline_ms(nbytes: float, states: Sequence[MemoryState], tp: int) -> float:
    """Of `tp` ranks with a core each; the mean of the bandwidths seen. The probe knows one core and two."""
    rates = [state.one_gbps if tp == 1 else state.two_gbps for state in states]
    return nbytes / (sum(rates) / len(rates)) * 1e-6
