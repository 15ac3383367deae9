"""Every message between server, engine and workers: small frozen values, encoded with MessagePack.

An `Envelope` carries protocol version, sender's incarnation and a gap-free sequence number; its body is one
of the structs here. Fields are only ever appended. Times are seconds of the machine's monotonic clock.
Token lists travel as bytes (`pack_tokens`): little-endian uint32.

Positions: `position` counts output tokens of a request from 0, across preemption, handover and engine
restart. Absolute positions in the sequence (prompt + output) are called `start` or `index`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from dynamictp.facts import DType, ModelFacts

PROTOCOL_VERSION = 1


def pack_tokens(tokens: Iterable[int]) -> bytes:
    return array("I", tokens).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    tokens = array("I")
    tokens.frombytes(data)
    return tokens.tolist()


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: encoded as an array headed by the type's name."""


# ---------------------------------------------------------------- values inside messages


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
    state: Literal["serving", "standby", "released"]
    domains: tuple[str, ...] = ()
    kv_pages_used: float = 0.0
    kv_pages_total: float = 0.0
    busy_s: float = 0.0


# ---------------------------------------------------------------- server → engine


class SubmitRequest(_Message, frozen=True):
    """A request, or a live one again after an engine restart (then with a higher `attempt`).

    `tokens` holds the prompt and the tokens emitted so far; `prompt_len` is the boundary. `salt` is the
    tenant's addition to prefix hashes. `deadline_s` is absolute.
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


class CancelRequest(_Message, frozen=True):
    request_id: str
    attempt: int


class SetLayout(_Message, frozen=True):
    """Command of a switch. Idempotent by `switch_id`; `phase` is the phase the switch should reach."""

    switch_id: str
    layout: str
    phase: Literal["commit", "close"] = "close"
    pool: str = "default"
    ramp: bool = False
    drain_deadline_s: float = 0.0
    reason: str = "admin"


class CancelSwitch(_Message, frozen=True):
    """Take a switch back that has not committed yet."""

    switch_id: str


class Shutdown(_Message, frozen=True):
    """Stop. With `drain_s` > 0 running requests may finish first."""

    drain_s: float = 0.0


# ---------------------------------------------------------------- engine → server


class EngineReady(_Message, frozen=True):
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
    reason: Literal["stop", "length", "cancelled", "error"]
    tokens: int
    cached_tokens: int = 0
    error: str | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens; entry i belongs to the sequence index `start + i`."""

    request_id: str
    attempt: int
    start: int
    entries: tuple[TokenLogprobs, ...]


class Outputs(_Message, frozen=True):
    """What one turn of the engine produced, in order: log-probabilities of prompts, tokens, ends."""

    tokens: tuple[TokenEvent, ...] = ()
    ends: tuple[RequestEnd, ...] = ()
    prompts: tuple[PromptLogprobs, ...] = ()


class SwitchStatus(_Message, frozen=True):
    """Progress of a switch, sent at every phase it completes.

    `outcome` is empty while it runs; `committed` once new requests go to the new layout, `closed` when the
    old domains are gone, `noop` when nothing was to do, `failed` or `cancelled` when it was taken back.
    `phases_ms` has an entry per completed phase: prepare_views, prepare_communicator, proof, ramp, commit,
    drain, close.
    """

    switch_id: str
    from_layout: str
    to_layout: str
    phase: str
    outcome: Literal["", "committed", "closed", "noop", "failed", "cancelled"] = ""
    phases_ms: dict[str, float] = {}
    handovers: int = 0
    recomputes: int = 0
    weight_bytes_copied: int = 0
    reason: str = "admin"
    error: str | None = None


class Snapshot(_Message, frozen=True):
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
    """Median engine time per step over the last steps, in microseconds."""


class WorkerLost(_Message, frozen=True):
    """The engine asks the supervisor for a new worker on a device."""

    device: int
    incarnation: int
    reason: str


# ---------------------------------------------------------------- engine → worker


class CommHandle(msgspec.Struct, frozen=True, array_like=True):
    """A communicator: `id` is never reused, `slot` says which part of the exchange memory it uses."""

    id: int
    slot: int


class OpenDomain(_Message, frozen=True):
    """Become rank `rank` of a new domain: build views, join the communicator, answer `DomainOpened`.

    `control_slot` is the domain's control word; the engine set it to (epoch, live) before sending this.
    """

    epoch: int
    model: str
    tp: int
    rank: int
    members: tuple[int, ...]
    comm: CommHandle
    control_slot: int
    pp: int = 1


class ProveDomain(_Message, frozen=True):
    """Run the proof collective and a warm-up on a domain, in queue order; rank 0 answers `DomainProven`."""

    epoch: int
    step: int


class CloseDomain(_Message, frozen=True):
    """Drop the domain's rows and views, leave the communicator quiesced; answer `DomainClosed`."""

    epoch: int


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request's slot in the worker. `blocks[b][h]` is the page of block b and KV head h."""

    row: int
    request_id: str
    attempt: int
    tokens: bytes
    prompt_len: int
    sampling: SamplingParams
    blocks: tuple[tuple[int, ...], ...] = ()


class RowStep(msgspec.Struct, frozen=True, array_like=True):
    """One row's part of a step: compute `count` tokens from sequence index `start`.

    The tokens are those of the row (given, or sampled by earlier steps). `new_blocks` extends the row's
    page table first. With `sample` the last token's logits choose the next token, which the worker appends
    to the row. `prompt_logprobs` asks for the log-probabilities of prompt tokens at indices
    start+1 … start+count that are prompt tokens.
    """

    row: int
    start: int
    count: int
    sample: bool
    new_blocks: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: bool = False


class StepPlan(_Message, frozen=True):
    """One step of one domain. Workers execute plans strictly in arrival order.

    Order inside: drop `gone` rows, add `new` rows, run `rows`. `step` numbers are gap-free within an epoch.
    """

    epoch: int
    step: int
    rows: tuple[RowStep, ...]
    new: tuple[NewRow, ...] = ()
    gone: tuple[int, ...] = ()


# ---------------------------------------------------------------- worker → engine


class WorkerHello(_Message, frozen=True):
    """First message of a worker: weights are mapped, it can open domains."""

    device: int
    incarnation: int
    pid: int


class DomainOpened(_Message, frozen=True):
    """Views are built and the communicator is joined; times in ms."""

    epoch: int
    rank: int
    views_ms: float
    communicator_ms: float
    weight_bytes_copied: int = 0


class DomainProven(_Message, frozen=True):
    epoch: int
    rank: int
    proof_ms: float


class DomainClosed(_Message, frozen=True):
    epoch: int
    rank: int


class RowToken(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token: its sequence index, and log-probabilities if the request wants them."""

    row: int
    index: int
    token: int
    logprobs: TokenLogprobs | None = None


class RowPromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    row: int
    start: int
    entries: tuple[TokenLogprobs, ...]


class StepResult(_Message, frozen=True):
    """What a step produced. Sent by rank 0 after the step's last barrier, so every rank is past every read
    and write of pages that the step names: the step is complete on all its ranks.

    `seconds` is the time the step took on rank 0, `wait_s` the part spent waiting for peers.
    """

    epoch: int
    step: int
    tokens: tuple[RowToken, ...]
    seconds: float
    wait_s: float = 0.0
    prompts: tuple[RowPromptLogprobs, ...] = ()


class DomainBroken(_Message, frozen=True):
    """A rank left the domain: its communicator broke, or the step raised. Nothing of the step counts."""

    epoch: int
    rank: int
    step: int
    culprit: bool
    """The error arose in this rank's own computation."""
    error: str


# ---------------------------------------------------------------- start-up values (argv or inherited file)


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


Body = (
    SubmitRequest
    | CancelRequest
    | SetLayout
    | CancelSwitch
    | Shutdown
    | EngineReady
    | Outputs
    | SwitchStatus
    | Snapshot
    | WorkerLost
    | OpenDomain
    | ProveDomain
    | CloseDomain
    | StepPlan
    | WorkerHello
    | DomainOpened
    | DomainProven
    | DomainClosed
    | StepResult
    | DomainBroken
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message on the wire. `sequence` starts at 0 and has no gap within one sender's incarnation."""

    version: int
    incarnation: int
    sequence: int
    body: Body
