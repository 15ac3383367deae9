"""Between server and engine: requests, tokens, layouts, snapshots."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynamictp.messages.values import (
    DeviceStatus,
    DomainStatus,
    Message,
    RampSettings,
    SamplingParams,
    ServedBy,
    TokenLogprobs,
)


class SubmitRequest(Message, frozen=True):
    """A request, or a live one again after an engine restart (then with a higher `attempt`).

    `tokens` holds the prompt and the tokens emitted so far; `prompt_len` is the boundary. `salt` is the
    tenant's addition to prefix hashes. `deadline_s` is absolute. `group` is the HTTP request that it is part
    of: within a tenant the prompts of a list take turns with other requests.
    """

    request_id: str
    attempt: int
    tokens: bytes
    prompt_len: int
    sampling: SamplingParams
    arrival_s: float
    pool: str = "default"
    model: str = ""
    tenant: str = ""
    priority: int = 0
    request_class: str = ""
    deadline_s: float | None = None
    salt: str = ""
    group: str = ""


class CancelRequest(Message, frozen=True):
    request_id: str
    attempt: int


class SetLayout(Message, frozen=True):
    """Command of a switch. Idempotent by `switch_id`; `phase` is the phase the switch should reach.

    Sent again with `forced`, it ends the ramp that is under way, but for the shadow probe.
    """

    switch_id: str
    layout: str
    phase: Literal["commit", "close"] = "close"
    pool: str = "default"
    ramp: bool = False
    drain_deadline_s: float = 0.0
    reason: str = "admin"
    forced: bool = False
    """Of a ramp only the shadow probe: growth that the SLO needs now."""
    settings: RampSettings | None = None
    """Of the ramp; None: those of the engine's start."""


class SetDevices(Message, frozen=True):
    """The devices that are leased to others from now on; no domain may be on or get one of them."""

    leased: tuple[int, ...]


class CancelSwitch(Message, frozen=True):
    """Take a switch back that has not committed yet."""

    switch_id: str


class Shutdown(Message, frozen=True):
    """Stop. With `drain_s` > 0 running requests may finish first."""

    drain_s: float = 0.0


class EngineReady(Message, frozen=True):
    """All workers are mapped and the first layout serves."""

    layout: str
    arena_pages: int
    max_model_len: int
    legal_degrees: tuple[int, ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """One output token. `position` counts output tokens of the request from 0."""

    request_id: str
    attempt: int
    position: int
    token: int
    served: ServedBy
    logprobs: TokenLogprobs | None = None


class RequestEnd(msgspec.Struct, frozen=True, array_like=True):
    """The engine has let go of a request: row and pages are free or will be after its last step.

    `error` is set for reason `error` and says why. `cached_tokens` counts prompt tokens not computed.
    """

    request_id: str
    attempt: int
    reason: Literal["stop", "length", "cancelled", "deadline", "error"]
    tokens: int
    cached_tokens: int = 0
    error: str | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens; entry i belongs to the sequence index `start + i`."""

    request_id: str
    attempt: int
    start: int
    entries: tuple[TokenLogprobs, ...]


class Queued(msgspec.Struct, frozen=True, array_like=True):
    """How long a request waited for a domain, in seconds. Sent with its first token."""

    request_id: str
    attempt: int
    seconds: float


class Outputs(Message, frozen=True):
    """What one turn of the engine produced, in order: log-probabilities of prompts, tokens, ends."""

    tokens: tuple[TokenEvent, ...] = ()
    ends: tuple[RequestEnd, ...] = ()
    prompts: tuple[PromptLogprobs, ...] = ()
    queued: tuple[Queued, ...] = ()


class SwitchStatus(Message, frozen=True):
    """Progress of a switch, sent at every phase it completes.

    `outcome` is empty while it runs; `committed` once new requests go to the new layout, `closed` when the
    old domains are gone, `noop` when nothing was to do, `failed` or `cancelled` when it was taken back,
    `rolled_back` when its ramp found the new side worse.
    `phases_ms` has an entry per completed phase: prepare_views, prepare_communicator, proof, ramp (with the
    shadow probe and the settling), commit, drain, close; or rollback.
    """

    switch_id: str
    from_layout: str
    to_layout: str
    phase: str
    outcome: Literal["", "committed", "closed", "noop", "failed", "cancelled", "rolled_back"] = ""
    phases_ms: dict[str, float] = msgspec.field(default_factory=dict)
    handovers: int = 0
    recomputes: int = 0
    weight_bytes_copied: int = 0
    reason: str = "admin"
    error: str | None = None
    ramp_share: float = 0.0
    """Share of new requests that go to the new side, while the ramp runs."""


class FirstAdmission(Message, frozen=True):
    """The first request from the queue went to a domain that a switch opened or revived, `milliseconds`
    after the engine got the switch's command. Often after the switch is `closed`: it takes an arrival.
    """

    switch_id: str
    milliseconds: float


class StepTotals(msgspec.Struct, frozen=True, array_like=True):
    """Steps of one degree since the engine started, and where their time went on rank 0, in seconds.

    A `decode` step computes no prompt token. `seconds` is the sum of the steps; weights, attention and wait
    are parts of it, `host_s` comes on top: what passed between two steps of a domain that had work.
    """

    tp: int
    phase: Literal["decode", "prefill"]
    steps: int
    seconds: float
    weights_s: float
    attention_s: float
    wait_s: float
    host_s: float


class StepMeasure(msgspec.Struct, frozen=True, array_like=True):
    """One step of a domain that had its devices to itself, for calibration. Means are over its tokens."""

    tp: int
    seconds: float
    rows: int
    context: float
    """Mean context of the decoding rows, in tokens."""
    prefill_tokens: int
    past_tokens: float
    """Mean tokens computed before the chunks of prompt, over their tokens."""
    active_devices: int
    """Devices that had work at the time."""


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """The waiting queue: its tokens, its oldest arrival (0 for none), and how many devices the narrowest
    domain takes that could hold its largest request which no serving domain could hold (0: none is so)."""

    tokens: int = 0
    oldest_s: float = 0.0
    needs_devices: int = 0


class Snapshot(Message, frozen=True):
    """The engine's state for metrics, `/admin/layout` and the planner. Sent periodically and on changes."""

    time_s: float
    layout: str
    waiting: int
    running: int
    rows_used: int
    domains: tuple[DomainStatus, ...]
    devices: tuple[DeviceStatus, ...]
    pages_free: int
    pages_cached: int
    pages_total: int
    prefix_hits: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    max_model_len: int = 0
    step_engine_us: float = 0.0
    """Median processor time of the engine per step over the last steps, in microseconds."""
    steps: tuple[StepTotals, ...] = ()
    prefix_evictions: int = 0
    rows_limit: int = 0
    """Most requests that the serving domains run at once, if their pages allow."""
    placed: str = ""
    """The observed layout with its devices: also those whose domain is being built again."""
    queue: Waiting = Waiting()
    measures: tuple[StepMeasure, ...] = ()
    """A few of each degree and phase since the snapshot before."""
    rows_total: int = 0
    """Requests as large as those now running that can run at once: bounded by rows and by pages."""
    prefill_tokens_per_s: float = 0.0
    """Predicted, beside the rows that decode now; 0 while no domain serves."""


class WorkerLost(Message, frozen=True):
    """The engine asks the supervisor for a new worker on a device."""

    device: int
    incarnation: int
    reason: str


class WorkerGone(Message, frozen=True):
    """The supervisor has reaped a worker: it touches no memory any more."""

    device: int
    incarnation: int
    reason: str


class WorkerStarted(Message, frozen=True):
    """The supervisor starts a worker's next life. Its link is a new one; its `WorkerHello` follows."""

    device: int
    incarnation: int
