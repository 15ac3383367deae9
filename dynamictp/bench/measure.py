"""Runs to figures: percentiles with counts and intervals, goodput, throughput, validity. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamictp.bench.record import Run, Slo
from dynamictp.bench.result import Result

# Below this many samples a P99 is an anecdote.
P99_SAMPLES = 100
DISPATCH_P50_LIMIT_S = 0.010
DELIVERED_LIMIT = 0.99

RESAMPLES = 4000
INTERVAL = (2.5, 97.5)
_Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with its 95 % interval, in the samples' unit: bootstrap of percentiles, Wilson's of shares."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Percentiles of `count` samples. `p99` is None below 100 samples."""

    count: int
    mean: float
    p50: Figure
    p90: Figure
    p95: Figure
    p99: Figure | None
    max: float


@dataclass(frozen=True, slots=True)
class Group:
    """The figures of some requests of a run: all, or a class's, or a tenant's. Seconds and requests.

    `due` = finished + failed + cut. Latencies are of finished requests, `longest_gap_s` of any stream.
    `goodput` is the share of finished and failed requests that finished within both targets; rates are per
    second of the load: tokens of prompts whose first token came, and output tokens, within it.
    """

    name: str
    due: int
    finished: int
    failed: int
    cut: int
    met: int
    failures: dict[str, int]
    goodput: Figure | None
    goodput_per_s: float
    ttft: Estimate | None
    ttft_from_sent: Estimate | None
    tpot: Estimate | None
    itl: Estimate | None
    e2e: Estimate | None
    longest_gap_s: float | None
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether the client played what was planned. `delivered`: rate sent ÷ rate scheduled (open loops).

    `exact_prompts` of `counted_prompts` had, by the server's usage, the planned number of tokens.
    """

    dispatch: Estimate | None
    delivered: float
    cpu_share: float
    exact_prompts: int
    counted_prompts: int
    problems: tuple[str, ...]

    @property
    def valid(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run: everything together, then by class and by tenant."""

    label: str
    validity: Validity
    total: Group
    classes: tuple[Group, ...]
    tenants: tuple[Group, ...]


def estimate(samples: Iterable[float | None], *, intervals: bool = True) -> Estimate | None:
    """Percentiles of the samples that are there; None when there is none.

    Without `intervals` (samples that depend on each other, as the tokens of one stream do) each interval
    is the value itself.
    """
    values = np.sort(np.array([sample for sample in samples if sample is not None], dtype=np.float64))
    if not values.size:
        return None
    p50, p90, p95, p99 = (_percentile(values, q, intervals) for q in (50, 90, 95, 99))
    enough = values.size >= P99_SAMPLES
    return Estimate(
        int(values.size), float(values.mean()), p50, p90, p95, p99 if enough else None, float(values[-1])
    )


def _percentile(ordered: npt.NDArray[np.float64], q: float, interval: bool) -> Figure:
    """The linear-interpolated percentile and the bootstrap interval of its order statistic.

    The k-th smallest of n draws with replacement is `ordered[floor(n·U)]` with U the k-th smallest of n
    uniforms, which is Beta(k, n - k + 1): the bootstrap without drawing the samples.
    """
    value = float(np.percentile(ordered, q))
    if not interval or ordered.size == 1:
        return Figure(value, value, value)
    n = ordered.size
    k = min(max(round(q / 100 * (n - 1)) + 1, 1), n)
    uniforms = np.random.default_rng(k).beta(k, n - k + 1, RESAMPLES)
    drawn = ordered[np.minimum((n * uniforms).astype(np.int64), n - 1)]
    low, high = np.percentile(drawn, INTERVAL)
    return Figure(value, min(float(low), value), max(float(high), value))


def share(part: int, whole: int) -> Figure | None:
    """A share with its score interval (Wilson, 1927); None of nothing.

    Drawing again from requests that all were good would say that no other is possible.
    """
    if not whole:
        return None
    value = part / whole
    centre = (value + _Z**2 / (2 * whole)) / (1 + _Z**2 / whole)
    spread = _Z / (1 + _Z**2 / whole) * math.sqrt(value * (1 - value) / whole + _Z**2 / (4 * whole**2))
    return Figure(value, min(max(centre - spread, 0.0), value), max(min(centre + spread, 1.0), value))


def group_figures(name: str, results: Sequence[Result], slo: Slo, load_s: float) -> Group:
    """The figures of `results` over a load of `load_s` seconds."""
    finished = [result for result in results if result.failure is None]
    cut = sum(result.cut for result in results)
    failed = len(results) - len(finished) - cut
    met = sum(slo.met(result) for result in finished)
    failures = Counter(str(r.failure.kind) for r in results if r.failure is not None and not r.cut)
    prefilled = sum(
        prompt_tokens(r) for r in results if r.first_token_s is not None and r.first_token_s <= load_s
    )
    decoded = sum(
        tokens
        for result in results
        for at_s, tokens in zip(result.chunk_s, result.chunk_tokens, strict=True)
        if at_s <= load_s
    )
    gaps = (gap for result in results for gap in result.chunk_gaps_s)
    return Group(
        name=name,
        due=len(results),
        finished=len(finished),
        failed=failed,
        cut=cut,
        met=met,
        failures=dict(failures),
        goodput=share(met, len(finished) + failed),
        goodput_per_s=met / load_s,
        ttft=estimate(result.ttft_s for result in finished),
        ttft_from_sent=estimate(result.ttft_from_sent_s for result in finished),
        tpot=estimate(result.tpot_s for result in finished),
        itl=estimate((gap for result in finished for gap in result.itl_s), intervals=False),
        e2e=estimate(result.e2e_s for result in finished),
        longest_gap_s=max(gaps, default=None),
        prefill_tokens_per_s=prefilled / load_s,
        decode_tokens_per_s=decoded / load_s,
    )


def run_figures(run: Run, slo: Slo) -> RunFigures:
    """All figures of one run."""

    def grouped(key: Callable[[Result], str]) -> tuple[Group, ...]:
        names = sorted({key(result) for result in run.results} - {""})
        members = ([r for r in run.results if key(r) == name] for name in names)
        return tuple(
            group_figures(name, chosen, slo, run.load_s) for name, chosen in zip(names, members, strict=True)
        )

    return RunFigures(
        label=run.label,
        validity=judge(run),
        total=group_figures("all", run.results, slo, run.load_s),
        classes=grouped(lambda result: result.request.traffic_class),
        tenants=grouped(lambda result: result.request.tenant),
    )


def judge(run: Run) -> Validity:
    """Whether the run says something about the server rather than about the client."""
    delays = estimate(result.dispatch_delay_s for result in run.results)
    openings = [result for result in run.results if not result.request.follows]
    delivered = 1.0 if run.users else _delivered(openings)
    counted = [r for r in run.results if r.request.prompt_tokens and r.prompt_tokens is not None]
    problems: list[str] = []
    if delays is None:
        problems.append("no request was sent")
    elif delays.p50.value > DISPATCH_P50_LIMIT_S:
        problems.append(
            f"the client fell behind: half of the requests left {delays.p50.value * 1e3:.0f} ms late"
        )
    if delivered < DELIVERED_LIMIT:
        problems.append(f"only {delivered:.1%} of the scheduled rate was delivered")
    return Validity(
        dispatch=delays,
        delivered=delivered,
        cpu_share=run.client.cpu_share,
        exact_prompts=sum(result.prompt_tokens == result.request.prompt_tokens for result in counted),
        counted_prompts=len(counted),
        problems=tuple(problems),
    )


def prompt_tokens(result: Result) -> int:
    """By the server's usage, else as planned."""
    return result.prompt_tokens if result.prompt_tokens is not None else result.request.prompt_tokens or 0


def _delivered(results: Sequence[Result]) -> float:
    """Scheduled over actual time from the origin to the last request."""
    if not results:
        return 0.0
    due_s = max(result.intended_s for result in results)
    sent_s = max(result.sent_s for result in results)
    # A tenth of a second of lateness says nothing about the rate of a schedule that short.
    return (due_s + 0.1) / max(sent_s, due_s + 0.1)
