"""Lengths in tokens as distributions. Text forms: `64` (fixed), `100/250` (log-normal, mean and P95)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamictp.errors import ConfigError

Tokens = npt.NDArray[np.int64]

_Z95 = 1.6448536269514722
"""95th percentile of the standard normal distribution."""
MAX_P95_OVER_MEAN = math.exp(_Z95**2 / 2)
"""A log-normal's P95 is at most this multiple (3.87) of its mean."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal with the given mean and 95th percentile; fixed when they are equal."""

    mean: float
    p95: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.p95 < self.mean * MAX_P95_OVER_MEAN:
            raise ConfigError(
                f"no log-normal distribution has mean {self.mean:g} and P95 {self.p95:g}: the mean "
                f"must be at least 1, and the P95 between it and {MAX_P95_OVER_MEAN:.2f} times as much"
            )

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`64` or `100/250`. Raises ConfigError."""
        mean, slash, p95 = text.partition("/")
        try:
            return cls(float(mean), float(p95 if slash else mean))
        except ValueError as error:
            raise ConfigError(f"'{text}' is no length: expected tokens or MEAN/P95, as in 100/250") from error

    def __str__(self) -> str:
        return f"{self.mean:g}" if self.mean == self.p95 else f"{self.mean:g}/{self.p95:g}"

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm.

        From ln P95 - ln mean = z·sigma - sigma²/2; the smaller root is the less extreme distribution.
        """
        return _Z95 - math.sqrt(_Z95**2 - 2 * math.log(self.p95 / self.mean))

    def sample(self, rng: np.random.Generator, count: int, scale: float = 1.0) -> Tokens:
        """`count` lengths in tokens, each at least 1; `scale` multiplies the distribution."""
        mu = math.log(self.mean * scale) - self.sigma**2 / 2
        return np.maximum(np.rint(rng.lognormal(mu, self.sigma, count)), 1).astype(np.int64)
