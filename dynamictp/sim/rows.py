"""What a simulation's tables show beside the benchmark's own rows: devices, load, switches, decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from dynamictp.bench.measure import Figure
from dynamictp.bench.report.rows import NONE, Row, number, request_rows
from dynamictp.sim.outcome import CaseResult, Outcome, interval

Value = Callable[[CaseResult], float]
_HOUR_S = 3600.0


def rows(outcome: Outcome) -> tuple[Row, ...]:
    """Everything side by side, a column for each configuration."""
    figures = outcome.figures()
    # Nothing is cut, there is no client, and tokens are not seen one by one.
    hidden = {"cut by the end of the run", "P50 from sent", "longest chunk gap"}
    benchmark = [row for row in _without_between(request_rows(figures)) if row.name not in hidden]
    return (*benchmark, *device_rows(outcome), *switch_rows(outcome))


def device_rows(outcome: Outcome) -> tuple[Row, ...]:
    """One definition of each utilisation for all configurations."""

    def row(name: str, of: Value, show: Callable[[Figure], str], note: str = "") -> Row:
        return Row(name, _cells(outcome, of, show), note)

    found = [
        Row("Devices, from warm-up to the end of the load"),
        row("held, mean", lambda r: r.use.devices, _plain, "in a domain, preparing or draining included"),
        row("device-hours", lambda r: r.use.device_s / _HOUR_S, _plain),
        row(
            "load",
            lambda r: r.use.load,
            _percent,
            "requests that came ÷ what the layouts held carry in the SLO",
        ),
        row("busy", lambda r: r.use.busy, _percent, "in a step ÷ held device-seconds"),
        row("compute", lambda r: r.use.compute, _percent, "FLOPs ÷ (peak × held device-seconds)"),
    ]
    if outcome.scenario.price_per_device_hour:
        found.append(row("cost", lambda r: outcome.price(r) or 0.0, _plain))
        found.append(
            row(
                "cost of 1,000 good requests",
                lambda r: 1e3 * (outcome.price(r) or 0.0) / max(r.total.met, 1),
                _plain,
            )
        )
    return tuple(found)


def switch_rows(outcome: Outcome) -> tuple[Row, ...]:
    def row(name: str, of: Value, note: str = "") -> Row:
        return Row(name, _cells(outcome, of, _plain), note)

    def cells(of: Callable[[Sequence[CaseResult]], str]) -> tuple[str, ...]:
        return tuple(of(outcome.of(name)) for name in outcome.configurations)

    return (
        Row("Switches"),
        row("an hour", lambda r: r.switches_per_hour),
        row("most in any hour", lambda r: float(most_in_an_hour(r))),
        Row("reasons", cells(_reasons)),
        Row("not committed", cells(_uncommitted)),
        row("handovers", lambda r: float(r.handovers)),
        row("recomputed", lambda r: float(r.recomputes), "preempted, or handed over without its pages"),
        Row("alarms, share of decisions", cells(_alarms)),
    )


def most_in_an_hour(result: CaseResult) -> int:
    """Switches that began in the busiest hour."""
    times = [switch.began_s for switch in result.switches]
    return max((sum(t <= other < t + _HOUR_S for other in times) for t in times), default=0)


def _without_between(found: Sequence[Row]) -> list[Row]:
    """Without the section on single tokens, which the coarse grain does not show."""
    kept, inside = [], False
    for row in found:
        inside = row.name.startswith("Between tokens") if row.heading else inside
        if not inside:
            kept.append(row)
    return kept


def _cells(outcome: Outcome, of: Value, show: Callable[[Figure], str]) -> tuple[str, ...]:
    return tuple(show(interval([of(r) for r in outcome.of(name)])) for name in outcome.configurations)


def _plain(figure: Figure) -> str:
    text = number(figure.value) if figure.value else "0"
    if figure.low == figure.high:
        return text
    return f"{text} [{number(max(figure.low, 0.0))}–{number(figure.high)}]"


def _percent(figure: Figure) -> str:
    text = f"{figure.value:.1%}"
    if figure.low == figure.high:
        return text
    return f"{text} [{figure.low * 100:.1f}–{figure.high * 100:.1f}]"


def _reasons(results: Sequence[CaseResult]) -> str:
    counts = Counter(switch.reason for result in results for switch in result.switches)
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or NONE


def _uncommitted(results: Sequence[CaseResult]) -> str:
    outcomes = Counter(switch.outcome or "in flight" for r in results for switch in r.switches)
    del outcomes["committed"]
    return ", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items())) or "0"


def _alarms(results: Sequence[CaseResult]) -> str:
    decisions = sum(sum(result.reasons.values()) for result in results)
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.alarms)
    return ", ".join(f"{name} {count / decisions:.1%}" for name, count in sorted(counts.items())) or NONE
