"""Sliding windows over arrivals, outputs and latencies: what a snapshot is made of. No clock of their own.

Each has one owner, which adds events in order of time and asks for values at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from dynamictp.control.values import Arrivals, Digest, Outputs

_LONGEST_S = 10.0
_OUTPUTS_S = 60.0
_FEW_OUTPUTS = 20


class ArrivalWindow:
    """Owner of the arrivals of the last 10 s."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._events: deque[tuple[float, int]] = deque()

    def add(self, time_s: float, prompt_tokens: int) -> None:
        self._events.append((time_s, prompt_tokens))

    def view(self, now_s: float, window_s: float) -> Arrivals:
        """Arrivals of the last `window_s` ≤ 10 seconds."""
        while self._events and self._events[0][0] <= now_s - _LONGEST_S:
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

    def add(self, time_s: float, tokens: int) -> None:
        self._events.append((time_s, tokens))

    def view(self, now_s: float) -> Outputs:
        events = self._events
        while len(events) > _FEW_OUTPUTS and events[0][0] <= now_s - _OUTPUTS_S:
            events.popleft()
        if not events:
            return Outputs()
        lengths = sorted(tokens for _, tokens in events)
        return Outputs(len(lengths), sum(lengths) / len(lengths), float(quantile(lengths, 0.9)))


class RatioWindow:
    """Owner of the recent samples of measured ÷ target of one latency."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._events: deque[tuple[float, float, float]] = deque()

    def add(self, time_s: float, ratio: float, started_s: float) -> None:
        """A sample came at `time_s`; what it measures began at `started_s`."""
        self._events.append((time_s, started_s, ratio))

    def view(self, now_s: float, not_before_s: float | None, running: Sequence[float] = ()) -> Digest:
        """Quantiles of what began at `not_before_s` (the last commit) or later; `running` are samples that
        are not finished yet."""
        events = self._events
        while events and events[0][0] <= now_s - self._window_s:
            events.popleft()
        since = -math.inf if not_before_s is None else not_before_s
        values = sorted([ratio for _, started_s, ratio in events if started_s >= since] + list(running))
        if not values:
            return Digest()
        p50, p90, p99 = (float(quantile(values, q)) for q in (0.5, 0.9, 0.99))
        return Digest(len(values), p50, p90, p99)


def quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that a part `q` of them does not exceed; `ordered` rises and is not empty."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
