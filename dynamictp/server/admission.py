"""What waits in the engine, how fast it moves, and so which requests are taken."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from dynamictp.clock import Clock
from dynamictp.control.admission import (
    Ask,
    Bounds,
    Capacity,
    Queue,
    Reason,
    Refusal,
    Share,
    admit,
    ahead_of,
    predict_ttft_s,
    predict_wait_s,
)
from dynamictp.errors import CapacityError
from dynamictp.messages import Snapshot
from dynamictp.observe.requests import LONG_PROMPT_TOKENS
from dynamictp.server.sender import Sender

log = logging.getLogger(__name__)

PromptClass = Literal["short", "long"]

CLASS_SHARE = 0.75
TENANT_SHARE = 0.5
"""Shares of the queue that prompts of one class, and one tenant, may fill when there are several tenants."""
SATURATED_TOKENS = 512
"""With so many prompt tokens waiting the engine prefills as fast as it can."""
BUCKET_S = 0.25
WINDOW_S = 5.0
PRIOR_S = 1.0
"""Weight of the engine's own estimate beside what was measured."""
FIRST_RATE = 1000.0
FIRST_TPOT_S = 0.05
FIRST_OUTPUT_TOKENS = 64.0
TELLING_S = 0.3
"""Predictions below say nothing about the speed: latencies of every step are larger."""
MAX_BIAS = 4.0
LOG_S = 10.0
"""Least time between two lines about refused requests."""
_BIAS_WEIGHT = 0.1
_TPOT_WEIGHT = 0.02
_OUTPUT_WEIGHT = 0.1

_MESSAGES: dict[Reason, str] = {
    "server_full": "the server's queue is full",
    "class_full": "the server's queue has no more room for prompts of this length",
    "tenant_full": "this key's tenant has filled its share of the queue",
    "wait_too_long": "the first token would take too long: the server is at its capacity",
    "tenant_wait_too_long": "the first token would take too long: this key's tenant has enough waiting",
}


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait, and how long. `wait_s` 0: however long; `request_timeout_s` 0: no deadline."""

    requests: int = 10_000
    tokens: int = 16_000_000
    wait_s: float = 10.0
    request_timeout_s: float = 0.0


def class_of(prompt_tokens: int) -> PromptClass:
    """The class of a prompt of that length."""
    return "long" if prompt_tokens >= LONG_PROMPT_TOKENS else "short"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for its first token. `group` is the HTTP request that it belongs to."""

    sender: Sender
    tokens: int
    group: str
    predicted_s: float | None = None
    """Its predicted time to first token, if there was one."""


@dataclass(slots=True)
class _Group:
    """What waits of one HTTP request."""

    requests: int = 0
    tokens: int = 0
    longest: int = 0

    @property
    def head(self) -> int:
        return min(self.tokens, self.longest)


@dataclass(slots=True)
class _Share:
    requests: int = 0
    tokens: int = 0
    head_tokens: int = 0
    groups: dict[str, _Group] = field(default_factory=dict)


class Backlog:
    """Owner of the counts of what waits. Every change costs the same, however much waits."""

    def __init__(self) -> None:
        self._shares: dict[tuple[str, int], _Share] = {}
        self._tenants: Counter[tuple[str, str]] = Counter()
        """(tenant, `requests` or `tokens`)."""
        self._classes: Counter[tuple[str, str]] = Counter()
        self.requests = 0
        self.tokens = 0

    def add(self, waiting: Waiting) -> None:
        self._change(waiting, 1)

    def remove(self, waiting: Waiting) -> None:
        self._change(waiting, -1)

    def seen_by(self, tenant: str, kind: PromptClass) -> Queue:
        """The queue as a request of that tenant and class sees it."""
        return Queue(
            self.requests,
            self.tokens,
            self._tenants[tenant, "requests"],
            self._tenants[tenant, "tokens"],
            self._classes[kind, "requests"],
            self._classes[kind, "tokens"],
            tuple(
                Share(tenant, priority, share.requests, share.tokens, len(share.groups), share.head_tokens)
                for (tenant, priority), share in self._shares.items()
            ),
        )

    def _change(self, waiting: Waiting, sign: Literal[1, -1]) -> None:
        tokens, tenant = sign * waiting.tokens, waiting.sender.tenant
        self.requests += sign
        self.tokens += tokens
        kind = class_of(waiting.tokens)
        for counter, name in ((self._tenants, tenant), (self._classes, kind)):
            counter[name, "requests"] += sign
            counter[name, "tokens"] += tokens
        if not self._tenants[tenant, "requests"]:
            del self._tenants[tenant, "requests"], self._tenants[tenant, "tokens"]
        key = tenant, waiting.sender.priority
        share = self._shares.setdefault(key, _Share())
        group = share.groups.setdefault(waiting.group, _Group())
        share.requests += sign
        share.tokens += tokens
        share.head_tokens -= group.head
        group.requests += sign
        group.tokens += tokens
        group.longest = max(group.longest, waiting.tokens)
        share.head_tokens += group.head
        if not group.requests:
            del share.groups[waiting.group]
        if not share.requests:
            del self._shares[key]


class Pace:
    """Owner of the measured speeds: prefill while it is saturated, tokens of a stream, length of outputs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: deque[tuple[float, float, int]] = deque()
        """(end, seconds, prompt tokens that got their first token) while prefill was saturated."""
        self._since: float | None = None
        self._tokens = 0
        self.bias = 1.0
        """How much longer than predicted first tokens took, where there was something to wait for."""
        self.tpot_s = FIRST_TPOT_S
        self.output_tokens = FIRST_OUTPUT_TOKENS

    def first_token(self, waiting: Waiting, waiting_tokens: int) -> None:
        """`waiting_tokens`: prompt tokens that waited until now, these included."""
        now = self._clock.now()
        if waiting.predicted_s is not None and waiting.predicted_s >= TELLING_S:
            # The factor that was in the prediction is taken out again.
            took = (now - waiting.sender.arrival_s) / waiting.predicted_s * self.bias
            self.bias += _BIAS_WEIGHT * (took - self.bias)
            self.bias = min(max(self.bias, 1.0), MAX_BIAS)
        if waiting_tokens < SATURATED_TOKENS:
            self._since = None
            return
        if self._since is None:
            self._since, self._tokens = now, 0
            return
        self._tokens += waiting.tokens
        if now - self._since >= BUCKET_S:
            self._buckets.append((now, now - self._since, self._tokens))
            self._since, self._tokens = now, 0

    def next_token(self, seconds: float) -> None:
        self.tpot_s += _TPOT_WEIGHT * (seconds - self.tpot_s)

    def finished(self, tokens: int) -> None:
        self.output_tokens += _OUTPUT_WEIGHT * (tokens - self.output_tokens)

    def prefill_tokens_per_s(self, prior: float) -> float:
        """`prior` is the engine's estimate from its step times."""
        while self._buckets and self._buckets[0][0] < self._clock.now() - WINDOW_S:
            self._buckets.popleft()
        seconds = sum(bucket[1] for bucket in self._buckets)
        tokens = sum(bucket[2] for bucket in self._buckets)
        return (tokens + prior * PRIOR_S) / (seconds + PRIOR_S)


class RefusalLog:
    """Says in the log how many requests were refused, by reason: the first at once, later ones together."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._new: Counter[Reason] = Counter()
        self._since_s = self._said_s = -math.inf

    def add(self, refusal: Refusal) -> None:
        if not self._new:
            self._since_s = self._clock.now()
        self._new[refusal.reason] += 1
        self.say()

    def say(self) -> None:
        """Call it now and then: nothing is said twice within `LOG_S`."""
        now = self._clock.now()
        if not self._new or now - self._said_s < LOG_S:
            return
        counts = ", ".join(f"{reason} {count}" for reason, count in self._new.most_common())
        log.warning("requests refused in %.0f s: %s", max(1.0, now - self._since_s), counts)
        self._new.clear()
        self._said_s = now


class AdmissionControl:
    """Says who is taken. Owner of the backlog and of the pace; fed by the engine client."""

    def __init__(
        self, clock: Clock, limits: QueueLimits | None = None, tenants: Callable[[], int] = lambda: 1
    ) -> None:
        """`tenants` says how many share the server."""
        self._limits = limits or QueueLimits()
        self._tenants = tenants
        self._clock = clock
        self.backlog = Backlog()
        self.pace = Pace(clock)
        self.refused: Counter[Reason] = Counter()
        self.refusals = RefusalLog(clock)

    def check(self, sender: Sender, prompts: Iterable[int], *, snapshot: Snapshot | None, live: int) -> float:
        """The predicted time to the first token of an HTTP request with prompts of these lengths.

        Raises `CapacityError` unless it is taken. `live` are all requests in the engine.
        """
        lengths = tuple(prompts)
        longest = max(lengths, default=0)
        ask = Ask(
            sender.tenant, sender.priority, len(lengths), sum(lengths), longest, self._patience_s(sender)
        )
        queue = self.backlog.seen_by(sender.tenant, class_of(longest))
        capacity = self._capacity(snapshot, live)
        refusal = admit(ask, queue, capacity, self._bounds())
        if refusal is not None:
            self.refused[refusal.reason] += 1
            self.refusals.add(refusal)
            raise _error(refusal)
        wait_s = predict_wait_s(ahead_of(ask, queue.shares), capacity)
        return predict_ttft_s(wait_s, lengths[0] if lengths else 0, capacity)

    def _patience_s(self, sender: Sender) -> float | None:
        """A client that sets a time-out says itself how long it is ready to wait."""
        if sender.patience_s is not None:
            return max(0.0, sender.patience_s - (self._clock.now() - sender.arrival_s))
        return self._limits.wait_s or None

    def _bounds(self) -> Bounds:
        """Alone, a tenant may fill the queue."""
        limits = self._limits
        if self._tenants() > 1:
            return Bounds(limits.requests, limits.tokens, TENANT_SHARE, CLASS_SHARE)
        return Bounds(limits.requests, limits.tokens)

    def _capacity(self, snapshot: Snapshot | None, live: int) -> Capacity:
        rate, rows = FIRST_RATE, 1 << 30
        if snapshot is not None and snapshot.prefill_tokens_per_s:
            rate, rows = snapshot.prefill_tokens_per_s, snapshot.rows_total
        pace = self.pace
        return Capacity(
            pace.prefill_tokens_per_s(rate),
            rows,
            max(0, live - self.backlog.requests),
            pace.output_tokens,
            pace.tpot_s,
            pace.bias,
        )


def _error(refusal: Refusal) -> CapacityError:
    return CapacityError(
        f"{_MESSAGES[refusal.reason]}; try again in {math.ceil(refusal.retry_after_s)} s",
        status=refusal.status,
        retry_after_s=refusal.retry_after_s,
        code=refusal.reason,
    )
