"""What the engine process is told at its start."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynamictp.facts import DType, ModelFacts
from dynamictp.messages.values import RampSettings


class ArenaFacts(msgspec.Struct, frozen=True):
    """The KV arena: pages of `page_tokens` tokens of one head; `pages` is a multiple of the KV heads."""

    pages: int
    page_tokens: int
    dtype: DType


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
    most_devices: int = 0
    """Devices that layouts may take, by which the arena is divided; 0: all."""
    long_prompt_tokens: int = 1024
    """Prompts from this length on lean to the widest domain."""

    @property
    def quota_devices(self) -> int:
        return self.most_devices or self.devices
