"""Figures of a run whose requests are too many to keep: the same groups from streaming digests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from dynamictp.bench.measure import INTERVAL, P99_SAMPLES, RESAMPLES, Estimate, Figure, Group, share

_WIDTH = 0.005
"""Buckets are so wide, as a fraction of their value: a quantile is right to a quarter of a percent."""
_LEAST = 1e-6


class Digest(msgspec.Struct):
    """A histogram over the logarithm of the samples (as DDSketch, Masson et al., VLDB 2019): bounded memory,
    a bounded relative error of every quantile, and sums of digests are digests. Owner of its buckets."""

    buckets: dict[int, int] = {}
    """Bucket → samples in it."""
    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        bucket = int(math.log(max(value, _LEAST)) // _WIDTH)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + times
        self.count += times
        self.total += value * times
        self.most = max(self.most, value)

    def merge(self, other: Digest) -> None:
        for bucket, times in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + times
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """Values below which those shares of the samples lie. Raises ValueError without samples."""
        if not self.count:
            raise ValueError("a digest without samples has no quantiles")
        keys = sorted(self.buckets)
        reached = np.cumsum([self.buckets[key] for key in keys])
        ranks = np.array(list(shares)) * (self.count - 1)
        found = np.minimum(np.searchsorted(reached, ranks, side="right"), len(keys) - 1)
        return [min(math.exp((keys[i] + 0.5) * _WIDTH), self.most) for i in found]

    def curve(self) -> tuple[list[float], list[float]]:
        """(values ascending, share of the samples at or below)."""
        keys = sorted(self.buckets)
        reached = np.cumsum([self.buckets[key] for key in keys])
        values = [math.exp((key + 1) * _WIDTH) for key in keys]
        return values, (reached / max(self.count, 1)).tolist()

    def estimate(self, *, intervals: bool = True) -> Estimate | None:
        """As `measure.estimate` of the samples; None when there is none."""
        if not self.count:
            return None
        p50, p90, p95, p99 = (self._percentile(q, intervals) for q in (50, 90, 95, 99))
        enough = self.count >= P99_SAMPLES
        mean = self.total / self.count
        return Estimate(self.count, mean, p50, p90, p95, p99 if enough else None, self.most)

    def _percentile(self, q: float, interval: bool) -> Figure:
        """The percentile and the bootstrap interval of its order statistic, see `measure`."""
        n = self.count
        (value,) = self.quantiles([q / 100])
        if not interval or n == 1:
            return Figure(value, value, value)
        k = min(max(round(q / 100 * (n - 1)) + 1, 1), n)
        uniforms = np.random.default_rng(k).beta(k, n - k + 1, RESAMPLES)
        low, high = self.quantiles(np.percentile(uniforms, INTERVAL).tolist())
        return Figure(value, min(low, value), max(high, value))


class Tally(msgspec.Struct):
    """Requests of one group, counted one by one. Owner of its digests. Seconds and tokens."""

    due: int = 0
    finished: int = 0
    met: int = 0
    failures: dict[str, int] = {}
    prefilled: int = 0
    decoded: int = 0
    ttft: Digest = msgspec.field(default_factory=Digest)
    tpot: Digest = msgspec.field(default_factory=Digest)
    itl: Digest = msgspec.field(default_factory=Digest)
    e2e: Digest = msgspec.field(default_factory=Digest)

    def add(
        self, *, prompt: int, output: int, ttft_s: float, tpot_s: float | None, e2e_s: float, met: bool
    ) -> None:
        """A request finished; one token has no TPOT."""
        self.due += 1
        self.finished += 1
        self.met += met
        self.prefilled += prompt
        self.decoded += output
        self.ttft.add(ttft_s)
        self.e2e.add(e2e_s)
        if tpot_s is not None:
            self.tpot.add(tpot_s)

    def fail(self, kind: str) -> None:
        """A request did not: it counts against the targets."""
        self.due += 1
        self.failures[kind] = self.failures.get(kind, 0) + 1

    def merge(self, other: Tally) -> None:
        self.due += other.due
        self.finished += other.finished
        self.met += other.met
        self.prefilled += other.prefilled
        self.decoded += other.decoded
        self.failures = dict(Counter(self.failures) + Counter(other.failures))
        for name in ("ttft", "tpot", "itl", "e2e"):
            getattr(self, name).merge(getattr(other, name))

    def group(self, name: str, load_s: float) -> Group:
        """The figures over a load of `load_s` seconds."""
        failed = sum(self.failures.values())
        return Group(
            name=name,
            due=self.due,
            finished=self.finished,
            failed=failed,
            cut=0,
            met=self.met,
            failures=dict(self.failures),
            goodput=share(self.met, self.finished + failed),
            goodput_per_s=self.met / load_s,
            ttft=self.ttft.estimate(),
            ttft_from_sent=None,
            tpot=self.tpot.estimate(),
            itl=self.itl.estimate(intervals=False),
            e2e=self.e2e.estimate(),
            longest_gap_s=None,
            prefill_tokens_per_s=self.prefilled / load_s,
            decode_tokens_per_s=self.decoded / load_s,
        )
