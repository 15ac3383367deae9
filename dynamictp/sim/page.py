"""The HTML report of a simulation: the benchmark's page, with time lines of what was simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from dynamictp.bench.measure import RunFigures
from dynamictp.bench.record import Slo
from dynamictp.bench.report import plots
from dynamictp.bench.report.page import fill
from dynamictp.bench.report.rows import GROUP_COLUMNS, group_cells
from dynamictp.bench.tally import Digest
from dynamictp.control.config import SloTable
from dynamictp.sim.outcome import CaseResult, Outcome, merged_digest
from dynamictp.sim.report import headline, notes, scenario_text
from dynamictp.sim.rows import rows

_HOUR_S = 3600.0
_METRICS = ("TTFT", "TPOT", "E2E")
_MOST_POINTS = 1500


def render(outcome: Outcome) -> str:
    """One file with everything inside."""
    figures = outcome.figures()
    slo = bench_slo(outcome.scenario.slo)
    first, *more = notes(outcome)
    return fill(
        title=headline(outcome),
        subtitle=" ".join(more),
        identity=first,
        problems=[],
        labels=outcome.configurations,
        rows=rows(outcome),
        targets=f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s * 1e3:g} ms",
        goodput=plots.goodput_bars("goodput", figures),
        cdfs=plots.cdf_curves("all", _curves(outcome), slo),
        grids=[],
        runs=[_run(i, outcome, seen) for i, seen in enumerate(figures)],
        columns=GROUP_COLUMNS,
        details=[{"name": "The scenario", "text": scenario_text(outcome.scenario)}],
    )


def bench_slo(slo: SloTable) -> Slo:
    """Everyone's targets, as the benchmark's plots want them."""
    return Slo(slo.ttft_p99_s, slo.tpot_target_s, ttft_per_token_s=slo.ttft_per_token_ms * 1e-3)


def _curves(outcome: Outcome) -> dict[str, list[plots.Curve]]:
    return {
        metric: [
            (name, *_thinned(merged_digest(getattr(r.total, metric.lower()) for r in outcome.of(name))))
            for name in outcome.configurations
        ]
        for metric in _METRICS
    }


def _thinned(digest: Digest) -> tuple[Sequence[float], Sequence[float]]:
    values, shares = digest.curve()
    step = max(1, -(-len(values) // _MOST_POINTS))
    return values[::step], shares[::step]


def _run(index: int, outcome: Outcome, seen: RunFigures) -> dict[str, Any]:
    result = outcome.of(seen.label)[0]
    switches = f"{len(result.switches)} switches." if result.switches else ""
    return {
        "label": seen.label,
        "about": f"Seed {result.seed}; means over {result.sample_s:.0f} s, requests as they were then.",
        "switch_text": switches,
        "timeline": timeline(f"time-{index}", result),
        "gaps": "",
        "gap_rows": [],
        "tables": [
            {"what": what, "rows": [(group.name, *group_cells(group)) for group in groups]}
            for what, groups in (("class", seen.classes), ("tenant", seen.tenants))
            if len(groups) > 1
        ],
    }


def timeline(name: str, result: CaseResult) -> str:
    """Arrivals, devices, requests and the layout over time."""
    hours = [sample.t_s / _HOUR_S for sample in result.samples]
    with plots.drawing(name, 5.2) as (figure, out):
        panels: Sequence[Axes] = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1.0, 1.2))
        panels[0].plot(hours, [s.arrivals_per_s for s in result.samples], color=plots.COLORS[0], lw=1.1)
        panels[0].set_ylabel("requests/s")
        _devices(panels[1], hours, result)
        panels[2].plot(
            hours, [s.running for s in result.samples], color=plots.COLORS[2], lw=1.0, label="running"
        )
        panels[2].plot(
            hours, [s.waiting for s in result.samples], color=plots.COLORS[1], lw=1.0, label="waiting"
        )
        panels[2].set_ylabel("requests")
        panels[2].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        for axes in panels:
            axes.set_ylim(bottom=0)
        panels[-1].set_xlim(0, max(result.end_s / _HOUR_S, 1e-6))
        panels[-1].set_xlabel("hours")
    return plots.svg(out)


def _devices(axes: Axes, hours: Sequence[float], result: CaseResult) -> None:
    held = [sample.devices for sample in result.samples]
    busy = [sample.devices * sample.busy for sample in result.samples]
    axes.step(hours, held, where="post", color=plots.COLORS[6], lw=1.2, label="held")
    axes.fill_between(hours, busy, step="post", color=plots.COLORS[4], alpha=0.5, lw=0, label="busy")
    axes.set_ylabel("devices")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
