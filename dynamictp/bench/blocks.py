"""The measurements behind the project's figures, each through HTTP as a client sees it.

A block is measured between two looks at the memory state; when the state flipped meanwhile, the
block is measured once more, since figures of different states don't compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from dynamictp.bench.admin import Admin, Switch
from dynamictp.bench.client import Client, run_lowered
from dynamictp.bench.decode_split import DecodeSplit, decode_split, engine_us, settled_metrics
from dynamictp.bench.machine import MemoryState
from dynamictp.bench.player import run_schedule
from dynamictp.bench.prompts import LONG_TEXT, exact_prompts
from dynamictp.bench.result import Result
from dynamictp.bench.rival import Rival
from dynamictp.bench.schedule import Request, together
from dynamictp.bench.stats import (
    GapVerdict,
    Quantiles,
    judge_gaps,
    longest_gap,
    quantiles,
    steady_tokens_per_s,
    summarise,
)
from dynamictp.bench.switching import play_switches
from dynamictp.bench.workload import arrivals
from dynamictp.clock import SystemClock
from dynamictp.errors import FatalError

T = TypeVar("T")

LAYOUTS = ("tp1", "tp2")
DEGREES = {"tp1": 1, "tp2": 2}
OTHER = "other"
"""In place of a layout: the server to compare with."""
SWITCH_CYCLE = ("tp2", "tp1+tp1", "tp2", "tp1")
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
PREFILL_TOKENS = 1000
SWITCH_EVERY_S = 3.0
SWITCH_LOAD_PER_S = 1.5
SWITCH_OUTPUT_TOKENS = 96

_WHOLE = {"ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Block(Generic[T]):
    """One block's figures and the memory state around them. `flipped` survived the repetition."""

    name: str
    before: MemoryState
    after: MemoryState
    repeated: bool
    figures: T

    @property
    def flipped(self) -> bool:
        return self.before.name != self.after.name


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """`streams` at once, 64 tokens in and 64 out; medians over rounds.

    `tokens_per_s` counts output tokens from the first request sent to the last token, prefill
    included; `steady_tokens_per_s` while all streams decode; `tpot_ms` is after each stream's first token.
    `layout` is `other` for another server. `split` is over all rounds; `engine_us` at the end of them.
    """

    layout: str
    streams: int
    rounds: int
    tpot_ms: float
    tokens_per_s: float
    split: DecodeSplit | None = None
    engine_us: float | None = None
    steady_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Time to the first token of a prompt of 1,000 tokens, alone on the server, in ms."""

    layout: str
    ttft_ms: Quantiles


@dataclass(frozen=True, slots=True)
class SwitchFigures:
    """Switches under load. Gaps are the longest of any stream, in seconds.

    `gap_without_s`: the same schedule with no switch, by layout; H1's baseline is the layout the
    schedule with switches starts from. `verdicts` holds one judgement per switch that met a stream.
    """

    switches: tuple[Switch, ...]
    phases_ms: dict[str, Quantiles]
    total_ms: Quantiles
    requests: int
    failures: int
    handovers: int
    gap_without_s: dict[str, float]
    gap_with_s: float
    verdicts: tuple[GapVerdict, ...]

    @property
    def held(self) -> bool:
        return self.failures == 0 and all(verdict.held for verdict in self.verdicts)


def guarded(name: str, measure: Callable[[], T], probe: Callable[[], MemoryState]) -> Block[T]:
    """Measures between two probes; once more when the state flipped."""
    block = measured(name, measure, probe)
    return measured(name, measure, probe, repeated=True) if block.flipped else block


def measured(
    name: str, measure: Callable[[], T], probe: Callable[[], MemoryState], *, repeated: bool = False
) -> Block[T]:
    """Measures between two probes, for figures that bear a flip."""
    before = probe()
    figures = measure()
    return Block(name, before, probe(), repeated, figures)


class Session:
    """One running server under measurement; owns the prompts' random generator.

    Each method plays its load on a thread of lower priority and returns when the server is idle.
    Decode and prefill alternate with `rival` within each round, if there is one.
    Raises FatalError when a request fails where none may, or the server refuses a layout.
    """

    def __init__(self, url: str, seed: int = 0, timeout_s: float = 300.0) -> None:
        self._url = url
        self._clock = SystemClock()
        self._rng = np.random.default_rng(seed)
        self._timeout_s = timeout_s
        self.rival: Rival | None = None
        self._model, self._ids = run_lowered(self._describe)

    async def _describe(self) -> tuple[str, tuple[int, ...]]:
        async with Admin(self._url) as admin:
            return await admin.served_model(), await admin.tokenize(LONG_TEXT)

    def compare_with(self, url: str, model: str | None, api_key: str | None) -> None:
        """From now on decode and prefill are played on the server at `url` too."""
        trial = self._prompts(PROMPT_TOKENS, 1)[0]
        self.rival = Rival(url, model, self._texts, trial=trial, api_key=api_key)

    def decode(self, streams: int, rounds: int) -> list[DecodePoint]:
        """TPOT and throughput of every layout, the layouts taking turns within a round."""
        before = run_lowered(lambda: settled_metrics(self._url))
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in self._turns}
        steady: dict[str, list[float]] = {name: [] for name in self._turns}
        for _ in range(rounds):
            for name in self._turns:
                results = self._take_turn(name, PROMPT_TOKENS, streams, OUTPUT_TOKENS)
                summary = summarise(results)
                rate = steady_tokens_per_s(results)
                steady[name] += [] if rate is None else [rate]
                if summary.tpot is None:
                    raise FatalError("no stream had two tokens; is ignore_eos supported?")
                seen[name].append((summary.tpot.p50 * 1e3, summary.tokens_per_s))
        after = run_lowered(lambda: settled_metrics(self._url))
        points = []
        for name, values in seen.items():
            tpot_ms, tokens_per_s = (float(v) for v in np.median(values, axis=0))
            split = decode_split(before, after, DEGREES[name]) if name != OTHER else None
            engine = engine_us(after) if name != OTHER else None
            decoding = float(np.median(steady[name])) if steady[name] else None
            points.append(DecodePoint(name, streams, rounds, tpot_ms, tokens_per_s, split, engine, decoding))
        return points

    def prefill(self, rounds: int) -> list[PrefillPoint]:
        """TTFT of long prompts, one after another, the layouts taking turns."""
        seen: dict[str, list[float | None]] = {name: [] for name in self._turns}
        for _ in range(rounds):
            for name in self._turns:
                (result,) = self._take_turn(name, PREFILL_TOKENS, 1, 1)
                seen[name].append(None if result.ttft_s is None else result.ttft_s * 1e3)
        points = []
        for layout, values in seen.items():
            ttft_ms = quantiles(values)
            if ttft_ms is None:
                raise FatalError("no first token came back for a prompt of 1,000 tokens")
            points.append(PrefillPoint(layout, ttft_ms))
        return points

    def switches(self, count: int, seed: int = 0) -> SwitchFigures:
        """The same schedule without a switch on each layout, then with `count` switches."""
        duration_s = SWITCH_EVERY_S * (count + 1)
        rate = arrivals.constant_rate(SWITCH_LOAD_PER_S, duration_s)
        times = arrivals.draw(rate, 1.0, np.random.default_rng(seed))
        prompts = [self._prompts(PROMPT_TOKENS, 1)[0] for _ in times]
        schedule = [
            Request(at_s, prompt, SWITCH_OUTPUT_TOKENS, name=f"load-{i}", extra=_WHOLE)
            for i, (at_s, prompt) in enumerate(zip(times, prompts, strict=True))
        ]
        without = {layout: longest_gap(self._play(layout, schedule)) or 0.0 for layout in LAYOUTS}
        layouts = [SWITCH_CYCLE[i % len(SWITCH_CYCLE)] for i in range(count)]
        results, switches = run_lowered(lambda: self._play_switching(schedule, layouts))
        return switch_figures(results, switches, without, baseline_layout=LAYOUTS[0])

    async def _play_switching(
        self, schedule: Sequence[Request], layouts: Sequence[str]
    ) -> tuple[list[Result], list[Switch]]:
        async with Admin(self._url) as admin:
            await admin.set_layout(LAYOUTS[0])
            times_s = [SWITCH_EVERY_S * (i + 1) for i in range(len(layouts))]
            changes = list(zip(times_s, layouts, strict=True))
            return await play_switches(self._client(), admin, schedule, changes, self._clock)

    @property
    def _turns(self) -> tuple[str, ...]:
        return LAYOUTS if self.rival is None else (*LAYOUTS, OTHER)

    def _take_turn(self, name: str, prompt_tokens: int, streams: int, max_tokens: int) -> list[Result]:
        prompts = self._prompts(prompt_tokens, streams)
        if name == OTHER:
            assert self.rival is not None
            return self.rival.play(prompts, max_tokens)
        return self._play(name, together(prompts, max_tokens, _WHOLE))

    def _texts(self, prompts: Sequence[tuple[int, ...]]) -> list[str]:
        async def main() -> list[str]:
            async with Admin(self._url) as admin:
                return [await admin.detokenize(prompt) for prompt in prompts]

        return run_lowered(main)

    def _play(self, layout: str, schedule: Sequence[Request]) -> list[Result]:
        async def main() -> list[Result]:
            async with Admin(self._url) as admin:
                await admin.set_layout(layout)
            return await run_schedule(schedule, self._client(), self._clock)

        results = run_lowered(main)
        for result in results:
            if result.failure is not None:
                raise FatalError(f"a request failed under {layout}: {result.failure}")
        return results

    def _client(self) -> Client:
        return Client(self._url, self._model, timeout_s=self._timeout_s, return_token_ids=True)

    def _prompts(self, length_tokens: int, count: int) -> list[tuple[int, ...]]:
        return exact_prompts(self._ids, length_tokens, count, self._rng)


def switch_figures(
    results: Sequence[Result],
    switches: Sequence[Switch],
    gap_without_s: dict[str, float],
    baseline_layout: str,
) -> SwitchFigures:
    """Pure: judges a play with switches against the plays without. Raises FatalError without a switch."""
    names = dict.fromkeys(name for switch in switches for name in switch.phases_ms)
    phases = {name: quantiles(switch.phases_ms.get(name) for switch in switches) for name in names}
    total_ms = quantiles((switch.ended_s - switch.started_s) * 1e3 for switch in switches)
    if total_ms is None:
        raise FatalError("no switch took place; nothing to judge")
    baseline_s = gap_without_s[baseline_layout]
    judged = (judge_gaps(results, switch.started_s, switch.ended_s, baseline_s) for switch in switches)
    return SwitchFigures(
        switches=tuple(switches),
        phases_ms={name: phase for name, phase in phases.items() if phase is not None},
        total_ms=total_ms,
        requests=len(results),
        failures=sum(result.failure is not None for result in results),
        handovers=sum(switch.handovers for switch in switches),
        gap_without_s=gap_without_s,
        gap_with_s=longest_gap(results) or 0.0,
        verdicts=tuple(verdict for verdict in judged if verdict is not None),
    )
