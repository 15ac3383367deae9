"""Sliding windows over arrivals, outputs and latencies: what a snapshot is made of. No clock of their own.

Each has one owner, which adds events in order of time and asks for values at a time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dynamictp.control.config import ControlConfig
from dynamictp.control.values import Arrivals, Digest, Outputs

LONGEST_S, SHORT_S = 10.0, 2.0
"""The two windows of arrivals."""
FEW_TOKENS = 32
"""A running stream's time per token counts from so many tokens on."""
_MOST = 20_000
"""Samples of a kind that are kept, the latest."""
_OUTPUTS_S = 60.0
_FEW_OUTPUTS = 20


class ArrivalWindow:
    """Owner of the arrivals of the last 10 s."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._events: deque[tuple[float, int]] = deque(maxlen=_MOST)

    def add(self, time_s: float, prompt_tokens: int) -> None:
        self._events.append((time_s, prompt_tokens))

    def view(self, now_s: float, window_s: float) -> Arrivals:
        """Arrivals of the last `window_s` ≤ 10 seconds."""
        while self._events and self._events[0][0] <= now_s - LONGEST_S:
            self._events.popleft()
        inside = sorted(tokens for time_s, tokens in self._events if time_s > now_s - window_s)
        length = min(window_s, max(now_s - self._start_s, 1e-3))
        if not inside:
            return Arrivals(length)
        return Arrivals(length, len(inside), sum(inside) / len(inside), float(quantile(inside, 0.9)))


class OutputWindow:
    """Owner of the lengths of the outputs that finished in the last minute, or of the last 20."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, int]] = deque()
        self._ordered: list[int] = []
        self._total = 0

    def add(self, time_s: float, tokens: int) -> None:
        if len(self._events) == _MOST:
            self._drop_oldest()
        self._events.append((time_s, tokens))
        insort(self._ordered, tokens)
        self._total += tokens

    def view(self, now_s: float) -> Outputs:
        while len(self._events) > _FEW_OUTPUTS and self._events[0][0] <= now_s - _OUTPUTS_S:
            self._drop_oldest()
        if not self._events:
            return Outputs()
        count = len(self._ordered)
        return Outputs(count, self._total / count, float(quantile(self._ordered, 0.9)))

    def _drop_oldest(self) -> None:
        _, tokens = self._events.popleft()
        del self._ordered[bisect_left(self._ordered, tokens)]
        self._total -= tokens


class RatioWindow:
    """Owner of the recent samples of measured ÷ target of one latency, and of those that count in order."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, float, float]] = deque()
        self._since = -math.inf
        self._ordered: list[float] = []
        """Ratios of what began at `_since` or later, rising."""

    def add(self, time_s: float, ratio: float, started_s: float) -> None:
        """A sample came at `time_s`; what it measures began at `started_s`."""
        if len(self._events) == _MOST:
            self._drop_oldest()
        self._events.append((time_s, started_s, ratio))
        if started_s >= self._since:
            insort(self._ordered, ratio)

    def view(
        self, now_s: float, window_s: float, not_before_s: float | None, running: Iterable[float] = ()
    ) -> Digest:
        """Quantiles of the last `window_s` seconds, of what began at `not_before_s` (the last commit) or
        later; `running` are samples that are not finished yet."""
        while self._events and self._events[0][0] <= now_s - window_s:
            self._drop_oldest()
        since = -math.inf if not_before_s is None else not_before_s
        if since != self._since:
            self._since = since
            self._ordered = sorted(ratio for _, started_s, ratio in self._events if started_s >= since)
        more = list(running)
        values = sorted(self._ordered + more) if more else self._ordered
        if not values:
            return Digest()
        p50, p90, p99 = (float(quantile(values, q)) for q in (0.5, 0.9, 0.99))
        return Digest(len(values), p50, p90, p99)

    def _drop_oldest(self) -> None:
        _, started_s, ratio = self._events.popleft()
        if started_s >= self._since:
            del self._ordered[bisect_left(self._ordered, ratio)]


class PrefixWindow:
    """Owner of the prefix cache's totals at the last look, in tokens of prompts."""

    def __init__(self) -> None:
        self._hits = self._queries = 0
        self._share = 0.0

    def view(self, hits: int, queries: int) -> float:
        """The share of hits since the last look. The one before it where nothing was asked for, since no
        prompts are no misses, or where the totals began again from 0."""
        hit, asked = hits - self._hits, queries - self._queries
        self._hits, self._queries = hits, queries
        if 0 <= hit <= asked and asked:
            self._share = hit / asked
        return self._share


class Who(NamedTuple):
    """A request, as far as its targets depend on it."""

    arrival_s: float
    prompt_tokens: int
    request_class: str = ""
    tenant: str = ""


class Stream(NamedTuple):
    """A request that has its first token: tokens so far, and when the first and the last one came."""

    who: Who
    tokens: int
    first_token_s: float
    last_token_s: float

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; there are two at least."""
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)


class Seen(NamedTuple):
    """What `TrafficWindows` adds to a snapshot."""

    arrivals_2s: Arrivals
    arrivals_10s: Arrivals
    outputs: Outputs
    ttft: Digest
    tpot: Digest
    worst_ttft_ratio: float


class TrafficWindows:
    """Owner of the samples of one pool. Latencies are measured against the request's own targets (class,
    tenant, length), and count only when what they measure began after the last commit (C4).

    `config` may be replaced at any time; a sample keeps the target that was in force when it came.
    """

    def __init__(self, start_s: float, config: ControlConfig) -> None:
        self.config = config
        self.last_commit_s: float | None = None
        self._arrivals, self._outputs = ArrivalWindow(start_s), OutputWindow()
        self._ttft, self._tpot = RatioWindow(), RatioWindow()

    def arrived(self, now_s: float, prompt_tokens: int) -> None:
        self._arrivals.add(now_s, prompt_tokens)

    def first_token(self, time_s: float, who: Who) -> None:
        """The first token came at `time_s`."""
        self._ttft.add(time_s, (time_s - who.arrival_s) / self._ttft_target_s(who), who.arrival_s)

    def finished(self, now_s: float, stream: Stream) -> None:
        """A request ended well."""
        self._outputs.add(now_s, stream.tokens)
        if stream.tokens > 1:
            self._tpot.add(now_s, stream.tpot_s / self._tpot_target_s(stream.who), stream.first_token_s)

    def committed(self, now_s: float) -> None:
        """A new layout serves: latencies of before say nothing about it."""
        self.last_commit_s = now_s

    def view(self, now_s: float, waiting: Iterable[Who], streams: Iterable[Stream]) -> Seen:
        """`waiting`: requests without a first token; `streams`: those that are running."""
        window_s, since = self.config.feedback_window_s, self.last_commit_s
        running = (
            stream.tpot_s / self._tpot_target_s(stream.who)
            for stream in streams
            if stream.tokens >= FEW_TOKENS and (since is None or stream.first_token_s >= since)
        )
        return Seen(
            self._arrivals.view(now_s, SHORT_S),
            self._arrivals.view(now_s, LONGEST_S),
            self._outputs.view(now_s),
            self._ttft.view(now_s, window_s, since),
            self._tpot.view(now_s, window_s, since, running),
            max((self._waited_ratio(now_s, who) for who in waiting), default=0.0),
        )

    def _waited_ratio(self, now_s: float, who: Who) -> float:
        """A censored sample of TTFT: the time waited since the arrival or the last commit."""
        since = who.arrival_s if self.last_commit_s is None else max(who.arrival_s, self.last_commit_s)
        return max(0.0, now_s - since) / self._ttft_target_s(who)

    def _ttft_target_s(self, who: Who) -> float:
        return self.config.slo.of(who.request_class, who.tenant).ttft_target_s(who.prompt_tokens)

    def _tpot_target_s(self, who: Who) -> float:
        return self.config.slo.of(who.request_class, who.tenant).tpot_target_s


def quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that a part `q` of them does not exceed; `ordered` rises and is not empty."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
