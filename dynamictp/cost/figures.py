"""Numbers that know where they came from, and predictions that know how sure they are. Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal

import msgspec

Provenance = Literal["measured", "data sheet", "assumed", "derived"]


class Corner(Enum):
    """Where in their ranges all uncertain figures are taken at once.

    `IDEAL` is the physical limit (data-sheet peaks, no overhead) and gives lower bounds of time; `FAST` and
    `SLOW` bound what is usual and give the band; `EXPECTED` gives the estimate.
    """

    IDEAL = "ideal"
    FAST = "fast"
    EXPECTED = "expected"
    SLOW = "slow"


class Figure(msgspec.Struct, frozen=True):
    """One input number. `better` and `worse` bound what is usual, `ideal` is the physical limit.

    Better means faster, whether the number is a rate or a time; without a range all corners are `value`.
    """

    value: float
    provenance: Provenance
    source: str
    better: float | None = None
    worse: float | None = None
    ideal: float | None = None

    def at(self, corner: Corner) -> float:
        """The number to use in that corner."""
        if corner is Corner.EXPECTED:
            return self.value
        chosen = self.better if corner is Corner.FAST else self.worse if corner is Corner.SLOW else self.ideal
        return self.value if chosen is None else chosen


class Prediction(msgspec.Struct, frozen=True):
    """A predicted time, never shown alone: `bound` ≤ `low` ≤ `estimate` ≤ `high`, all in one unit.

    `bound` can't be beaten by this hardware; the band `low`…`high` is where the truth is expected.
    `math.inf` says that the load is beyond what the configuration carries.
    """

    bound: float
    low: float
    estimate: float
    high: float

    @classmethod
    def of(cls, evaluate: Callable[[Corner], float]) -> Prediction:
        """The same formula at the four corners, in order even where a formula is not monotone."""
        estimate = evaluate(Corner.EXPECTED)
        low = min(evaluate(Corner.FAST), estimate)
        return cls(
            bound=min(evaluate(Corner.IDEAL), low),
            low=low,
            estimate=estimate,
            high=max(evaluate(Corner.SLOW), estimate),
        )

    @classmethod
    def rate(cls, evaluate: Callable[[Corner], float]) -> Prediction:
        """Of a rate, where faster is more: `bound` is then the ceiling and ≥ `high` ≥ `estimate` ≥ `low`."""
        estimate = evaluate(Corner.EXPECTED)
        high = max(evaluate(Corner.FAST), estimate)
        return cls(
            bound=max(evaluate(Corner.IDEAL), high),
            low=min(evaluate(Corner.SLOW), estimate),
            estimate=estimate,
            high=high,
        )

    def scaled(self, factor: float) -> Prediction:
        """In another unit."""
        return Prediction(self.bound * factor, self.low * factor, self.estimate * factor, self.high * factor)

    def contains(self, measured: float) -> bool:
        return self.low <= measured <= self.high
