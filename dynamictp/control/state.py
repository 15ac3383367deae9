"""What the planner remembers from one decision to the next. One frozen value, JSON for the journal."""

from __future__ import annotations

import msgspec

from dynamictp.control.calibrate import Online
from dynamictp.control.traffic import TrafficState
from dynamictp.control.values import SwitchKind


class Sustained(msgspec.Struct, frozen=True):
    """A shrink or sideways move that has been wanted without a break."""

    since_s: float
    decisions: int
    target: str = ""
    """Sideways: the layout wanted."""
    peak: float = 0.0
    """Shrink: the highest demand for growth since then, requests per second."""


class PlannerState(msgspec.Struct, frozen=True):
    """Everything that a decision depends on beside the snapshot. `PlannerState()` is the beginning."""

    traffic: TrafficState = TrafficState()
    online: Online = Online()
    shrink: Sustained | None = None
    sideways: Sustained | None = None
    missed: int = 0
    """Decisions in a row at which a measured latency was above its threshold."""
    last_kind: SwitchKind | None = None
    last_switch_s: float | None = None
    """When a switch was last decided."""
    last_shrink_s: float | None = None
    unforced: tuple[float, ...] = ()
    """When unforced switches were decided, during the last hour."""
    shrink_backoff: int = 0
    """How often a shrink was soon regretted: each doubles the time that the next one must be sustained."""
    seen_commit_s: float | None = None
    decisions: int = 0
