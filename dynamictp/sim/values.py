"""Values around a simulated node: times, faults, and what a run adds up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from dynamictp.cost.shape import ModelShape


class SwitchTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the phases of a switch take on the node. Seconds."""

    prepare_s: Annotated[float, Meta(ge=0)] = 0.05
    commit_s: Annotated[float, Meta(ge=0)] = 0.005


Drift = tuple[tuple[float, float], ...]
"""(from when on, factor on step times), by rising time: a machine whose speed is not always the same."""


class Faults(msgspec.Struct, frozen=True):
    """What goes wrong. Shapes are texts, `tp2`."""

    failing: frozenset[str] = frozenset()
    """Every step of a domain of these shapes fails."""
    slow: dict[str, float] = {}
    """Steps of a domain of that shape take so many times as long."""
    hidden: bool = False
    """The shadow probe does not notice."""


@dataclass(slots=True)
class DomainLife:
    """When a domain came to which state, seconds; None: never."""

    epoch: int
    shape: str
    devices: tuple[int, ...]
    opened_s: float
    serving_s: float | None = None
    draining_s: float | None = None
    closed_s: float | None = None


@dataclass(slots=True)
class NodeTotals:
    """What a run adds up to."""

    device_s: float = 0.0
    """Devices in some domain × time, those that are being prepared included."""
    busy_s: float = 0.0
    """Devices in a step × time."""
    flops: float = 0.0
    """Of the model, as the literature counts them: what is recomputed counts again, padding does not."""
    prefilled: int = 0
    """Prompt tokens computed."""
    decoded: int = 0
    """Tokens from decode steps; each prompt brings one more."""
    prompts: int = 0
    """Prompts that were computed to their end, each with a token."""
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations: of a token's matrix products, of its logits, and of a pair of a token and
    one that it attends to (all layers; windowed ones as if full)."""

    body: float
    head: float
    pair: float

    @classmethod
    def of(cls, shape: ModelShape) -> Flops:
        head = 2.0 * shape.vocab * shape.hidden
        return cls(2.0 * shape.active_parameters - head, head, shape.layers * shape.attention_flops_per_pair)
