"""What the demo shows at its end: pure functions from results and switches to text and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamictp.bench.admin import Switch
from dynamictp.bench.result import Result
from dynamictp.bench.stats import Quantiles, longest_gap, quantiles

ACROSS = "across a switch"
# Column title of each phase, in the order they happen.
PHASES = {
    "prepare_views": "views",
    "prepare_communicator": "comm",
    "proof": "proof",
    "ramp": "ramp",
    "commit": "commit",
    "drain": "drain",
    "close": "close",
}
_BARS = " ▁▂▃▄▅▆▇█"

NOTES = (
    "Times are this client's, on the same machine as the server: TTFT counts from the moment a request"
    " was due, queueing included; TPOT is the mean time per token after a request's first.",
    "A layout's row holds the requests that lived wholly under it. Arrivals are random, so the rows show"
    " that service goes on, not which layout is faster: on a machine of two cores tp1+tp1 buys isolation"
    " and a free device rather than throughput.",
)


@dataclass(frozen=True, slots=True)
class Play:
    """One run of the demo. Times are the client's clock; `first_layout` was in force at the start."""

    started_s: float
    ended_s: float
    first_layout: str
    results: tuple[Result, ...]
    switches: tuple[Switch, ...]

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.failure is not None)


@dataclass(frozen=True, slots=True)
class Stage:
    """A span in which one layout alone was in force: from a switch's end to the next one's start."""

    layout: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """Latencies in seconds of the requests of one layout."""

    layout: str
    requests: int
    ttft: Quantiles | None
    tpot: Quantiles | None


def stages_of(play: Play) -> tuple[Stage, ...]:
    """The spans between switches, in order."""
    stages = []
    layout, start_s = play.first_layout, play.started_s
    for switch in play.switches:
        stages.append(Stage(layout, start_s, switch.started_s))
        layout, start_s = switch.after, switch.ended_s
    return (*stages, Stage(layout, start_s, max(play.ended_s, start_s)))


def rows_by_layout(play: Play) -> tuple[LayoutRow, ...]:
    """One row per layout in order of appearance; last, the requests that saw a switch."""
    stages = stages_of(play)
    groups: dict[str, list[Result]] = {stage.layout: [] for stage in stages}
    across: list[Result] = []
    for result in play.results:
        if result.failure is not None:
            continue
        home = (s for s in stages if s.start_s <= result.intended_s and result.end_s <= s.end_s)
        stage = next(home, None)
        (groups[stage.layout] if stage else across).append(result)
    return tuple(
        LayoutRow(
            layout=name,
            requests=len(results),
            ttft=quantiles(result.ttft_s for result in results),
            tpot=quantiles(result.tpot_s for result in results),
        )
        for name, results in (*groups.items(), (ACROSS, across))
    )


def layout_strip(play: Play, width: int) -> str:
    """The layout over time: one run of its name per stage, `|` where a switch began.

    Every column is `duration/width`; names are cut or padded with `-` to their stage's columns.
    """
    columns = _columns(play, width)
    strip = ""
    for stage in stages_of(play):
        room = columns(stage.end_s) - len(strip)
        if strip:
            strip += "|"[: max(room, 0)]
            room -= 1
        if room > 0:
            strip += stage.layout[:room].ljust(room, "-")
    return strip


def load_strip(play: Play, width: int) -> str:
    """Running requests over time as bars, the highest bar being the most at once."""
    if play.ended_s <= play.started_s:
        return ""
    step_s = (play.ended_s - play.started_s) / width
    centres = [play.started_s + (column + 0.5) * step_s for column in range(width)]
    counts = [sum(r.intended_s <= at_s < r.end_s for r in play.results) for at_s in centres]
    peak = max(*counts, 1)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // peak)] for count in counts)


def render(play: Play, width: int = 64) -> RenderableType:
    """The whole report."""
    return Group(
        _overview(play),
        Text(""),
        Text(f"layout   {layout_strip(play, width)}", no_wrap=True),
        Text(f"running  {load_strip(play, width)}", no_wrap=True),
        Text(""),
        _latency_table(rows_by_layout(play)),
        _switch_table(play),
        *(Text(note, style="dim") for note in NOTES),
    )


def as_json(play: Play) -> Mapping[str, object]:
    """The report as plain values; times in seconds since the start."""
    return {
        "requests": len(play.results),
        "failures": [str(result.failure) for result in play.failures],
        "duration_s": play.ended_s - play.started_s,
        "longest_gap_s": longest_gap(play.results),
        "handovers": sum(result.count_of("handovers") for result in play.results),
        "recomputes": sum(result.count_of("recomputes") for result in play.results),
        "layouts": [
            {"layout": row.layout, "requests": row.requests, "ttft_s": row.ttft, "tpot_s": row.tpot}
            for row in rows_by_layout(play)
        ],
        "switches": [
            {
                "from": switch.before,
                "to": switch.after,
                "outcome": switch.outcome,
                "started_s": switch.started_s - play.started_s,
                "ended_s": switch.ended_s - play.started_s,
                "phases_ms": dict(switch.phases_ms),
                "handovers": switch.handovers,
                "recomputes": switch.recomputes,
                "weight_bytes_copied": switch.weight_bytes_copied,
            }
            for switch in play.switches
        ],
    }


def _overview(play: Play) -> RenderableType:
    table = Table(show_header=False, box=None, pad_edge=False)
    failures = len(play.failures)
    gap_s = longest_gap(play.results)
    tokens = sum(result.output_tokens for result in play.results)
    table.add_row("requests", f"{len(play.results)} ({tokens} tokens streamed)")
    table.add_row("failures", Text(str(failures), style="bold red" if failures else "bold green"))
    table.add_row("longest gap in any stream", "-" if gap_s is None else f"{gap_s * 1e3:.0f} ms")
    moved = sum(result.count_of("handovers") > 0 for result in play.results)
    table.add_row("requests moved to another layout while running", str(moved))
    for text, count in _failure_lines(play.failures):
        table.add_row(Text("  " + text, style="red"), str(count))
    return table


def _failure_lines(failures: Iterable[Result]) -> list[tuple[str, int]]:
    """Distinct failures and how often each happened, five at most."""
    counts: dict[str, int] = {}
    for result in failures:
        assert result.failure is not None
        text = f"{result.failure.kind}: {result.failure.message[:100]}"
        counts[text] = counts.get(text, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])[:5]


def _latency_table(rows: Sequence[LayoutRow]) -> Table:
    table = Table(
        title="Latency per layout (ms)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("layout", no_wrap=True)
    for name in ("requests", "TTFT P50", "TTFT P95", "TPOT P50", "TPOT P95"):
        table.add_column(name, justify="right")
    for row in rows:
        pairs = [(row.ttft, 0), (row.tpot, 1)]
        cells = [
            "-" if q is None else f"{value * 1e3:.{digits}f}"
            for q, digits in pairs
            for value in ((q.p50, q.p95) if q else (0.0, 0.0))
        ]
        table.add_row(row.layout, str(row.requests), *cells)
    return table


def _switch_table(play: Play) -> Table:
    table = Table(
        title="Switches (ms per phase)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("switch", no_wrap=True)
    for title in (*PHASES.values(), "total", "moved"):
        table.add_column(title, justify="right")
    for switch in play.switches:
        phases = ["-" if name not in switch.phases_ms else f"{switch.phases_ms[name]:.1f}" for name in PHASES]
        total = f"{(switch.ended_s - switch.started_s) * 1e3:.0f}"
        table.add_row(f"{switch.before} → {switch.after}", *phases, total, str(switch.handovers))
    return table


def _columns(play: Play, width: int) -> _Columns:
    return _Columns(play.started_s, max(play.ended_s - play.started_s, 1e-9), width)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Maps a time to a column of the strip."""

    started_s: float
    duration_s: float
    width: int

    def __call__(self, at_s: float) -> int:
        return min(round((at_s - self.started_s) / self.duration_s * self.width), self.width)
