"""What was seen of many switches, and the figures made of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynamictp.bench.admin import Switch
from dynamictp.bench.machine import Build, Machine, MemoryState
from dynamictp.bench.result import Result
from dynamictp.bench.stats import (
    Quantiles,
    StreamVerdict,
    gaps_within,
    judge_streams,
    longest_gap,
    quantiles,
)
from dynamictp.bench.switches.study import Study, Tour
from dynamictp.layout import spec_of

EFFECT_MS = 2000.0
"""H2: decision → first request admitted by a new domain, P99."""
COMMIT_MS = 50.0
"""H2: the routing commit itself, P99."""

_CURVE_POINTS = 160


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One round as it was played. All times are seconds after the origin of the schedule; `controls` are the
    plays of the same schedule without a switch, by layout.
    """

    tour: Tour
    switches: tuple[Switch, ...]
    results: tuple[Result, ...]
    controls: Mapping[str, tuple[Result, ...]]
    before: MemoryState
    after: MemoryState


@dataclass(frozen=True, slots=True)
class SwitchFigures:
    """One switch. `effect_ms`: from the decision to the first request that a new domain admitted; when none
    came before the next switch, the time until then, and `effect_seen` is false; None when the switch opens
    nothing. `gap`: the stream that came closest to its limit; `out`: those beyond it; `beyond_own`: how many
    exceeded max(5 × their median, 150 ms), whatever the play without a switch showed.
    """

    round: int
    before: str
    after: str
    outcome: str
    started_s: float
    total_ms: float
    phases_ms: Mapping[str, float]
    committed_ms: float | None
    effect_ms: float | None
    effect_seen: bool
    handovers: int
    recomputes: int
    weight_bytes_copied: int
    baseline_s: float
    streams: int
    gap: StreamVerdict | None
    out: tuple[StreamVerdict, ...]
    beyond_own: int


@dataclass(frozen=True, slots=True)
class PlayFigures:
    """All plays of one kind, in seconds. `longest` is of each stream; `during` are the gaps that touched the
    time of a switch (without switches: at the same moments of the schedule). `curve`: (gap, share of gaps at
    least as long), from the most frequent to the longest.
    """

    label: str
    requests: int
    failed: int
    gaps: Quantiles | None
    longest: Quantiles | None
    during: Quantiles | None
    ttft: Quantiles | None
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One criterion in words, and whether it held."""

    text: str
    held: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """All of a study, for the page and as JSON."""

    study: Study
    machine: Machine
    build: Build
    states: tuple[MemoryState, ...]
    switches: tuple[SwitchFigures, ...]
    switching: PlayFigures
    controls: tuple[PlayFigures, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def held(self) -> bool:
        return all(verdict.held for verdict in self.verdicts)


def outcome_of(study: Study, machine: Machine, build: Build, rounds: Sequence[RoundSeen]) -> Outcome:
    """The figures of everything that was played. Raises ValueError without a round."""
    if not rounds:
        raise ValueError("no round was played")
    switches = tuple(figures for seen in rounds for figures in _round_switches(study, seen))
    switching = play_figures("with switches", rounds, lambda seen: seen.results)
    controls = tuple(
        play_figures(layout, rounds, lambda seen, layout=layout: seen.controls[layout])  # type: ignore[misc]
        for layout in study.controls
    )
    return Outcome(
        study=study,
        machine=machine,
        build=build,
        states=tuple(state for seen in rounds for state in (seen.before, seen.after)),
        switches=switches,
        switching=switching,
        controls=controls,
        verdicts=judge(switches, (switching, *controls)),
    )


def _round_switches(study: Study, seen: RoundSeen) -> Iterator[SwitchFigures]:
    longest = {layout: longest_gap(results) or 0.0 for layout, results in seen.controls.items()}
    ends = [*(switch.started_s for switch in seen.switches[1:]), study.load_s(seen.tour)]
    for switch, until_s in zip(seen.switches, ends, strict=True):
        yield switch_figures(seen.tour.number, switch, until_s, seen.results, longest)


def switch_figures(
    number: int, switch: Switch, until_s: float, results: Sequence[Result], longest_s: Mapping[str, float]
) -> SwitchFigures:
    """`until_s`: when the next switch began, or the load ended. `longest_s`: longest gap of each play without
    a switch.
    """
    baseline_s = baseline_of(switch, longest_s)
    verdicts = judge_streams(results, switch.started_s, switch.ended_s, baseline_s)
    own = judge_streams(results, switch.started_s, switch.ended_s, 0.0)
    seen = switch.first_admitted_ms is not None
    effect_ms = switch.first_admitted_ms
    if not seen and opens(switch):
        effect_ms = (until_s - switch.started_s) * 1e3
    return SwitchFigures(
        round=number,
        before=switch.before,
        after=switch.after,
        outcome=switch.outcome,
        started_s=switch.started_s,
        total_ms=(switch.ended_s - switch.started_s) * 1e3,
        phases_ms=switch.phases_ms,
        committed_ms=switch.committed_ms,
        effect_ms=effect_ms,
        effect_seen=seen,
        handovers=switch.handovers,
        recomputes=switch.recomputes,
        weight_bytes_copied=switch.weight_bytes_copied,
        baseline_s=baseline_s,
        streams=len(verdicts),
        gap=max(verdicts, key=lambda verdict: verdict.share, default=None),
        out=tuple(verdict for verdict in verdicts if not verdict.held),
        beyond_own=sum(not verdict.held for verdict in own),
    )


def baseline_of(switch: Switch, longest_s: Mapping[str, float]) -> float:
    """The longest gap of the round's schedule without a switch: on the worse of the two layouts that the
    switch lies between, as its streams run on both; of what was played where neither was.
    """
    played = [longest_s[name] for name in (switch.before, switch.after) if name in longest_s]
    return max(played or longest_s.values(), default=0.0)


def opens(switch: Switch) -> bool:
    """Whether its target has a shape that was not there: else nothing new can admit."""
    before = list(spec_of(switch.before).shapes)
    for shape in spec_of(switch.after).shapes:
        if shape not in before:
            return True
        before.remove(shape)
    return False


def play_figures(
    label: str, rounds: Sequence[RoundSeen], results_of: Callable[[RoundSeen], Sequence[Result]]
) -> PlayFigures:
    """The same kind of play of all rounds."""
    results = [result for seen in rounds for result in results_of(seen)]
    gaps = [gap for result in results for gap in result.chunk_gaps_s]
    during = (
        gap
        for seen in rounds
        for switch in seen.switches
        for result in results_of(seen)
        for gap in gaps_within(result, switch.started_s, switch.ended_s)
    )
    return PlayFigures(
        label=label,
        requests=len(results),
        failed=sum(result.failure is not None for result in results),
        gaps=quantiles(gaps),
        longest=quantiles(result.longest_gap_s for result in results),
        during=quantiles(during),
        ttft=quantiles(result.ttft_s for result in results),
        curve=curve_of(gaps),
    )


def curve_of(gaps: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """(gap, share at least as long) at ranks that are even on a logarithmic scale: the tail in full."""
    if not gaps:
        return ()
    falling = np.sort(np.asarray(gaps, dtype=np.float64))[::-1]
    ranks = np.unique(np.geomspace(1, falling.size, _CURVE_POINTS).round().astype(int))
    return tuple((float(falling[rank - 1]), float(rank / falling.size)) for rank in ranks[::-1])


def judge(switches: Sequence[SwitchFigures], plays: Iterable[PlayFigures]) -> tuple[Verdict, ...]:
    """H1 and H2 over all switches, the failed requests of all plays."""
    plays = tuple(plays)
    closed = sum(switch.outcome == "closed" for switch in switches)
    effect = quantiles(switch.effect_ms for switch in switches)
    commit = quantiles(switch.phases_ms.get("commit") for switch in switches)
    pairs, out = sum(s.streams for s in switches), sum(len(s.out) for s in switches)
    failed, requests = sum(play.failed for play in plays), sum(play.requests for play in plays)
    copied = sum(switch.weight_bytes_copied for switch in switches)
    return (
        Verdict(f"{closed} of {len(switches)} switches done", closed == len(switches)),
        _at_most("decision → first request admitted by a new domain", effect, EFFECT_MS),
        _at_most("routing commit", commit, COMMIT_MS),
        Verdict(f"{out} of {pairs} running streams at a switch beyond their gap limit", out == 0 < pairs),
        Verdict(f"{failed} of {requests} requests failed, with switches and without", failed == 0 < requests),
        Verdict(f"{copied} bytes of weights copied", copied == 0),
    )


def _at_most(name: str, seen: Quantiles | None, limit_ms: float) -> Verdict:
    if seen is None:
        return Verdict(f"{name}: never seen", False)
    return Verdict(f"{name}: P99 {seen.p99:.1f} ms, wanted at most {limit_ms:.0f} ms", seen.p99 <= limit_ms)
