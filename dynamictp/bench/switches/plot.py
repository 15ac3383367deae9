"""The study of switches as one SVG: how soon each took effect, the longest gap at each, all gaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from dynamictp.bench.report.plots import COLORS, GREY, drawing, log_ticks, svg
from dynamictp.bench.switches.outcome import COMMIT_MS, EFFECT_MS, Outcome, SwitchFigures

_LEAST_MS = 0.01
_LEAST_GAP_MS = 1.0
_HEADROOM = 1.25
"""Of an axis, for its legend."""


def plot(outcome: Outcome) -> str:
    """An SVG document."""
    with drawing("switches", 7.2) as (figure, out):
        panels = figure.subplot_mosaic([["effects", "effects"], ["longest", "gaps"]])
        _effects(panels["effects"], outcome.switches)
        _longest(panels["longest"], outcome.switches)
        _curves(panels["gaps"], outcome)
    return svg(out)


def _effects(axes: Axes, switches: Sequence[SwitchFigures]) -> None:
    for label, color, marker, found in (
        ("decision to first admitted", COLORS[0], "o", [(s.effect_ms, s.effect_seen) for s in switches]),
        ("decision to open", COLORS[2], "s", [(s.committed_ms, True) for s in switches]),
        ("commit", COLORS[1], "D", [(s.phases_ms.get("commit"), True) for s in switches]),
    ):
        seen = [(i, ms) for i, (ms, known) in enumerate(found, 1) if ms is not None and known]
        _points(axes, seen, color, marker, label)
        unmet = [(i, ms) for i, (ms, known) in enumerate(found, 1) if ms is not None and not known]
        _points(axes, unmet, color, "^", "no request before the next switch")
    axes.axhline(EFFECT_MS, color=COLORS[0], ls=":", lw=1.2)
    axes.axhline(COMMIT_MS, color=COLORS[1], ls=":", lw=1.2)
    axes.set_yscale("log")
    log_ticks(axes.yaxis, axes.get_ylim())
    axes.set_title("How soon each switch took effect (dotted: limits of the 99th percentile)")
    axes.set_xlabel("switch")
    axes.set_ylabel("ms")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handletextpad=0.2)


def _points(axes: Axes, seen: Sequence[tuple[int, float]], color: str, marker: str, label: str) -> None:
    if seen:
        x, y = zip(*seen, strict=True)
        axes.scatter(x, np.maximum(y, _LEAST_MS), s=11, color=color, marker=marker, lw=0, label=label)


def _longest(axes: Axes, switches: Sequence[SwitchFigures]) -> None:
    met = [(i, switch.gap) for i, switch in enumerate(switches, 1) if switch.gap is not None]
    if met:
        x = [i for i, _ in met]
        axes.scatter(
            x, [gap.limit_s * 1e3 for _, gap in met], s=14, color=GREY, marker="_", label="its limit"
        )
        longest = [gap.longest_s * 1e3 for _, gap in met]
        axes.scatter(x, longest, s=9, color=COLORS[0], lw=0, label="longest gap of a stream")
        highest = max(max(gap.limit_s, gap.longest_s) for _, gap in met) * 1e3
        axes.set_ylim(0, highest * _HEADROOM)
        axes.legend(loc="upper right", ncols=2, handletextpad=0.2)
    axes.set_title("The stream closest to its limit, at each switch")
    axes.set_xlabel("switch")
    axes.set_ylabel("ms")


def _curves(axes: Axes, outcome: Outcome) -> None:
    for color, play in zip(COLORS, (outcome.switching, *outcome.controls), strict=False):
        if play.curve:
            x, y = zip(*play.curve, strict=True)
            label = play.label if play is outcome.switching else f"{play.label}, no switch"
            axes.plot(np.array(x) * 1e3, np.array(y) * 100, color=color, lw=1.5, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=_LEAST_GAP_MS)
    log_ticks(axes.xaxis, axes.get_xlim())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title("Gaps between chunks, all streams")
    axes.set_xlabel("ms")
    axes.set_ylabel("% of gaps at least as long")
    axes.legend(loc="lower left")
