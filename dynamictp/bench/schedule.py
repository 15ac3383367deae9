"""What to send and when, decided before the first byte leaves: an open-loop schedule.

Arrival times never depend on how the server answers, so a stall is measured, not omitted.
All times are seconds after the schedule's origin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a schedule.

    `prompt` is text or token ids; chat sends text as a single user message. `extra` holds
    further fields of the request's JSON body (`ignore_eos`, `priority`, …).
    """

    intended_s: float
    prompt: str | tuple[int, ...]
    max_tokens: int
    endpoint: Endpoint = "completions"
    name: str = ""
    temperature: float = 0.0
    seed: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.intended_s < 0:
            raise ValueError(f"intended_s is {self.intended_s}; a request can't be due before the origin")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; expected at least 1")
        if self.endpoint == "chat" and not isinstance(self.prompt, str):
            raise ValueError("a chat request needs text; send token ids to completions")

    def body(self, model: str, *, return_token_ids: bool) -> dict[str, object]:
        """The JSON body of the streamed request."""
        body: dict[str, object] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        if self.seed is not None:
            body["seed"] = self.seed
        if return_token_ids:
            body["return_token_ids"] = True
        body.update(self.extra)
        return body


@dataclass(frozen=True, slots=True)
class Bursts:
    """On/off traffic: `burst_per_s` during the first `burst_s` of each period, else `base_per_s`.

    `offset_s` moves the first burst later.
    """

    base_per_s: float
    burst_per_s: float
    period_s: float
    burst_s: float
    offset_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.burst_s <= self.period_s or self.period_s <= 0:
            raise ValueError(f"a burst of {self.burst_s} s does not fit a period of {self.period_s} s")
        if min(self.base_per_s, self.burst_per_s) < 0 or max(self.base_per_s, self.burst_per_s) == 0:
            raise ValueError("rates are requests per second, none negative and at least one above 0")

    def rate_at(self, t_s: float) -> float:
        """Requests per second at `t_s`."""
        return self.burst_per_s if (t_s - self.offset_s) % self.period_s < self.burst_s else self.base_per_s


def constant_arrivals(rate_per_s: float, duration_s: float) -> tuple[float, ...]:
    """Evenly spaced arrivals in [0, duration_s), the first at 0."""
    _check_rate(rate_per_s)
    return tuple(i / rate_per_s for i in range(int(np.ceil(rate_per_s * duration_s))))


def poisson_arrivals(rate_per_s: float, duration_s: float, seed: int) -> tuple[float, ...]:
    """Poisson arrivals in [0, duration_s): exponential gaps of mean 1/rate. Same seed, same times."""
    _check_rate(rate_per_s)
    rng = np.random.default_rng(seed)
    times: list[float] = []
    t = float(rng.exponential(1.0 / rate_per_s))
    while t < duration_s:
        times.append(t)
        t += float(rng.exponential(1.0 / rate_per_s))
    return tuple(times)


def burst_arrivals(bursts: Bursts, duration_s: float, seed: int) -> tuple[float, ...]:
    """Poisson arrivals whose rate follows `bursts`, by thinning (Lewis and Shedler, 1979)."""
    peak = max(bursts.base_per_s, bursts.burst_per_s)
    keep = np.random.default_rng((seed, 1))
    return tuple(
        t for t in poisson_arrivals(peak, duration_s, seed) if keep.random() * peak < bursts.rate_at(t)
    )


def together(
    prompts: Sequence[str | tuple[int, ...]], max_tokens: int, extra: Mapping[str, object] | None = None
) -> list[Request]:
    """All prompts at the origin at once: `len(prompts)` parallel streams."""
    return [
        Request(0.0, prompt, max_tokens, name=f"stream-{i}", extra=extra or {})
        for i, prompt in enumerate(prompts)
    ]


def _check_rate(rate_per_s: float) -> None:
    if not rate_per_s > 0:
        raise ValueError(f"rate is {rate_per_s} requests per second; expected more than 0")
