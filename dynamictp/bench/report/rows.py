"""The side-by-side table: a row per figure, a column per run. Pure; terminal and page share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dynamictp.bench.measure import Estimate, Figure, Group, RunFigures

NONE = "–"


@dataclass(frozen=True, slots=True)
class Row:
    """`cells` are in the runs' order. `heading`: the row begins a section and has no cells."""

    name: str
    cells: tuple[str, ...] = ()
    note: str = ""

    @property
    def heading(self) -> bool:
        return not self.cells


Cell = Callable[[RunFigures], str]


def side_by_side(runs: Sequence[RunFigures]) -> tuple[Row, ...]:
    """Every headline figure of every run."""
    return (*request_rows(runs), *client_rows(runs))


def request_rows(runs: Sequence[RunFigures]) -> tuple[Row, ...]:
    """What became of the requests."""

    def row(name: str, cell: Cell, note: str = "") -> Row:
        return Row(name, tuple(cell(run) for run in runs), note)

    return (
        Row("Requests"),
        row("due", lambda r: str(r.total.due)),
        row("finished", lambda r: str(r.total.finished)),
        row("failed", lambda r: failures_text(r.total)),
        row("cut by the end of the run", lambda r: str(r.total.cut), "counted, otherwise left out"),
        row(
            "goodput",
            lambda r: percent(r.total.goodput),
            "share that met both targets; failures count against it",
        ),
        row("good requests/s", lambda r: f"{r.total.goodput_per_s:.2f}"),
        Row("Time to first token, ms"),
        *_latency_rows(row, lambda group: group.ttft, "from when it was due"),
        row("P50 from sent", lambda r: _ms(r.total.ttft_from_sent, "p50")),
        Row("Time per output token, ms"),
        *_latency_rows(row, lambda group: group.tpot, ""),
        Row("Between tokens, ms"),
        row("samples", lambda r: count_text(r.total.itl), "a chunk of k tokens is k gaps"),
        row("P50", lambda r: _ms(r.total.itl, "p50")),
        row("P99", lambda r: _ms(r.total.itl, "p99")),
        row("longest chunk gap", lambda r: seconds_ms(r.total.longest_gap_s), "of any stream"),
        Row("Whole request, ms"),
        *_latency_rows(row, lambda group: group.e2e, ""),
        Row("Throughput during the load, tokens/s"),
        row("prompts", lambda r: f"{r.total.prefill_tokens_per_s:.0f}"),
        row("output", lambda r: f"{r.total.decode_tokens_per_s:.0f}"),
    )


def client_rows(runs: Sequence[RunFigures]) -> tuple[Row, ...]:
    """Whether the client did its part."""

    def row(name: str, cell: Cell, note: str = "") -> Row:
        return Row(name, tuple(cell(run) for run in runs), note)

    return (
        Row("The client"),
        row(
            "verdict", lambda r: "valid" if r.validity.valid else "INVALID: " + "; ".join(r.validity.problems)
        ),
        row("dispatch delay P50 / P99, ms", lambda r: _dispatch(r.validity.dispatch)),
        row("rate delivered", lambda r: f"{r.validity.delivered:.1%}"),
        row("processor", lambda r: f"{r.validity.cpu_share:.0%} of a core"),
        row(
            "prompts of the planned length",
            lambda r: f"{r.validity.exact_prompts} of {r.validity.counted_prompts}",
            "by the server's usage",
        ),
    )


def _latency_rows(
    row: Callable[..., Row], of: Callable[[Group], Estimate | None], note: str
) -> Iterable[Row]:
    yield row("samples", lambda r: count_text(of(r.total)), note)
    yield row("P50", lambda r: _ms(of(r.total), "p50"))
    yield row("P95", lambda r: _ms(of(r.total), "p95"))
    yield row("P99", lambda r: _ms(of(r.total), "p99"))


GROUP_COLUMNS = (
    "requests", "failed", "goodput", "TTFT P50", "TTFT P95", "TTFT P99", "TPOT P50", "TPOT P95", "E2E P95",
    "longest gap",
)  # fmt: skip


def group_cells(group: Group) -> tuple[str, ...]:
    """One class or tenant; latencies in ms. The columns are GROUP_COLUMNS."""
    return (
        str(group.due),
        failures_text(group),
        percent(group.goodput, interval=False),
        _ms(group.ttft, "p50", interval=False),
        _ms(group.ttft, "p95", interval=False),
        _ms(group.ttft, "p99", interval=False),
        _ms(group.tpot, "p50", interval=False),
        _ms(group.tpot, "p95", interval=False),
        _ms(group.e2e, "p95", interval=False),
        seconds_ms(group.longest_gap_s),
    )


def failures_text(group: Group) -> str:
    """`3 (2 timeout, 1 refused)`."""
    if not group.failed:
        return "0"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(group.failures.items()))
    return f"{group.failed} ({kinds})"


def count_text(seen: Estimate | None) -> str:
    return "0" if seen is None else str(seen.count)


def percent(figure: Figure | None, *, interval: bool = True) -> str:
    if figure is None:
        return NONE
    text = f"{figure.value:.1%}"
    return f"{text} [{figure.low * 100:.0f}–{figure.high * 100:.0f}]" if interval else text


def seconds_ms(value_s: float | None) -> str:
    return NONE if value_s is None else number(value_s * 1e3)


def number(value: float) -> str:
    """Three figures, or whole."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ms(seen: Estimate | None, name: str, *, interval: bool = True) -> str:
    """A percentile in ms with its interval; what is missing says how many samples there were."""
    if seen is None:
        return NONE
    figure: Figure | None = getattr(seen, name)
    if figure is None:
        return f"{NONE} (n={seen.count})"
    text = number(figure.value * 1e3)
    if not interval or figure.low == figure.high:
        return text
    return f"{text} [{number(figure.low * 1e3)}–{number(figure.high * 1e3)}]"


def _dispatch(seen: Estimate | None) -> str:
    return (
        NONE if seen is None else f"{_ms(seen, 'p50', interval=False)} / {_ms(seen, 'p99', interval=False)}"
    )
