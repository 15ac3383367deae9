"""What a study of switches plays: rounds, tours through the layouts, and a schedule per round. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dynamictp.bench.prompts import exact_prompts
from dynamictp.bench.schedule import Request
from dynamictp.bench.workload import arrivals

CYCLE = ("tp2", "tp1+tp1", "tp1", "tp1+tp1", "tp2", "tp1")
"""From `tp1` on, through every change between two of the three layouts once."""
WANTED_SWITCHES = 200
"""Of the full study: fewer say little about a 99th percentile."""
LAYOUTS = ("tp1", "tp2", "tp1+tp1")
LOAD_SHARE = 0.6
"""Of the requests that `tp1` finishes per second when it never runs out of them."""
PROMPT_TOKENS = 32
LONG_TOKENS, SHORT_TOKENS = 96, 16
LONG_SHARE = 0.3
"""Long outputs are the streams that a switch meets; many short ones make a first request come soon."""

_ROUND_SWITCHES = 24
_WHOLE = {"ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Tour:
    """One round: the layout at its start, and those that it goes through."""

    number: int
    start: str
    layouts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Study:
    """`switches` at distances of `every_s`; each round's schedule is also played without a switch on each of
    `controls`. `saturated_per_s`: what `tp1` finished when it never ran out of requests, 0 when the rate was
    given.
    """

    switches: int = WANTED_SWITCHES
    every_s: float = 2.0
    controls: tuple[str, ...] = LAYOUTS
    rate_per_s: float = 0.0
    saturated_per_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.switches < 1 or self.every_s <= 0:
            raise ValueError(f"{self.switches} switches every {self.every_s:g} s; expected at least one")
        if self.rate_per_s < 0:
            raise ValueError(f"a rate of {self.rate_per_s:g} requests/s; expected more than 0")
        if not self.controls:
            raise ValueError("without a control there is nothing to hold the gaps against")

    @property
    def tours(self) -> tuple[Tour, ...]:
        """About equal rounds, each short enough that its plays see the machine in one state."""
        rounds = -(-self.switches // _ROUND_SWITCHES)
        bounds = [self.switches * i // rounds for i in range(rounds + 1)]
        stops = [CYCLE[i % len(CYCLE)] for i in range(-1, self.switches)]
        return tuple(
            Tour(number, stops[first], tuple(stops[first + 1 : last + 1]))
            for number, (first, last) in enumerate(pairwise(bounds))
        )

    def load_s(self, tour: Tour) -> float:
        """Length of a round's schedule: a switch every `every_s`, and as long before and after."""
        return self.every_s * (len(tour.layouts) + 1)

    @property
    def seconds(self) -> float:
        """All plays together, without starts, probes and the last streams' ends."""
        return sum(self.load_s(tour) for tour in self.tours) * (1 + len(self.controls))


def schedule_of(study: Study, tour: Tour, ids: Sequence[int]) -> list[Request]:
    """Poisson arrivals of a round, prompts cut from `ids`. Same study and round, same schedule."""
    rng = np.random.default_rng((study.seed, tour.number))
    curve = arrivals.constant_rate(study.rate_per_s, study.load_s(tour))
    times = arrivals.draw(curve, 1.0, rng)
    return _requests(times, f"r{tour.number}", ids, rng)


def endless(count: int, ids: Sequence[int]) -> list[Request]:
    """`count` requests of the same mix, for users who never pause."""
    return _requests([0.0] * count, "full", ids, np.random.default_rng(count))


def _requests(
    times: Sequence[float], name: str, ids: Sequence[int], rng: np.random.Generator
) -> list[Request]:
    requests = []
    for i, at_s in enumerate(times):
        (prompt,) = exact_prompts(tuple(ids), PROMPT_TOKENS, 1, rng)
        tokens = LONG_TOKENS if rng.random() < LONG_SHARE else SHORT_TOKENS
        requests.append(Request(at_s, prompt, tokens, name=f"{name}-{i}", extra=_WHOLE))
    return requests
