"""The last hours of a server in memory: what the live page and `dynamictp top` draw.

A point a second for the last quarter of an hour and one every 15 s for six hours, some 400 KB. Made from the
engine's snapshots: while there is no engine there are no points, and the gap shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from dynamictp.clock import Clock
from dynamictp.messages import Snapshot
from dynamictp.observe.families import Histogram, quantile

FINE_S, FINE_POINTS = 1.0, 900
COARSE_S, COARSE_POINTS = 15.0, 1440
WINDOW_S = 10.0
"""Latencies are of the requests and tokens of so long."""
SHARE = 0.95


class Point(msgspec.Struct, frozen=True):
    """One moment. `t` is Unix time; rates are per second since the point before; latencies are P95 in seconds
    over `WINDOW_S`, None where nothing was measured.
    """

    t: float
    layout: str
    degree: int
    """Widest that serves."""
    used: float
    """Mean over the running requests: lags behind `degree` while old domains drain; 0 when none runs."""
    running: int
    waiting: int
    kv: float
    arrivals: float
    tokens: float
    ttft_short: float | None = None
    ttft_long: float | None = None
    itl: float | None = None


class Source(Protocol):
    """Totals since the start, as `Metrics` has them."""

    @property
    def tokens_total(self) -> int: ...
    @property
    def arrivals_total(self) -> int: ...
    @property
    def latencies(self) -> Sequence[Histogram]:
        """TTFT of short prompts, of long ones, time between tokens."""
        ...


@dataclass(frozen=True)
class _Totals:
    """Totals at a moment of the monotonic clock."""

    at_s: float
    tokens: int
    arrivals: int
    counts: tuple[tuple[int, ...], ...]


class History:
    """Owner of the points. `wall` gives Unix time."""

    def __init__(self, clock: Clock, wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._fine: deque[Point] = deque(maxlen=FINE_POINTS)
        self._coarse: deque[Point] = deque(maxlen=COARSE_POINTS)
        self._window: deque[_Totals] = deque()
        self._next_coarse_s = 0.0

    def look(self, snapshot: Snapshot, source: Source) -> None:
        """Add a point if one is due."""
        now = self._clock.now()
        if self._window and now - self._window[-1].at_s < FINE_S:
            return
        totals = _Totals(
            now, source.tokens_total, source.arrivals_total, tuple(h.counts for h in source.latencies)
        )
        point = self._point(snapshot, totals, source.latencies)
        self._window.append(totals)
        while len(self._window) > 1 and now - self._window[0].at_s > WINDOW_S:
            self._window.popleft()
        self._fine.append(point)
        if now >= self._next_coarse_s:
            self._next_coarse_s = now + COARSE_S
            self._coarse.append(point)

    def _point(self, snapshot: Snapshot, totals: _Totals, latencies: Sequence[Histogram]) -> Point:
        before = self._window[-1] if self._window else totals
        passed_s = max(totals.at_s - before.at_s, FINE_S)
        first = self._window[0] if self._window else totals
        quantiles = [
            quantile(histogram.bounds, [b - a for a, b in zip(old, new, strict=True)], SHARE)
            for histogram, old, new in zip(latencies, first.counts, totals.counts, strict=True)
        ]
        serving = [domain.tp for domain in snapshot.domains if domain.state == "serving"]
        running = sum(domain.running for domain in snapshot.domains)
        weighted = sum(domain.tp * domain.running for domain in snapshot.domains)
        return Point(
            t=round(self._wall(), 2),
            layout=snapshot.layout,
            degree=max(serving, default=0),
            used=round(weighted / running, 2) if running else 0.0,
            running=snapshot.running,
            waiting=snapshot.waiting,
            kv=round(kv_usage(snapshot), 4),
            arrivals=round((totals.arrivals - before.arrivals) / passed_s, 2),
            tokens=round((totals.tokens - before.tokens) / passed_s, 1),
            ttft_short=_rounded(quantiles[0]),
            ttft_long=_rounded(quantiles[1]),
            itl=_rounded(quantiles[2]),
        )

    def points(self, since: float = 0.0) -> list[Point]:
        """Points after `since` (Unix time), oldest first: coarse ones, then fine ones where there are."""
        fine_from = self._fine[0].t if self._fine else float("inf")
        coarse = [point for point in self._coarse if since < point.t < fine_from]
        return coarse + [point for point in self._fine if point.t > since]

    def columns(self, since: float = 0.0) -> dict[str, list[Any]]:
        """The points by field, as the page wants them."""
        points = self.points(since)
        return {name: [getattr(point, name) for point in points] for name in Point.__struct_fields__}


def kv_usage(snapshot: Snapshot) -> float:
    """Pages that requests hold ÷ may hold, in the fullest serving domain: a domain has the pages of its own
    devices only.
    """
    shares = (
        domain.kv_pages_used / domain.kv_pages_cap
        for domain in snapshot.domains
        if domain.state == "serving" and domain.kv_pages_cap
    )
    return min(1.0, max(shares, default=0.0))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
