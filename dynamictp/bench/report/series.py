"""What the plots draw: distributions, figures over time, gaps around switches. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dynamictp.bench.measure import prompt_tokens
from dynamictp.bench.record import Run
from dynamictp.bench.result import Result
from dynamictp.bench.watcher import Change

Floats = npt.NDArray[np.float64]
Metric = Callable[[Result], float | None]

MAX_POINTS = 3000
"""Of one scatter or line: more can't be told apart and make the page heavy."""
SWITCH_MARGIN_S = 3.0


def distribution(results: Iterable[Result], metric: Metric) -> tuple[Floats, Floats]:
    """(values ascending, share of requests at or below); finished requests only."""
    found = (metric(result) for result in results if result.failure is None)
    values = np.sort(np.array([value for value in found if value is not None], dtype=np.float64))
    shares = np.arange(1, values.size + 1) / max(values.size, 1)
    if values.size > MAX_POINTS:
        kept = np.unique(np.linspace(0, values.size - 1, MAX_POINTS).astype(int))
        values, shares = values[kept], shares[kept]
    return values, shares


def points(x: Sequence[float], y: Sequence[float]) -> tuple[Floats, Floats]:
    """At most MAX_POINTS of the points: the highest hundredth and an even choice of the rest."""
    xs, ys = np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)
    if xs.size <= MAX_POINTS:
        return xs, ys
    high = np.flatnonzero(ys >= np.percentile(ys, 99))[: MAX_POINTS // 2]
    even = np.linspace(0, xs.size - 1, MAX_POINTS - high.size).astype(int)
    kept = np.unique(np.concatenate([high, even]))
    return xs[kept], ys[kept]


@dataclass(frozen=True, slots=True)
class Rates:
    """Per bin of time: its left edge, prompt and output tokens per second, mean of requests running."""

    edges_s: Floats
    bin_s: float
    prefill_per_s: Floats
    decode_per_s: Floats
    running: Floats


def rates(run: Run) -> Rates:
    """About 120 bins, none under half a second. Prompt tokens count when their first token comes."""
    bin_s = max(run.end_s / 120, 0.5)
    count = max(int(np.ceil(run.end_s / bin_s)), 1)
    edges = np.arange(count, dtype=np.float64) * bin_s
    span = (0.0, count * bin_s)
    first = [(r.first_token_s, prompt_tokens(r)) for r in run.results if r.first_token_s is not None]
    chunks = [pair for r in run.results for pair in zip(r.chunk_s, r.chunk_tokens, strict=True)]

    def per_s(stamped: Sequence[tuple[float, int]]) -> Floats:
        times, weights = [t for t, _ in stamped], [w for _, w in stamped]
        sums = np.histogram(times, bins=count, range=span, weights=weights)[0]
        return np.asarray(sums / bin_s, dtype=np.float64)

    sent = np.array([result.sent_s for result in run.results])
    ended = np.array([result.end_s for result in run.results])
    bounds = np.append(edges, count * bin_s)
    # Request-seconds up to each bound; their differences are what ran within a bin.
    spent = np.array([np.clip(np.minimum(ended, bound) - sent, 0.0, None).sum() for bound in bounds])
    return Rates(edges, bin_s, per_s(first), per_s(chunks), np.diff(spent) / bin_s)


@dataclass(frozen=True, slots=True)
class SwitchGaps:
    """Chunk gaps of streams that ran around one switch.

    `offsets_s`: when each gap ended, after the switch's start. Seconds; the medians are over the gaps.
    """

    change: Change
    streams: int
    offsets_s: Floats
    gaps_s: Floats
    median_s: float
    longest_s: float


def gaps_around(run: Run, change: Change) -> SwitchGaps | None:
    """Gaps from SWITCH_MARGIN_S before a switch to as long after it; None where no stream ran.

    `longest_s` is the longest that touches the switch itself.
    """
    start_s, end_s = change.start_s - SWITCH_MARGIN_S, change.end_s + SWITCH_MARGIN_S
    ends: list[float] = []
    gaps: list[float] = []
    during: list[float] = []
    streams = 0
    for result in run.results:
        own = [(a, b) for a, b in pairwise(result.chunk_s) if b >= start_s and a <= end_s]
        touching = [b - a for a, b in own if b >= change.start_s and a <= change.end_s]
        streams += bool(touching)
        during += touching
        ends += [b - change.start_s for _, b in own]
        gaps += [b - a for a, b in own]
    if not during:
        return None
    return SwitchGaps(change, streams, np.array(ends), np.array(gaps), float(np.median(gaps)), max(during))
