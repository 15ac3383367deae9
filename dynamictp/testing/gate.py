"""The gate: streams under random switches equal the undisturbed run, bit by bit. Workload and judgement.

Pure values. `gate_http` plays them on real processes over HTTP; the lock-step harness plays them in one
process. A random run is given by its seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LAYOUTS = ("tp1", "tp2", "tp3", "tp1+tp1", "tp2+tp1", "3*tp1")
"""Layouts of three devices among which the gate switches."""


@dataclass(frozen=True)
class GateRequest:
    """One request of the gate. `sampling` holds the API's fields; `seed` among them is always set."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: dict[str, Any]


@dataclass
class Stream:
    """What came out: token ids, each one's log-probability, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    tp_min: int = 0
    tp_max: int = 0
    handovers: int = 0
    recomputes: int = 0


@dataclass(frozen=True)
class Arrival:
    """One request of the disturbed run: which, when after the last one, and after how many tokens the
    client goes away (None: it stays)."""

    index: int
    gap_s: float
    cancel_after: int | None


def make_requests(
    seed: int, count: int, vocab: int, *, longest_prompt: int, longest_output: int
) -> list[GateRequest]:
    """Distinct requests: random prompts, a third of them with a shared beginning, all ways of sampling."""
    rng = random.Random(seed)
    first = 8
    prefixes = [
        tuple(
            rng.randrange(first, vocab) for _ in range(rng.randint(longest_prompt // 4, longest_prompt // 2))
        )
        for _ in range(4)
    ]
    requests = []
    for number in range(count):
        head = rng.choice(prefixes) if rng.random() < 0.33 else ()
        tail = rng.randint(1, max(2, longest_prompt - len(head)) // rng.choice((1, 2, 8)) or 1)
        prompt = head + tuple(rng.randrange(first, vocab) for _ in range(tail))
        sampling: dict[str, Any] = {"seed": seed * 1000 + number, "temperature": 0.0}
        if rng.random() < 0.5:
            sampling |= {"temperature": rng.choice((0.7, 1.0)), "top_p": rng.choice((1.0, 0.9))}
        if rng.random() < 0.2:
            sampling |= {"repetition_penalty": 1.1, "presence_penalty": 0.3}
        if rng.random() < 0.2:
            sampling |= {"top_k": 20, "min_p": 0.02}
        requests.append(GateRequest(prompt, rng.randint(1, longest_output), sampling))
    return requests


def make_arrivals(seed: int, count: int, requests: int, *, mean_gap_s: float) -> list[Arrival]:
    """Random arrivals in bursts; one client in six goes away in mid-stream."""
    rng = random.Random(seed + 1)
    arrivals = []
    for _ in range(count):
        gap = 0.0 if rng.random() < 0.5 else rng.expovariate(1 / (2 * mean_gap_s))
        cancel = rng.randint(0, 12) if rng.random() < 1 / 6 else None
        arrivals.append(Arrival(rng.randrange(requests), gap, cancel))
    return arrivals


def judge(reference: Stream, stream: Stream, cancelled: bool) -> str | None:
    """What is wrong with `stream`, or None. A cancelled stream must be a beginning of the reference."""
    if stream.error is not None:
        return f"failed: {stream.error}"
    difference = _difference("token", stream.tokens, reference.tokens) or _difference(
        "log-probability", stream.logprobs, reference.logprobs
    )
    if difference or cancelled:
        return difference
    if len(stream.tokens) != len(reference.tokens):
        return f"{len(stream.tokens)} tokens, undisturbed {len(reference.tokens)}"
    if stream.finish != reference.finish:
        return f"finish reason {stream.finish}, undisturbed {reference.finish}"
    return None


def _difference(name: str, got: Sequence[float], wanted: Sequence[float]) -> str | None:
    """Where `got` is no beginning of `wanted`."""
    for at, value in enumerate(got):
        if at >= len(wanted):
            return f"{name} {at} is {value!r}, the undisturbed run ended before"
        if value != wanted[at]:
            return f"{name} {at} is {value!r}, undisturbed {wanted[at]!r}"
    return None


@dataclass
class GateReport:
    """Outcome of one gate run."""

    seed: int
    switches: int = 0
    refused: int = 0
    """Switches answered with 409 because one was in flight."""
    streams: int = 0
    cancelled: int = 0
    tokens: int = 0
    handovers: int = 0
    recomputes: int = 0
    crossed: int = 0
    """Streams that were served at more than one degree."""
    ramped: int = 0
    """Switches whose ramp reached 100 %."""
    cancelled_switches: int = 0
    commit_ms: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What else the reader of a report should know."""

    def add(self, number: int, reference: Stream, stream: Stream, cancelled: bool) -> None:
        self.streams += 1
        self.cancelled += cancelled
        self.tokens += len(stream.tokens)
        self.handovers += stream.handovers
        self.recomputes += stream.recomputes
        self.crossed += stream.tp_min != stream.tp_max
        fault = judge(reference, stream, cancelled)
        if fault:
            self.faults.append(f"stream {number}: {fault}")

    def lines(self) -> Sequence[str]:
        commits = sorted(self.commit_ms)
        worst = f"{commits[-1]:.1f}" if commits else "-"
        middle = f"{commits[len(commits) // 2]:.1f}" if commits else "-"
        return (
            f"seed {self.seed}: {self.switches} switches ({self.refused} refused while one was in flight, "
            f"{self.ramped} with a ramp, {self.cancelled_switches} cancelled), "
            f"{self.streams} streams ({self.cancelled} cancelled), {self.tokens} tokens",
            f"handovers {self.handovers}, recomputes {self.recomputes}, "
            f"streams over several degrees {self.crossed}, commit ms median {middle} longest {worst}",
            f"faults {len(self.faults)}" + "".join(f"\n  {fault}" for fault in self.faults[:20]),
            *self.notes,
        )
