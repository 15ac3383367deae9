"""Which request is taken, and which is told to come back later. Pure.

A request is taken when the queue has room for it, and when the predicted wait before it begins is within the
limit. The order of the queue (`dynamictp.engine.waiting`) decides what counts as before it: everything of a
higher priority; of its own tenant one prompt of each HTTP request; of every other tenant of its priority no
more than what its own tenant has before it, because tenants take turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Reason = Literal["server_full", "class_full", "tenant_full", "wait_too_long", "tenant_wait_too_long"]
REASONS: tuple[Reason, ...] = get_args(Reason)

MAX_RETRY_S = 60.0
_LEAST_RATE = 1.0


@dataclass(frozen=True, slots=True)
class Share:
    """What waits of one tenant at one priority.

    `heads` counts its HTTP requests, and `head_tokens` of each the longest prompt: of a list of a thousand
    prompts one is before a request that comes now, the others take turns with those that come later.
    """

    tenant: str
    priority: int
    requests: int
    tokens: int
    heads: int
    head_tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """An HTTP request that wants in: `requests` prompts or choices of `tokens` prompt tokens in all, the
    longest of `longest` tokens. `patience_s`: how long its first prompt may wait; None for no limit.
    """

    tenant: str
    priority: int
    requests: int
    tokens: int
    longest: int
    patience_s: float | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """How fast the queue moves.

    `rows` requests run at once, `decoding` do now and are past their first token; a request gives its row
    back after `output_tokens` tokens, `tpot_s` each. `bias`: how much longer waits were than predicted.
    """

    prefill_tokens_per_s: float
    rows: int
    decoding: int
    output_tokens: float
    tpot_s: float
    bias: float = 1.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the queue. A tenant gets at most `tenant_share` of it, a class of prompt lengths at most
    `class_share`.
    """

    requests: int
    tokens: int
    tenant_share: float = 1.0
    class_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits: in all, of the asking request's tenant and of its class, and by tenant and priority."""

    requests: int
    tokens: int
    tenant_requests: int
    tenant_tokens: int
    class_requests: int
    class_tokens: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`status` is 429 when the tenant itself is the cause, else 503. `retry_after_s` is when there should be
    room."""

    reason: Reason
    status: Literal[429, 503]
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is before a request: prompts and their tokens."""

    requests: int
    tokens: int


def ahead_of(ask: Ask, shares: Iterable[Share], *, own_only: bool = False) -> Ahead:
    """What will be computed before the first prompt of `ask`. `own_only`: counting its tenant alone."""
    own_requests = own_tokens = requests = tokens = 0
    others: list[Share] = []
    for share in shares:
        if share.tenant == ask.tenant and share.priority == ask.priority:
            own_requests, own_tokens = share.heads, share.head_tokens
        elif share.priority > ask.priority:
            if not own_only or share.tenant == ask.tenant:
                requests += share.requests
                tokens += share.tokens
        elif share.priority == ask.priority and not own_only:
            others.append(share)
    for share in others:
        requests += min(share.requests, own_requests + 1)
        tokens += min(share.tokens, own_tokens + ask.longest)
    return Ahead(requests + own_requests, tokens + own_tokens)


def predict_wait_s(ahead: Ahead, capacity: Capacity) -> float:
    """Time until the first prompt of a request begins: the prompts before it at the rate of prefill, or the
    rows that have to become free, whichever takes longer.
    """
    prefill_s = ahead.tokens / max(capacity.prefill_tokens_per_s, _LEAST_RATE)
    missing = ahead.requests + 1 - max(0, capacity.rows - capacity.decoding)
    rows_s = max(0, missing) * capacity.output_tokens * capacity.tpot_s / max(capacity.rows, 1)
    return max(prefill_s, rows_s) * capacity.bias


def predict_ttft_s(wait_s: float, prompt_tokens: int, capacity: Capacity) -> float:
    """Time to the first token of a prompt that begins after `wait_s`: its own prefill, a step of others."""
    own_s = prompt_tokens / max(capacity.prefill_tokens_per_s, _LEAST_RATE) + capacity.tpot_s
    return wait_s + own_s * capacity.bias


def admit(ask: Ask, queue: Queue, capacity: Capacity, bounds: Bounds) -> Refusal | None:
    """None to take the request. A request that finds an empty queue is always taken."""
    wait_s = predict_wait_s(ahead_of(ask, queue.shares), capacity)
    full = _full(ask, queue, bounds)
    if full is not None and queue.requests:
        # Room comes as the queue moves: about the time that the request's part of it takes.
        own = ask.tokens / max(capacity.prefill_tokens_per_s, _LEAST_RATE)
        return Refusal(full, 429 if full == "tenant_full" else 503, _retry(max(own, 1.0)))
    if ask.patience_s is None or wait_s <= ask.patience_s or not queue.requests:
        return None
    own_s = predict_wait_s(ahead_of(ask, queue.shares, own_only=True), capacity)
    tenants = {share.tenant for share in queue.shares}
    if own_s > ask.patience_s and tenants != {ask.tenant}:
        return Refusal("tenant_wait_too_long", 429, _retry(own_s - ask.patience_s))
    return Refusal("wait_too_long", 503, _retry(wait_s - ask.patience_s))


def _full(ask: Ask, queue: Queue, bounds: Bounds) -> Reason | None:
    """The bound that the request would go beyond."""
    requests, tokens = ask.requests, ask.tokens
    if queue.requests + requests > bounds.requests or queue.tokens + tokens > bounds.tokens:
        return "server_full"
    share = bounds.tenant_share
    if (
        queue.tenant_requests + requests > share * bounds.requests
        or queue.tenant_tokens + tokens > share * bounds.tokens
    ):
        return "tenant_full"
    share = bounds.class_share
    if (
        queue.class_requests + requests > share * bounds.requests
        or queue.class_tokens + tokens > share * bounds.tokens
    ):
        return "class_full"
    return None


def _retry(seconds: float) -> float:
    return min(max(1.0, seconds), MAX_RETRY_S)
