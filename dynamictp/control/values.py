"""What the control plane sees and says: snapshots and decisions. Frozen values, JSON for the journal.

Layouts are texts in the form of `dynamictp.layout` (`tp2`, `tp1+tp1`), times are seconds of one monotonic
clock, lengths are tokens.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

Mode = Literal["static", "dynamic", "dry-run"]
Phase = Literal["decode", "prefill"]
SwitchKind = Literal["grow", "shrink", "sideways"]


class Arrivals(msgspec.Struct, frozen=True):
    """Requests that came in during the last `window_s` seconds, counted when they arrived."""

    window_s: float
    """Length of the window; shorter than its nominal length only while the server is younger."""
    requests: int = 0
    prompt_tokens_mean: float = 0.0
    prompt_tokens_p90: float = 0.0


class Outputs(msgspec.Struct, frozen=True):
    """Lengths of outputs, of the requests that finished lately; zeros while none has."""

    requests: int = 0
    tokens_mean: float = 0.0
    tokens_p90: float = 0.0


class Waiting(msgspec.Struct, frozen=True):
    """Requests without a computed token."""

    requests: int = 0
    prompt_tokens: int = 0
    oldest_s: float = 0.0
    """Age of the oldest."""
    worst_ttft_ratio: float = 0.0
    """Largest time waited ÷ own TTFT target over all requests that have no first token yet, prefilling ones
    included: a censored sample of TTFT, the only one when nothing finishes. Time before the last commit does
    not count."""
    needs_devices: int = 0
    """Devices of the narrowest domain that could hold the largest request which no serving domain could
    hold even when empty; 0: there is none."""


class Running(msgspec.Struct, frozen=True):
    """Requests on domains."""

    requests: int = 0
    context_mean: float = 0.0
    """Tokens of context, mean."""
    generated_mean: float = 0.0
    """Output tokens so far, mean: outputs are at least this long when nothing finishes."""


class Digest(msgspec.Struct, frozen=True):
    """Quantiles of measured ÷ target over requests, each against its own target (class, tenant, length).

    Over the last `feedback_window_s`. After a commit, TTFT only of requests that arrived since, TPOT only of
    those that got their first token since. TPOT counts finished requests, and running ones from 32 tokens on.
    """

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class StepSample(msgspec.Struct, frozen=True):
    """One measured step of a warmed-up domain, for calibration."""

    tp: int
    seconds: float
    rows: int = 0
    """Decoding rows."""
    context: float = 0.0
    """Mean context of the decoding rows, tokens."""
    prefill_tokens: int = 0
    past_tokens: float = 0.0
    """Mean tokens computed before, over the prefilled tokens."""
    exclusive: bool = True
    """No other domain worked on the same devices. Others are not learnt from."""
    active_devices: int = 0
    """Devices of the node that worked at the time, 0: the domain's own only."""


class Bar(msgspec.Struct, frozen=True):
    """A target that was rolled back: not to be tried before `until_s`."""

    layout: str
    until_s: float


class SwitchView(msgspec.Struct, frozen=True):
    """The switch in flight: from the command until its routing commit is complete (100 % and settled)."""

    id: str
    to_layout: str
    phase: str = ""
    since_s: float = 0.0


class PoolSnapshot(msgspec.Struct, frozen=True):
    """One pool at one moment, all that a decision depends on."""

    time_s: float
    layout: str
    """The observed layout: domains that serve new requests."""
    devices_total: int
    devices_available: int
    """Not leased and with a usable worker; those of the observed layout included."""
    legal: tuple[str, ...]
    """Layouts that may be chosen on `devices_total` devices, the narrowest first."""
    mode: Mode = "dynamic"
    pinned: bool = False
    """A person has set the layout: decisions are journaled, not carried out."""
    switch: SwitchView | None = None
    draining: tuple[str, ...] = ()
    """Shapes of draining domains, which can be revived: `tp2`."""
    barred: tuple[Bar, ...] = ()
    last_commit_s: float | None = None
    """None: none since the server started."""
    arrivals_2s: Arrivals = Arrivals(2.0)
    arrivals_10s: Arrivals = Arrivals(10.0)
    outputs: Outputs = Outputs()
    prefix_hit_share: float = 0.0
    """Part of the prompt tokens that are found in the prefix cache."""
    waiting: Waiting = Waiting()
    running: Running = Running()
    ttft: Digest = Digest()
    tpot: Digest = Digest()
    steps: tuple[StepSample, ...] = ()
    """Since the last snapshot; a few of each (degree, phase) are enough."""
    busy_share: float = 0.0
    """Busy device-seconds ÷ device-seconds of the observed layout. Shown, never decided on."""


class Reason(StrEnum):
    """Why a decision is what it is. The first group changes the layout, the second holds."""

    GROW_PREDICTED = "grow_predicted"
    """Predicted load is above the target utilisation."""
    GROW_FEEDBACK = "grow_feedback"
    """A measured latency is too near to its target, or beyond."""
    GROW_ONLY_WIDER = "grow_waiting_fits_only_wider"
    """A waiting request fits only a wider domain."""
    REVIVE = "revive"
    """Growth by taking back a domain that drains."""
    SHRINK = "shrink"
    SIDEWAYS = "sideways"
    """Same number of devices, another shape, with a sustained predicted gain."""
    DEVICES_LOST = "devices_lost"
    """The layout takes more devices than there are."""
    BOUNDS = "bounds"
    """The layout takes fewer devices than `min_devices` or more than `max_devices`."""

    HOLD = "hold"
    """Nothing to gain."""
    SUSTAIN = "sustain"
    """A shrink or sideways move is wanted, not yet for long enough."""
    SLO_INFEASIBLE = "slo_infeasible"
    """The target is missed and no layout is predicted to help."""
    NO_GAIN = "no_gain"
    """Load asks for more devices, which would carry hardly more."""
    NO_DEVICES = "no_devices"
    """More devices are wanted than are available."""
    BARRED = "barred"
    MIN_INTERVAL = "min_interval"
    BUDGET = "budget"
    IN_FLIGHT = "in_flight"
    PINNED = "pinned"
    DRY_RUN = "dry_run"


GROWTH = frozenset({Reason.GROW_PREDICTED, Reason.GROW_FEEDBACK, Reason.GROW_ONLY_WIDER, Reason.REVIVE})
"""Reasons for more devices."""


class Alarm(StrEnum):
    """Conditions that a person should know of."""

    SLO_INFEASIBLE = "slo_infeasible"
    CALIBRATION_PEGGED = "calibration_pegged"
    FLAPPING = "flapping"
    """The budget of unforced switches is used up."""


class Decision(msgspec.Struct, frozen=True):
    """What to do now. `target` is the layout to go to, None to stay.

    `wanted` is what the policy would choose if nothing (interval, budget, pin, mode, a switch in flight)
    stood against it, with `wanted_reason`; it equals the observed layout when that is right.
    """

    time_s: float
    target: str | None
    reason: Reason
    wanted: str
    wanted_reason: Reason
    devices: int
    """Devices of `target`, or of the observed layout."""
    reserve: int = 0
    """Devices that the forecast needs: what the pool should have ready, calling leases back if need be."""
    forced: bool = False
    """Growth that the SLO forces: not bound by interval and budget; shadow probe, then 100 %. With reason
    `in_flight`: the switch under way has become urgent, its ramp may go to 100 % now."""
    cancel: bool = False
    """Take the switch in flight back first: it goes the wrong way."""
    figures: dict[str, float] = {}
    """What the decision is based on, by name; docs/control.md explains them."""
    alarms: tuple[Alarm, ...] = ()
