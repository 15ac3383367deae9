"""Queueing formulas in closed form. Pure. Times in one unit, loads in Erlang.

Erlang C and Pollaczek-Khinchine: Kleinrock, "Queueing Systems" I (1975). M/G/c by scaling M/M/c with the
variability of service: Lee and Longton (1959). The tail of the wait is taken as exponential, exact for
M/M/c and the heavy-traffic limit otherwise (Kingman 1962).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/c with `offered` = arrival rate × service time. 1 when ≥ c."""
    if offered >= servers:
        return 1.0
    if offered <= 0:
        return 0.0
    blocked = 1.0
    for k in range(1, servers + 1):  # Erlang B, by the stable recursion
        blocked = offered * blocked / (k + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


class Wait(msgspec.Struct, frozen=True):
    """An exponential tail: P(wait > t) = probability · exp(−t / scale)."""

    probability: float
    scale: float

    def beyond(self, t: float) -> float:
        if t < 0:
            return 1.0
        if self.probability <= 0 or self.scale <= 0:
            return 0.0
        return self.probability * math.exp(-t / self.scale) if math.isfinite(self.scale) else 1.0

    @property
    def mean(self) -> float:
        return self.probability * self.scale

    @property
    def variance(self) -> float:
        """E[W²] − E[W]² = 2ps² − (ps)²: with probability 1 − p there is no wait."""
        return self.probability * (2 - self.probability) * self.scale**2


NO_WAIT = Wait(0.0, 0.0)


def mgc_wait(rate: float, service: float, second_moment: float, servers: int) -> Wait:
    """Wait in M/G/c: `service` and `second_moment` are E[S] and E[S²]; infinite when the load is ≥ c.

    The mean of those who wait is E[S²]/(2E[S]) ÷ (c·(1−ρ)); with one server the mean over all arrivals is
    Pollaczek-Khinchine's λE[S²]/(2(1−ρ)).
    """
    load = rate * service / servers
    if load >= 1:
        return Wait(1.0, math.inf)
    if load <= 0:
        return NO_WAIT
    residual = second_moment / (2 * service)
    return Wait(erlang_c(servers, rate * service), residual / (servers * (1 - load)))


def quantile_of_sum(q: float, services: Sequence[tuple[float, float]], waits: Sequence[Wait]) -> float:
    """Quantile of wait + service; `services` are (probability, time), the waits' tails are added up."""
    if any(wait.probability > 0 and not math.isfinite(wait.scale) for wait in waits):
        return math.inf

    high = max(time for _, time in services) + sum(wait.scale for wait in waits)
    while probability_beyond(high, services, waits) > 1 - q:
        high *= 2
    return bisect(lambda t: probability_beyond(t, services, waits) > 1 - q, 0.0, high)


def probability_beyond(t: float, services: Sequence[tuple[float, float]], waits: Sequence[Wait]) -> float:
    """P(wait + service > t), for the service times and waits of `quantile_of_sum`."""
    return sum(weight * tail(t - time, waits) for weight, time in services)


def tail(t: float, waits: Sequence[Wait]) -> float:
    """P(sum of waits > t), by the union bound."""
    return 1.0 if t < 0 else min(1.0, sum(wait.beyond(t) for wait in waits))


def bisect(below: Callable[[float], bool], low: float, high: float, rounds: int = 24) -> float:
    """Where `below` turns from true to false between `low` and `high`."""
    for _ in range(rounds):
        middle = (low + high) / 2
        if below(middle):
            low = middle
        else:
            high = middle
    return high
