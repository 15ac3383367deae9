"""Whether what processes hold grows: a robust line through samples, against stated bounds. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Sample = tuple[float, Mapping[str, float]]
"""When, and what was held by name: `server: descriptors`."""
WHOLE = 0.9
"""A series counts when it is in so many of the samples: processes come and go."""


@dataclass(frozen=True)
class Bound:
    """The most that a quantity may rise, as seen under load: an amount, and a share of its level."""

    amount: float
    share: float = 0.0

    def of(self, level: float) -> float:
        return self.amount + self.share * level


@dataclass(frozen=True)
class Trend:
    """How one quantity moved over a time. `growth` is the slope of its line times that time."""

    name: str
    first: float
    median: float
    last: float
    growth: float
    bound: float

    @property
    def grows(self) -> bool:
        return self.growth > self.bound

    def line(self) -> str:
        verdict = "GROWS" if self.grows else "flat"
        return (
            f"{self.name:<34} {self.first:9.1f} {self.median:9.1f} {self.last:9.1f}   "
            f"{self.growth:+8.2f} (bound {self.bound:.2f}) {verdict}"
        )


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil–Sen: the median of the slopes of all pairs (Sen, 1968), which a few outliers do not move. 0 for
    less than two points.
    """
    slopes = [
        (y2 - y1) / (x2 - x1)
        for number, (x1, y1) in enumerate(points)
        for x2, y2 in points[number + 1 :]
        if x2 > x1
    ]
    return statistics.median(slopes) if slopes else 0.0


def trends(samples: Sequence[Sample], bounds: Mapping[str, Bound]) -> list[Trend]:
    """The trend of every series that is there all the time. `bounds` by the name's part after the colon;
    a quantity without one is not judged and not listed.
    """
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for at_s, values in samples:
        for name, value in values.items():
            series[name].append((at_s, value))
    found = []
    for name, points in sorted(series.items()):
        bound = bounds.get(name.partition(": ")[2])
        if bound is None or len(points) < WHOLE * len(samples) or len(points) < 2:
            continue
        values_only = [value for _, value in points]
        median = statistics.median(values_only)
        growth = slope(points) * (points[-1][0] - points[0][0])
        found.append(Trend(name, values_only[0], median, values_only[-1], growth, bound.of(median)))
    return found
