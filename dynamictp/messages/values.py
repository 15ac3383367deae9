"""Values inside messages, and the base of every message."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec


def pack_tokens(tokens: Iterable[int]) -> bytes:
    return array("I", tokens).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    tokens = array("I")
    tokens.frombytes(data)
    return tokens.tolist()


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: encoded as an array headed by the type's name."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens of a request are chosen. Neutral values switch a rule off.

    `logprobs`: None for none, 0 for the chosen token's, k for the k most likely beside it.
    `prompt_logprobs`: the same for the prompt's own tokens (from the second on).
    `stop_ids` end the request (they include the model's end tokens unless `ignore_eos` was asked for).
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the raw logits, and the most likely alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ServedBy(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's latest token was computed, and what it went through so far."""

    domain: str
    """Domain id, `d7`."""
    tp: int
    tp_min: int
    tp_max: int
    handovers: int = 0
    recomputes: int = 0


class RampSettings(msgspec.Struct, frozen=True):
    """How a ramped switch shifts new requests to the new side, and when it takes that back (design 9)."""

    shares: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    """Share of new requests on the new side, step by step; ascending, the last one is 1."""
    observe_s: float = 2.0
    """Length of a step; without samples time alone passes it."""
    settle_s: float = 2.0
    """After the last step, until the switch commits."""
    min_finished: int = 20
    """Finished requests of each side before latencies are compared."""
    worse: float = 1.5
    """P95 of measured over predicted time, new side over old side, beyond which the switch is taken back."""
    probe_s: float = 10.0
    """Longest time of the shadow probe."""


class DomainStatus(msgspec.Struct, frozen=True):
    """One domain as the engine sees it."""

    id: str
    epoch: int
    model: str
    tp: int
    pp: int
    devices: tuple[int, ...]
    state: Literal["preparing", "ready", "serving", "draining", "closed", "failed"]
    running: int = 0
    kv_pages_used: int = 0
    kv_pages_cap: int = 0
    tokens_total: int = 0


class DeviceStatus(msgspec.Struct, frozen=True):
    """One device as the engine sees it."""

    id: int
    state: Literal["serving", "standby", "released", "leased"]
    domains: tuple[str, ...] = ()
    kv_pages_used: float = 0.0
    kv_pages_total: float = 0.0
    busy_s: float = 0.0
