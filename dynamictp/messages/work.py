"""Between engine and workers: domains and steps."""

from __future__ import annotations

import msgspec

from dynamictp.messages.values import (
    Message,
    SamplingParams,
    TokenLogprobs,
)


class CommHandle(msgspec.Struct, frozen=True, array_like=True):
    """A communicator: `id` is never reused, `slot` says which part of the exchange memory it uses."""

    id: int
    slot: int


class OpenDomain(Message, frozen=True):
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


class ProveDomain(Message, frozen=True):
    """Run the proof collective on a domain, in queue order; rank 0 answers `DomainProven`."""

    epoch: int
    step: int


class CloseDomain(Message, frozen=True):
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


class StepPlan(Message, frozen=True):
    """One step of one domain. Workers execute plans strictly in arrival order.

    Order inside: drop `gone` rows, add `new` rows, run `rows`. `step` numbers are gap-free within an epoch.
    """

    epoch: int
    step: int
    rows: tuple[RowStep, ...]
    new: tuple[NewRow, ...] = ()
    gone: tuple[int, ...] = ()


class WorkerHello(Message, frozen=True):
    """First message of a worker: weights are mapped, it can open domains."""

    device: int
    incarnation: int
    pid: int


class DomainOpened(Message, frozen=True):
    """Views are built and the communicator is joined; times in ms."""

    epoch: int
    rank: int
    views_ms: float
    communicator_ms: float
    weight_bytes_copied: int = 0


class DomainProven(Message, frozen=True):
    epoch: int
    rank: int
    proof_ms: float


class DomainClosed(Message, frozen=True):
    epoch: int
    rank: int


NO_TOKEN = -1
"""In place of a token: the row's logits are not finite, so its request can't go on."""


class RowToken(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token or `NO_TOKEN`: its sequence index, and log-probabilities if the request wants them."""

    row: int
    index: int
    token: int
    logprobs: TokenLogprobs | None = None


class RowPromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    row: int
    start: int
    entries: tuple[TokenLogprobs, ...]


class StepResult(Message, frozen=True):
    """What a step produced. Sent by rank 0 after the step's last barrier, so every rank is past every read
    and write of pages that the step names: the step is complete on all its ranks.

    `seconds` is the time the step took on rank 0, `wait_s` the part spent meeting its peers, `weights_s` in
    matrices, `attention_s` in attention (0 where the kernels do not measure them). `gap_s` is the time from
    the end of the domain's previous step to the start of this one, whether or not there was work to do.
    """

    epoch: int
    step: int
    tokens: tuple[RowToken, ...]
    seconds: float
    wait_s: float = 0.0
    prompts: tuple[RowPromptLogprobs, ...] = ()
    weights_s: float = 0.0
    attention_s: float = 0.0
    gap_s: float = 0.0


class DomainBroken(Message, frozen=True):
    """A rank left the domain: its communicator broke, or the step raised. Nothing of the step counts."""

    epoch: int
    rank: int
    step: int
    culprit: bool
    """The error arose in this rank's own computation."""
    error: str
