"""Results to figures: percentiles, summaries, and the gaps around a switch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dynamictp.bench.result import Result

# H1: what a running stream may stand still during a switch.
GAP_MEDIANS = 5.0
GAP_FLOOR_S = 0.150
GAP_BASELINE = 1.5


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Linear-interpolated percentiles of `count` samples, in the samples' unit."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run as the client saw it. Latencies are of requests that didn't fail, in seconds.

    `tokens_per_s` is every output token over the time from the first request sent to the last
    token, prefill and queueing included.
    """

    requests: int
    failures: int
    failures_by_kind: dict[str, int]
    output_tokens: int
    duration_s: float
    tokens_per_s: float
    ttft: Quantiles | None
    ttft_from_sent: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None
    e2e: Quantiles | None
    longest_gap_s: float | None


@dataclass(frozen=True, slots=True)
class GapVerdict:
    """H1 for one span of time: the stream that came closest to (or furthest over) its limit."""

    longest_s: float
    limit_s: float
    median_s: float
    streams: int

    @property
    def held(self) -> bool:
        return self.longest_s <= self.limit_s


@dataclass(frozen=True, slots=True)
class StreamVerdict:
    """H1 for one running stream over one span of time. `stream` is its request's name."""

    stream: str
    longest_s: float
    limit_s: float
    median_s: float

    @property
    def held(self) -> bool:
        return self.longest_s <= self.limit_s

    @property
    def share(self) -> float:
        """Of its limit."""
        return self.longest_s / self.limit_s


def quantiles(samples: Iterable[float | None]) -> Quantiles | None:
    """Percentiles of the samples that are there; None when there is none."""
    values = np.array([sample for sample in samples if sample is not None], dtype=np.float64)
    if not values.size:
        return None
    p50, p90, p95, p99 = (float(p) for p in np.percentile(values, (50, 90, 95, 99)))
    return Quantiles(int(values.size), p50, p90, p95, p99, float(values.max()))


def summarise(results: Sequence[Result]) -> Summary:
    """The figures of one run."""
    good = [result for result in results if result.failure is None]
    tokens = sum(result.output_tokens for result in results)
    last_s = max((result.chunk_s[-1] for result in results if result.chunk_s), default=0.0)
    duration_s = max(last_s - min((result.sent_s for result in results), default=0.0), 0.0)
    return Summary(
        requests=len(results),
        failures=len(results) - len(good),
        failures_by_kind=dict(Counter(str(r.failure.kind) for r in results if r.failure is not None)),
        output_tokens=tokens,
        duration_s=duration_s,
        tokens_per_s=tokens / duration_s if duration_s else 0.0,
        ttft=quantiles(result.ttft_s for result in good),
        ttft_from_sent=quantiles(result.ttft_from_sent_s for result in good),
        tpot=quantiles(result.tpot_s for result in good),
        itl=quantiles(gap for result in good for gap in result.itl_s),
        e2e=quantiles(result.e2e_s for result in good),
        longest_gap_s=longest_gap(results),
    )


def steady_tokens_per_s(results: Sequence[Result]) -> float | None:
    """Output tokens per second while every stream decodes: from the latest first token to the earliest last
    one. Without prefill, so it compares with batch ÷ step time. None when the streams never ran together.
    """
    if not results or not all(len(result.chunk_s) > 1 for result in results):
        return None
    began_s = max(result.chunk_s[0] for result in results)
    ended_s = min(result.chunk_s[-1] for result in results)
    if ended_s <= began_s:
        return None
    tokens = sum(
        tokens
        for result in results
        for at_s, tokens in zip(result.chunk_s, result.chunk_tokens, strict=True)
        if began_s < at_s <= ended_s
    )
    return tokens / (ended_s - began_s)


def longest_gap(results: Iterable[Result]) -> float | None:
    """The longest time any stream stood still between two of its chunks, failed streams included."""
    return max((gap for result in results for gap in result.chunk_gaps_s), default=None)


def gap_within(result: Result, start_s: float, end_s: float) -> float | None:
    """The stream's longest gap that touches [start_s, end_s]; None when it had no gap there."""
    return max(gaps_within(result, start_s, end_s), default=None)


def gaps_within(result: Result, start_s: float, end_s: float) -> tuple[float, ...]:
    """The stream's gaps that touch [start_s, end_s], whole."""
    return tuple(b - a for a, b in pairwise(result.chunk_s) if b >= start_s and a <= end_s)


def judge_streams(
    results: Iterable[Result], start_s: float, end_s: float, baseline_s: float
) -> tuple[StreamVerdict, ...]:
    """H1 over [start_s, end_s], prepare to close, for each stream that was running then.

    It may stand still for max(5 × its own median gap, 150 ms, 1.5 × `baseline_s`), where `baseline_s` is
    the longest gap of the same schedule played without a switch.
    """
    verdicts = []
    for result in results:
        longest_s = gap_within(result, start_s, end_s)
        if longest_s is None:
            continue
        median_s = float(np.median(result.chunk_gaps_s))
        limit_s = max(GAP_MEDIANS * median_s, GAP_FLOOR_S, GAP_BASELINE * baseline_s)
        verdicts.append(StreamVerdict(result.request.name, longest_s, limit_s, median_s))
    return tuple(verdicts)


def judge_gaps(
    results: Iterable[Result], start_s: float, end_s: float, baseline_s: float
) -> GapVerdict | None:
    """`judge_streams`, of which the stream with the largest gap relative to its limit; None when none ran."""
    verdicts = judge_streams(results, start_s, end_s, baseline_s)
    if not verdicts:
        return None
    worst = max(verdicts, key=lambda verdict: verdict.share)
    return GapVerdict(worst.longest_s, worst.limit_s, worst.median_s, streams=len(verdicts))
