"""Arrival processes: a rate over time, and how bursty arrivals are around it. Pure.

Every open-loop process is one construction: a renewal process of unit rate (gaps with a coefficient of
variation, Poisson at 1) in *operational* time, mapped through the inverse of the cumulated rate
(Cinlar, Introduction to Stochastic Processes, 1975, section 4.7). So bursts combine with any rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dynamictp.errors import ConfigError

Seconds = npt.NDArray[np.float64]

POINTS_PER_DAY = 48


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Requests per second over time, linear between points; two points at one time are a step.

    `times_s` starts at 0 and never falls; the curve ends at its last point.
    """

    times_s: tuple[float, ...]
    rates_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.rates_per_s) or len(self.times_s) < 2:
            raise ConfigError("a rate over time needs two points or more, each with a rate")
        if self.times_s[0] != 0 or any(b < a for a, b in pairwise(self.times_s)):
            raise ConfigError(f"times of a rate must start at 0 and never fall, got {self.times_s[:5]}")
        if min(self.rates_per_s) < 0 or not self.expected > 0:
            raise ConfigError("rates are requests per second, none negative and at least one above 0")

    @property
    def duration_s(self) -> float:
        return self.times_s[-1]

    @property
    def peak_per_s(self) -> float:
        return max(self.rates_per_s)

    @property
    def expected(self) -> float:
        """Requests to expect over the whole curve."""
        return float(np.trapezoid(self.rates_per_s, self.times_s))

    def rate_at(self, t_s: float) -> float:
        """Requests per second at `t_s`; at a step, the rate after it."""
        i = int(np.searchsorted(self.times_s, t_s, side="right")) - 1
        if i + 1 >= len(self.times_s):
            return self.rates_per_s[-1]
        t0, t1 = self.times_s[i : i + 2]
        r0, r1 = self.rates_per_s[i : i + 2]
        return r0 + (r1 - r0) * (t_s - t0) / (t1 - t0)

    def rates_at(self, times_s: Sequence[float]) -> Seconds:
        """`rate_at` of many times."""
        times, rates = np.array(self.times_s), np.array(self.rates_per_s)
        asked = np.array(times_s)
        i = np.searchsorted(times, asked, side="right") - 1
        inside = np.minimum(i, len(times) - 2)
        t0, t1, r0, r1 = times[inside], times[inside + 1], rates[inside], rates[inside + 1]
        with np.errstate(invalid="ignore", divide="ignore"):
            found = r0 + (r1 - r0) * (asked - t0) / (t1 - t0)
        return np.asarray(np.where(i + 1 >= len(times), rates[-1], found), dtype=np.float64)

    def when(self, requests: Seconds) -> Seconds:
        """The times at which the cumulated rate reaches `requests`: its exact inverse."""
        times, rates = np.array(self.times_s), np.array(self.rates_per_s)
        spans = np.diff(times)
        reached = np.concatenate([[0.0], np.cumsum(spans * (rates[1:] + rates[:-1]) / 2)])
        i = np.clip(np.searchsorted(reached, requests, side="right") - 1, 0, len(spans) - 1)
        due = requests - reached[i]
        with np.errstate(invalid="ignore", divide="ignore"):
            slopes = np.where(spans[i] > 0, (rates[i + 1] - rates[i]) / spans[i], 0.0)
            # The root of slope·t²/2 + rate·t = due, in the form that holds for a slope of 0 too.
            root = rates[i] + np.sqrt(np.maximum(rates[i] ** 2 + 2 * slopes * due, 0.0))
            steps = np.where(due > 0, 2 * due / root, 0.0)
        return times[i] + np.minimum(steps, spans[i])

    def part(self, start_s: float, end_s: float) -> RateCurve | None:
        """What lies between the two times, as a curve from 0 on; None where nothing comes."""
        inside = [(t - start_s, r) for t, r in zip(self.times_s, self.rates_per_s, strict=True)
                  if start_s < t < end_s]  # fmt: skip
        before_end = self.rate_at(math.nextafter(end_s, 0.0))
        points = [(0.0, self.rate_at(start_s)), *inside, (end_s - start_s, before_end)]
        if not any(rate > 0 for _, rate in points):
            return None
        return RateCurve(tuple(t for t, _ in points), tuple(rate for _, rate in points))

    def stretched(self, speed: float, rate: float = 1.0) -> RateCurve:
        """Played `speed` times as fast, its rates multiplied by `rate`."""
        return RateCurve(
            tuple(t / speed for t in self.times_s), tuple(value * rate for value in self.rates_per_s)
        )

    def until(self, duration_s: float) -> RateCurve:
        """The first `duration_s`; repeated from its start where it is shorter than that."""
        times, rates = list(self.times_s), list(self.rates_per_s)
        while times[-1] < duration_s:
            last_s = times[-1]
            times += [last_s + t for t in self.times_s]
            rates += self.rates_per_s
        kept = [i for i, t in enumerate(times) if t < duration_s]
        before_end = RateCurve(tuple(times), tuple(rates)).rate_at(math.nextafter(duration_s, 0.0))
        return RateCurve((*(times[i] for i in kept), duration_s), (*(rates[i] for i in kept), before_end))


def constant_rate(rate_per_s: float, duration_s: float) -> RateCurve:
    return RateCurve((0.0, duration_s), (rate_per_s, rate_per_s))


def steps(levels: Sequence[tuple[float, float]], duration_s: float) -> RateCurve:
    """`levels`: (from when in seconds, requests per second), the first at 0."""
    if not levels:
        raise ConfigError("steps need at least one level, as in steps:0=1,30=5")
    times: list[float] = []
    rates: list[float] = []
    for (start_s, rate), end_s in zip(levels, [*(t for t, _ in levels[1:]), np.inf], strict=True):
        if start_s >= duration_s:
            break
        times += [start_s, min(end_s, duration_s)]
        rates += [rate, rate]
    return RateCurve(tuple(times), tuple(rates))


def ramp(points: Sequence[tuple[float, float]], duration_s: float) -> RateCurve:
    """Linear between (seconds, requests per second) points; the last rate is held to the end."""
    if not points:
        raise ConfigError("a ramp needs points, as in ramp:0=1,60=8")
    times, rates = [t for t, _ in points], [r for _, r in points]
    if times[-1] < duration_s:
        times, rates = [*times, duration_s], [*rates, rates[-1]]
    return RateCurve(tuple(times), tuple(rates)).until(duration_s)


def on_off(
    *,
    base_per_s: float,
    burst_per_s: float,
    period_s: float,
    burst_s: float,
    duration_s: float,
    offset_s: float = 0.0,
) -> RateCurve:
    """`burst_per_s` during the first `burst_s` of each period, else `base_per_s`.

    `offset_s` moves the first burst later (or, negative, cuts into it).
    """
    if not 0 < burst_s < period_s:
        raise ConfigError(f"a burst of {burst_s:g} s does not fit a period of {period_s:g} s")
    edges = [(0.0, burst_per_s if -offset_s % period_s < burst_s else base_per_s)]
    first = int(np.floor(-offset_s / period_s))
    for k in range(first, int(np.ceil((duration_s - offset_s) / period_s)) + 1):
        start_s = k * period_s + offset_s
        edges += [(start_s, burst_per_s), (start_s + burst_s, base_per_s)]
    return steps([edges[0], *((t, r) for t, r in edges[1:] if t > 0)], duration_s)


def spikes(
    base_per_s: float, peak_per_s: float, every_s: float, decay_s: float, duration_s: float
) -> RateCurve:
    """Every `every_s`, from half of it on, a jump to the peak that decays linearly over `decay_s`."""
    if not 0 < decay_s <= every_s:
        raise ConfigError(f"a spike of {decay_s:g} s does not fit a period of {every_s:g} s")
    times, rates = [0.0], [base_per_s]
    start_s = every_s / 2
    while start_s < duration_s:
        times += [start_s, start_s, start_s + decay_s]
        rates += [base_per_s, peak_per_s, base_per_s]
        start_s += every_s
    return ramp(list(zip(times, rates, strict=True)), duration_s)


def day_night(mean_per_s: float, swing: float, day_s: float, duration_s: float) -> RateCurve:
    """A sine of one `day_s`, from its trough at 0: mean·(1 - swing) to mean·(1 + swing)."""
    if not 0 <= swing <= 1:
        raise ConfigError(f"a swing of {swing:g} makes rates negative; expected 0 to 1")
    count = max(int(np.ceil(duration_s / day_s * POINTS_PER_DAY)), 2)
    times = np.linspace(0.0, duration_s, count + 1)
    rates = mean_per_s * (1 - swing * np.cos(2 * np.pi * times / day_s))
    return RateCurve(tuple(times.tolist()), tuple(rates.tolist()))


def with_spikes(curve: RateCurve, peak_per_s: float, every_s: float, decay_s: float) -> RateCurve:
    """`curve` with a jump to the peak every `every_s`, from half of it on, that fades into the curve over
    `decay_s`."""
    if not 0 < decay_s <= every_s:
        raise ConfigError(f"a spike of {decay_s:g} s does not fit a period of {every_s:g} s")
    points = list(zip(curve.times_s, curve.rates_per_s, strict=True))
    start_s = every_s / 2
    while start_s < curve.duration_s:
        end_s = min(start_s + decay_s, curve.duration_s)
        before, after = curve.rate_at(start_s), curve.rate_at(end_s)
        points = [point for point in points if not start_s <= point[0] <= end_s]
        points += [(start_s, before), (start_s, max(peak_per_s, before)), (end_s, after)]
        start_s += every_s
    points.sort(key=lambda point: point[0])
    return RateCurve(tuple(t for t, _ in points), tuple(rate for _, rate in points))


def draw(curve: RateCurve, cv: float, rng: np.random.Generator) -> tuple[float, ...]:
    """Arrival times in [0, duration), in order. Gaps have the coefficient of variation `cv` in
    operational time: 0 even, 1 Poisson, above 1 bursts (Gamma gaps).
    """
    if cv < 0:
        raise ConfigError(f"a coefficient of variation is not negative, got {cv:g}")
    expected = curve.expected
    if cv == 0:
        marks = np.arange(0.0, expected - 1e-9)
    else:
        shape = 1 / cv**2
        # The first gap is seen from a random moment inside it (length-biased, cut uniformly); a full gap
        # would start the process at an arrival and shift its mean rate.
        first = rng.random() * rng.gamma(shape + 1, 1 / shape)
        gaps: list[Seconds] = [np.array([first])]
        reached = first
        while reached < expected:
            block = rng.gamma(shape, 1 / shape, 64 + int(expected - reached))
            gaps.append(block)
            reached += float(block.sum())
        marks = np.cumsum(np.concatenate(gaps))
        marks = marks[marks < expected]
    times = curve.when(marks)
    return tuple(times[times < curve.duration_s].tolist())
