"""The report's plots as SVG text. matplotlib without pyplot: no global figure, no window, no state."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from dynamictp.bench.measure import RunFigures
from dynamictp.bench.record import Run, Slo
from dynamictp.bench.report.series import Metric, SwitchGaps, distribution, points, rates
from dynamictp.bench.result import Result
from dynamictp.bench.watcher import changes_of, spans_of

# Okabe and Ito's palette: distinct for colour-blind readers too.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#8b6f00")
_LAYOUT_COLORS = ("#dbe9f6", "#fde3cf", "#d9f0e3", "#f3dfeb", "#e8e8e8", "#fbf1c7")
GREY, _GRID = "#666666", "#e6e6e6"
_STYLE: dict[Any, object] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
_WIDTH_IN = 11.0

METRICS: Mapping[str, Metric] = {
    "TTFT": lambda result: result.ttft_s,
    "TPOT": lambda result: result.tpot_s,
    "E2E": lambda result: result.e2e_s,
}


Curve = tuple[str, Sequence[float], Sequence[float]]
"""(label, values ascending, share of requests at or below)."""


@contextmanager
def drawing(name: str, height_in: float) -> Iterator[tuple[Figure, io.StringIO]]:
    """A figure that becomes SVG text when the block ends. `name` keeps ids apart on one page."""
    out = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        yield figure, out
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=empty)


def svg(out: io.StringIO) -> str:
    """Without the XML prologue, which has no place inside HTML, and wide as its column."""
    text = out.getvalue()
    return text[text.index("<svg") :].replace("<svg ", '<svg class="plot" ', 1)


def cdf_row(name: str, runs: Sequence[Run], slo: Slo) -> str:
    """TTFT, TPOT and E2E of all requests, a line per run."""
    return cdf_curves(
        name, {metric: _curves(metric, [(run.label, run.results) for run in runs]) for metric in METRICS}, slo
    )


def cdf_curves(name: str, curves: Mapping[str, Sequence[Curve]], slo: Slo) -> str:
    """A panel per metric, a line per curve. Seconds."""
    with drawing(name, 3.0) as (figure, out):
        for axes, metric in zip(figure.subplots(1, len(curves), sharey=True), curves, strict=True):
            _cdf(axes, curves[metric], _target(metric, slo))
            axes.set_title(metric)
        _legend(figure, len(next(iter(curves.values()))))
    return svg(out)


def cdf_grid(name: str, runs: Sequence[Run], key: str, slo: Slo) -> str:
    """TTFT and TPOT, a column per class or tenant (`key` names the request's field), a line per run."""
    values = sorted({getattr(result.request, key) for run in runs for result in run.results} - {""})
    with drawing(name, 5.2) as (figure, out):
        grid = figure.subplots(2, len(values), sharey=True, squeeze=False)
        for column, value in enumerate(values):
            chosen = [
                (run.label, [r for r in run.results if getattr(r.request, key) == value]) for run in runs
            ]
            own = Slo(*slo.overrides.get(value, (slo.ttft_s, slo.tpot_s)))
            for axes, metric in zip(grid[:, column], ("TTFT", "TPOT"), strict=True):
                _cdf(axes, _curves(metric, chosen), _target(metric, own))
                axes.set_title(f"{value}: {metric}")
        _legend(figure, len(runs))
    return svg(out)


def _curves(metric: str, groups: Sequence[tuple[str, Sequence[Result]]]) -> list[Curve]:
    found = []
    for label, results in groups:
        values, shares = distribution(results, METRICS[metric])
        found.append((label, values.tolist(), shares.tolist()))
    return found


def _cdf(axes: Axes, curves: Sequence[Curve], target_s: float | None) -> None:
    for color, (label, values, shares) in zip(_cycle(len(curves)), curves, strict=True):
        if len(values):
            axes.step(np.maximum(values, 1e-4) * 1e3, shares, where="post", color=color, label=label, lw=1.6)
    if target_s is not None:
        axes.axvline(target_s * 1e3, color=GREY, ls=":", lw=1.2)
    axes.set_xscale("log")
    log_ticks(axes.xaxis, axes.get_xlim())
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_xlabel("ms")


def goodput_bars(name: str, figures: Sequence[RunFigures]) -> str:
    """Goodput of each run, and of its classes and tenants, with intervals."""
    seen = [
        {
            (kind, group.name): group.goodput
            for kind, groups in (("all", (run.total,)), ("class", run.classes), ("tenant", run.tenants))
            for group in groups
        }
        for run in figures
    ]
    names = list(dict.fromkeys(key for run in seen for key in run))
    with drawing(name, 2.8) as (figure, out):
        axes = figure.subplots()
        width = 0.8 / len(figures)
        for i, (color, run) in enumerate(zip(_cycle(len(figures)), figures, strict=True)):
            for x, key in enumerate(names):
                goodput = seen[i].get(key)
                if goodput is None:
                    continue
                at = x + (i - (len(figures) - 1) / 2) * width
                label = run.label if x == 0 else None
                axes.bar(at, goodput.value * 100, width * 0.92, color=color, label=label)
                spread = [[(goodput.value - goodput.low) * 100], [(goodput.high - goodput.value) * 100]]
                axes.errorbar(at, goodput.value * 100, yerr=spread, color="#222222", lw=1, capsize=2)
        axes.set_xticks(
            range(len(names)), [text if kind == "all" else f"{kind} {text}" for kind, text in names]
        )
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, 105)
        axes.set_ylabel("% within both targets")
        _legend(figure, len(figures))
    return svg(out)


def timeline(name: str, run: Run, slo: Slo) -> str:
    """Latency, throughput and running requests over time, the layout and its switches under them."""
    spans = spans_of(run)
    heights = [1.5, 1.3, 1.3, 1.1, *([0.35] if spans else [])]
    with drawing(name, sum(heights) * 1.35) as (figure, out):
        panels: Sequence[Axes] = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        _latency_over_time(panels[0], run, "TTFT", slo.ttft_s)
        _latency_over_time(panels[1], run, "TPOT", slo.tpot_s)
        _throughput(panels[2], run)
        _running(panels[3], run)
        for axes in panels:
            axes.axvline(run.load_s, color=GREY, lw=0.8, ls="--")
            for change in changes_of(run):
                axes.axvspan(
                    change.start_s,
                    max(change.end_s, change.start_s + 0.02),
                    color="#d55e00",
                    alpha=0.25,
                    lw=0,
                )
        if spans:
            _layout_strip(panels[-1], run)
        panels[-1].set_xlim(0, max(run.end_s, run.load_s))
        panels[-1].set_xlabel("seconds")
        figure.align_ylabels(panels)
    return svg(out)


def _latency_over_time(axes: Axes, run: Run, metric: str, target_s: float) -> None:
    """A point per finished request at the time it was due, by class; failures as crosses at the top."""
    classes = sorted({result.request.traffic_class for result in run.results})
    for color, name in zip(_cycle(len(classes)), classes, strict=True):
        stamped = [
            (result.intended_s, value)
            for result in run.results
            if result.failure is None
            and result.request.traffic_class == name
            and (value := METRICS[metric](result)) is not None
        ]
        if stamped:
            x, y = points([t for t, _ in stamped], [value * 1e3 for _, value in stamped])
            axes.scatter(x, np.maximum(y, 0.1), s=9, color=color, alpha=0.7, lw=0, label=name or None)
    failed = [r.intended_s for r in run.results if r.failure is not None and not r.cut]
    if failed and metric == "TTFT":
        axes.scatter(
            failed, [0.97] * len(failed), marker="x", s=20, color="#c00000", lw=1.2, label="failed",
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    axes.axhline(target_s * 1e3, color=GREY, ls=":", lw=1.2)
    axes.set_yscale("log")
    log_ticks(axes.yaxis, axes.get_ylim())
    axes.set_ylabel(f"{metric}, ms")
    if metric == "TTFT" and any(classes):
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handletextpad=0.2)


def _throughput(axes: Axes, run: Run) -> None:
    seen = rates(run)
    for values, color, label in (
        (seen.prefill_per_s, COLORS[4], "prompts"),
        (seen.decode_per_s, COLORS[0], "output"),
    ):
        axes.step(seen.edges_s, values, where="post", color=color, lw=1.3, label=label)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _running(axes: Axes, run: Run) -> None:
    seen = rates(run)
    axes.fill_between(seen.edges_s, seen.running, step="post", color="#bbbbbb", lw=0, label="running")
    if any(sample.waiting for sample in run.samples):
        waiting = [(sample.t_s, sample.waiting) for sample in run.samples]
        axes.plot(*zip(*waiting, strict=True), color=COLORS[1], lw=1.2, label="waiting")
    axes.set_ylabel("requests")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _layout_strip(axes: Axes, run: Run) -> None:
    names = list(dict.fromkeys(span.layout for span in spans_of(run)))
    for span in spans_of(run):
        color = _LAYOUT_COLORS[names.index(span.layout) % len(_LAYOUT_COLORS)]
        axes.broken_barh([(span.start_s, span.end_s - span.start_s)], (0, 1), facecolors=color, zorder=0)
        if span.end_s - span.start_s > run.end_s / 30:
            middle = (span.start_s + span.end_s) / 2
            axes.text(middle, 0.5, span.layout, ha="center", va="center", fontsize=8)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_ylabel("layout", rotation=0, ha="right", va="center")


def switch_gaps(name: str, gaps: Sequence[SwitchGaps]) -> str:
    """Gaps of running streams around each switch, aligned at its start."""
    with drawing(name, 2.6) as (figure, out):
        axes = figure.subplots()
        for color, seen in zip(_cycle(len(gaps)), gaps, strict=True):
            change = seen.change
            x, y = points(seen.offsets_s.tolist(), (seen.gaps_s * 1e3).tolist())
            label = f"{change.before} → {change.after} at {change.start_s:.0f} s"
            axes.scatter(x, np.maximum(y, 0.1), s=8, color=color, alpha=0.55, lw=0, label=label)
            axes.axvspan(0, change.end_s - change.start_s, color=color, alpha=0.08, lw=0)
        axes.axvline(0, color=GREY, lw=1)
        axes.set_yscale("log")
        log_ticks(axes.yaxis, axes.get_ylim())
        axes.set_xlabel("seconds after the switch began")
        axes.set_ylabel("gap between chunks, ms")
        if len(gaps) <= 12:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handletextpad=0.2)
    return svg(out)


def _target(metric: str, slo: Slo) -> float | None:
    return {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s}.get(metric)


def _cycle(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _legend(figure: Figure, runs: int) -> None:
    """One legend above all panels, where there is more than one run to tell apart."""
    if runs > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(runs, 6))


def log_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Plain numbers, and enough of them where the axis spans little more than a decade."""
    decades = np.log10(limits[1] / limits[0])
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades < 1 else (1.0, 2.0, 5.0) if decades < 2 else (1.0, 3.0)
    axis.set_major_locator(LogLocator(subs=subs if decades < 4 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(_plain_number))
    axis.set_minor_locator(NullLocator())


def _plain_number(value: float, _position: object = None) -> str:
    return f"{value:g}" if value < 1000 else f"{value:,.0f}"
