"""Metric families of the Prometheus format, made from plain numbers at scrape time.

Bucket bounds are those that OpenTelemetry recommends for generative AI servers (semantic conventions,
`gen_ai.server.*` and `gen_ai.client.token.usage`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
E2E_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
PHASE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)


class Histogram:
    """Counts per bucket, upper bounds inclusive."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations per bucket; the last one is beyond all bounds."""
        return tuple(self._counts)

    @property
    def bounds(self) -> Sequence[float]:
        return self._bounds

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """`(upper bound, observations up to it)` pairs and the sum, as the exposition format wants them."""
        total = 0
        pairs: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            pairs.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        return pairs, self._sum


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the observations are, by linear interpolation within the bucket, as
    Prometheus' `histogram_quantile` does; the last bound for what lies beyond it. None without observations.
    """
    total = sum(counts)
    if total <= 0:
        return None
    rank, below = share * total, 0.0
    for index, count in enumerate(counts[: len(bounds)]):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (rank - below) / count
        below += count
    return bounds[-1]


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge with one label."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """`name` without `_total`."""
    return CounterMetricFamily(name, text, value=value)


def counters(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """A counter with labels; `name` without `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(list(key), value)
    return family


def histogram(name: str, text: str, values: Histogram) -> Metric:
    buckets, total = values.cumulative()
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total)


def histograms(name: str, text: str, label: str, values: Mapping[str, Histogram]) -> Metric:
    """A histogram with one label."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for key, one in values.items():
        buckets, total = one.cumulative()
        family.add_metric([key], buckets, total)
    return family
