"""The study of switches as a page of the documentation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dynamictp.bench.stats import Quantiles, quantiles
from dynamictp.bench.switches.outcome import COMMIT_MS, EFFECT_MS, Outcome, PlayFigures, SwitchFigures
from dynamictp.bench.switches.study import (
    LONG_SHARE,
    LONG_TOKENS,
    PROMPT_TOKENS,
    SHORT_TOKENS,
    WANTED_SWITCHES,
)

_SHOWN_OUT = 50

HOW = f"""\
`scripts/bench --only switches` starts a server of the embedded model on two devices and plays rounds. A round
is one schedule of Poisson arrivals ({PROMPT_TOKENS} tokens in; {LONG_TOKENS} out for {LONG_SHARE:.0%} \
of the requests, {SHORT_TOKENS} for the others), played once with the
layout changing at fixed distances by `PUT /admin/layout`, and once without a switch on each control layout,
in an order that differs from round to round. The tour goes through all six changes between `tp1`, `tp2` and
`tp1+tp1`. The client runs on the same machine at lower priority; no communicator is warmed up.

- **To first admitted**: from the decision (the engine's receipt of the command) to the first request from the
  queue that a domain of the new layout admits, as the engine reports it. Handovers don't count. It includes
  the wait for an arrival; **to open**, from the server's decision to its news of the commit, does not. When
  the next switch began before a request came, the time until then counts. A change from `tp1+tp1` to `tp1`
  opens nothing, so it has none.
- **Gaps**: time between two chunks of a stream as the client got them. Limit, from the request for a
  switch to its close: max(5 x the stream's median gap, 150 ms, 1.5 x the longest gap of the same schedule
  without a switch). That control is the worse of the two layouts that the switch lies between, within the
  same round: streams run on both.
"""


def page(outcome: Outcome, picture: str) -> str:
    """The whole page; `picture` is the plot's address from there."""
    return "\n".join(_lines(outcome, picture)) + "\n"


def _lines(outcome: Outcome, picture: str) -> Iterator[str]:
    study = outcome.study
    yield "<!-- Written by `scripts/bench --only switches`; edits here are lost. -->"
    yield ""
    yield "# Switches under load"
    yield ""
    yield f"{len(outcome.switches)} switches at distances of {study.every_s:g} s, on the real server."
    if len(outcome.switches) < WANTED_SWITCHES:
        yield f"**A short run: {WANTED_SWITCHES} switches are wanted before its 99th percentiles say much.**"
    yield ""
    yield from (
        f"- {verdict.text}: {'held' if verdict.held else '**MISSED**'}" for verdict in outcome.verdicts
    )
    yield ""
    yield f"![Each switch, the longest gap at it, and all gaps]({picture})"
    yield ""
    yield "## How it is measured"
    yield ""
    yield HOW
    yield "## The run"
    yield ""
    yield f"{outcome.machine}  "
    yield f"{outcome.build}  "
    yield _states(outcome)
    yield ""
    yield _load(outcome)
    yield ""
    yield from _phases(outcome.switches)
    yield ""
    yield from _changes(outcome.switches)
    yield ""
    yield from _plays(outcome)
    yield ""
    yield from _out(outcome.switches)


def _states(outcome: Outcome) -> str:
    names = sorted({state.name for state in outcome.states})
    rates = [state.two_gbps for state in outcome.states]
    busy = max(state.busy_cores for state in outcome.states)
    return (
        f"memory state {' and '.join(names)} ({min(rates):.0f} to {max(rates):.0f} GB/s, two cores),"
        f" at most {busy:.1f} cores busy before and after rounds"
    )


def _load(outcome: Outcome) -> str:
    study = outcome.study
    given = "as given"
    if study.saturated_per_s:
        share = study.rate_per_s / study.saturated_per_s
        given = f"{share:.0%} of the {study.saturated_per_s:.2f} that `tp1` finishes when it never runs out"
    seen = quantiles(switch.streams for switch in outcome.switches)
    met = (
        ""
        if seen is None
        else f" A switch met {seen.p50:.0f} running streams (median; at most {seen.max:.0f})."
    )
    return (
        f"Load: {study.rate_per_s:.2f} requests/s, {given}; rounds: {len(study.tours)}, the longest of"
        f" {max(study.load_s(tour) for tour in study.tours):.0f} s; seed {study.seed}.{met}"
    )


def _phases(switches: Sequence[SwitchFigures]) -> Iterator[str]:
    names = dict.fromkeys(name for switch in switches for name in switch.phases_ms)
    rows: list[tuple[str, list[float | None]]] = [
        (f"decision to first admitted (P99 at most {EFFECT_MS:.0f})", [s.effect_ms for s in switches]),
        ("decision to open", [s.committed_ms for s in switches]),
        *(
            (
                f"commit (P99 at most {COMMIT_MS:.0f})" if name == "commit" else name,
                [s.phases_ms.get(name) for s in switches],
            )
            for name in names
        ),
        ("request to closed, at the client", [s.total_ms for s in switches]),
    ]
    yield from _head("Each switch, ms", ("", "count", "P50", "P99", "max"))
    for name, values in rows:
        yield _row((name, *_quantiles(quantiles(values))))
    unmet = sum(s.effect_ms is not None and not s.effect_seen for s in switches)
    handovers, recomputes = sum(s.handovers for s in switches), sum(s.recomputes for s in switches)
    yield ""
    yield (
        f"Switches that saw no request before the next one: {unmet}. {handovers} running requests were"
        f" handed over, {recomputes} were recomputed."
    )


def _changes(switches: Sequence[SwitchFigures]) -> Iterator[str]:
    title = "By change, ms: median, P99"
    columns = ("change", "count", "to open", "to first admitted", "to closed", "longest gap of a stream")
    yield from _head(title, columns)
    for before, after in dict.fromkeys((s.before, s.after) for s in switches):
        mine = [s for s in switches if (s.before, s.after) == (before, after)]
        gaps = [s.gap.longest_s * 1e3 for s in mine if s.gap is not None]
        cells = [
            _pair([s.committed_ms for s in mine]),
            _pair([s.effect_ms for s in mine]),
            _pair([s.total_ms for s in mine]),
            _pair(gaps),
        ]
        yield _row((f"{before} → {after}", str(len(mine)), *cells))


def _plays(outcome: Outcome) -> Iterator[str]:
    columns = (
        "play", "requests", "failed", "gap P50", "P99", "max", "at the switches P50", "P99", "max",
        "stream's longest P50", "P99", "TTFT P50", "P99",
    )  # fmt: skip
    yield from _head("Gaps in streams, ms", columns)
    for play in (outcome.switching, *outcome.controls):
        yield _row(_play(play))
    yield ""
    yield (
        "At the switches: gaps that touch the time from the request for a switch to its close; for a play"
        " without switches, the same moments of the schedule."
    )


def _play(play: PlayFigures) -> tuple[str, ...]:
    cells = [play.label, str(play.requests), str(play.failed)]
    for seen, names in (
        (play.gaps, ("p50", "p99", "max")),
        (play.during, ("p50", "p99", "max")),
        (play.longest, ("p50", "p99")),
        (play.ttft, ("p50", "p99")),
    ):
        cells += ["-" if seen is None else f"{getattr(seen, name) * 1e3:.0f}" for name in names]
    return tuple(cells)


def _out(switches: Sequence[SwitchFigures]) -> Iterator[str]:
    out = [(switch, verdict) for switch in switches for verdict in switch.out]
    own, pairs = sum(switch.beyond_own for switch in switches), sum(switch.streams for switch in switches)
    yield (
        f"Of {pairs} running streams at a switch {len(out)} went beyond their limit; {own} beyond"
        " max(5 x their median gap, 150 ms), whatever the plays without a switch showed."
    )
    worst = max((s.gap for s in switches if s.gap is not None), key=lambda gap: gap.share, default=None)
    if worst is not None:
        yield (
            f"Closest to its limit: {worst.longest_s * 1e3:.0f} ms of {worst.limit_s * 1e3:.0f}"
            f" (stream {worst.stream})."
        )
    if out:
        yield ""
        columns = ("stream", "change", "at s of its round", "longest gap", "limit", "median gap")
        yield from _head("Streams beyond their limit, ms", columns)
        for switch, verdict in out[:_SHOWN_OUT]:
            times = (verdict.longest_s, verdict.limit_s, verdict.median_s)
            change = f"{switch.before} → {switch.after}"
            cells = [f"{seconds * 1e3:.0f}" for seconds in times]
            yield _row((verdict.stream, change, f"{switch.started_s:.1f}", *cells))
        if len(out) > _SHOWN_OUT:
            yield ""
            yield f"and {len(out) - _SHOWN_OUT} more."


def _head(title: str, columns: Sequence[str]) -> Iterator[str]:
    yield f"#### {title}"
    yield ""
    yield _row(columns)
    yield _row(["---", *("--:" for _ in columns[1:])])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _quantiles(seen: Quantiles | None) -> tuple[str, ...]:
    if seen is None:
        return ("0", "-", "-", "-")
    return (str(seen.count), *(f"{value:.1f}" for value in (seen.p50, seen.p99, seen.max)))


def _pair(values: Iterable[float | None]) -> str:
    seen = quantiles(values)
    return "-" if seen is None else f"{seen.p50:.0f}, {seen.p99:.0f}"
