"""What the engine process is told at its start."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynamictp.facts import DType, ModelFacts


class ArenaFacts(msgspec.Struct, frozen=True):
    """The KV arena: pages of `page_tokens` tokens of one head; `pages` is a multiple of the KV heads."""

    pages: int
    page_tokens: int
    dtype: DType


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


class EngineStart(msgspec.Struct, frozen=True):
    """Everything the engine process needs to begin."""

    facts: ModelFacts
    arena: ArenaFacts
    devices: int
    layout: str
    legal_degrees: tuple[int, ...]
    model: str = ""
    mode: Literal["static", "dynamic", "dry-run"] = "static"
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    max_step_ms: float = 100.0
    prefix_cache: bool = True
    comm_slots: int = 1
    incarnation: int = 1
    hang_s: float = 2.0
    """A worker that owes an answer and makes no progress for so long hangs, unless its step is a long one."""
    workers: tuple[int, ...] = ()
    """Incarnation of each device's worker, 0 where there is none now; empty: the first one of each."""
    ramp: RampSettings = RampSettings()
    leased: tuple[int, ...] = ()
    """Devices that others use: no domain is put on them."""
