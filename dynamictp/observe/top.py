"""The live page's content as a terminal screen. Pure: from answers of the admin interface to a renderable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
OUTCOMES = {
    "": ("under way", "cyan"),
    "committed": ("committed", "green"),
    "closed": ("done", "green"),
    "noop": ("nothing to do", "dim"),
    "failed": ("failed", "red"),
    "cancelled": ("cancelled", "yellow"),
    "rolled_back": ("rolled back", "red"),
}
STATES = {"serving": "green", "draining": "yellow", "failed": "red"}
MOST_SWITCHES = 6
MOST_DECISIONS = 4
LEAST_MS = 0.5
CRASH_SHOWN_S = 600.0


@dataclass
class View:
    """What is known of a server. `points` are the history's columns; the rest are bodies of `/admin/…`."""

    model: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)
    points: dict[str, list[Any]] = field(default_factory=dict)
    switches: Sequence[Mapping[str, Any]] = ()
    decisions: Sequence[Mapping[str, Any]] = ()
    crashes: Mapping[str, Any] = field(default_factory=dict)
    now: float = 0.0
    """Unix time of the server."""
    trouble: str = ""


def spark(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as blocks, from 0 to the largest; a blank where there is none."""
    shown = values[-width:]
    top = max((value for value in shown if value is not None), default=0.0)
    cells = (
        " " if value is None or top <= 0 else BLOCKS[max(1, round(value / top * 8)) if value else 0]
        for value in shown
    )
    return "".join(cells).rjust(width)


def screen(view: View, width: int) -> Group:
    """Everything, for a terminal of that many columns."""
    parts: list[Any] = []
    if view.trouble:
        parts.append(Text(view.trouble, style="bold red"))
    if view.layout:
        parts += [_title(view), _domains(view.layout), _history(view.points, max(20, width - 46))]
    if view.switches:
        parts.append(_switches(view.switches))
    if view.decisions:
        parts.append(_decisions(view.decisions))
    return Group(*parts)


def _title(view: View) -> Text:
    layout = view.layout
    text = Text.assemble(
        ("DynamicTP ", "bold"), view.model, "  ", (layout["observed"] or "loading", "bold cyan"),
        f"  mode {layout['mode']}", ("  pinned" if layout.get("pinned") else "", "yellow"),
    )  # fmt: skip
    switch = layout.get("switch")
    if switch:
        text.append(f"  switching to {switch['to']}: {switch['phase']}", "cyan")
    last = view.crashes.get("last")
    if last and view.now - last <= CRASH_SHOWN_S:
        ended = ", ".join(f"{count} of {name}" for name, count in view.crashes["counts"].items() if count)
        text.append(f"  crashes: {ended}, the last {view.now - last:.0f} s ago", "bold red")
    for alarm in view.decisions[0].get("alarms", ()) if view.decisions else ():
        text.append(f"  {alarm}", "bold red")
    return text


def _domains(layout: Mapping[str, Any]) -> Table:
    table = Table("domain", "shape", "devices", "state", "running", "KV", box=None, pad_edge=False)
    for domain in layout["domains"]:
        cap = domain["kv_pages_cap"]
        table.add_row(
            domain["id"],
            f"{domain['model']}:tp{domain['tp']}" if "models" in layout else f"tp{domain['tp']}",
            ",".join(map(str, domain["devices"])),
            Text(domain["state"], style=STATES.get(domain["state"], "cyan")),
            str(domain["running"]),
            f"{100 * domain['kv_pages_used'] / cap:.0f} %" if cap else "-",
        )
    used = {device for domain in layout["domains"] for device in domain["devices"]}
    for device in layout["devices"]:
        if device["id"] not in used:
            state = f"lease {device['lease']}" if device.get("lease") else device["state"]
            table.add_row("-", "free", str(device["id"]), Text(state, style="dim"), "", "")
    return table


def _history(points: Mapping[str, list[Any]], width: int) -> Table:
    table = Table("", "now", "", box=None, pad_edge=False, show_header=False)
    for title, name, form in (
        ("degree", "degree", "{:.0f}"),
        ("running", "running", "{:.0f}"),
        ("waiting", "waiting", "{:.0f}"),
        ("tokens/s", "tokens", "{:.0f}"),
        ("requests/s", "arrivals", "{:.1f}"),
        ("first token P95, short, s", "ttft_short", "{:.2f}"),
        ("first token P95, long, s", "ttft_long", "{:.2f}"),
        ("between tokens P95, s", "itl", "{:.3f}"),
        ("KV share", "kv", "{:.2f}"),
    ):
        values = points.get(name, [])
        now = values[-1] if values else None
        table.add_row(
            title, "-" if now is None else form.format(now), Text(spark(values, width), style="blue")
        )
    return table


def _switches(switches: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("switch", "outcome", "reason", "ms", "phases", box=None, pad_edge=False)
    for switch in switches[:MOST_SWITCHES]:
        phases = {name: ms for name, ms in (switch.get("phases_ms") or {}).items() if ms is not None}
        word, style = OUTCOMES.get(switch["outcome"], (switch["outcome"], ""))
        table.add_row(
            f"{switch['from']} → {switch['to']}",
            Text(word, style=style),
            switch["reason"],
            f"{sum(phases.values()):.0f}",
            Text(switch.get("error") or _told(phases), style="dim"),
        )
    return table


def _told(phases: Mapping[str, float]) -> str:
    """Phases that took time, in short words."""
    return " ".join(
        f"{name.removeprefix('prepare_')} {ms:.0f}" for name, ms in phases.items() if ms >= LEAST_MS
    )


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("planner", "", "figures", box=None, pad_edge=False)
    runs = [list(run) for _, run in groupby(decisions, key=lambda one: (one["reason"], one["wanted"]))]
    for run in runs[:MOST_DECISIONS]:
        first = run[0]
        target = f"→ {first['target']}" if first.get("target") else ""
        figures = list(first.get("figures", {}).items())[:6]
        table.add_row(
            f"{first['reason']} {target}",
            f"{len(run)}×" if len(run) > 1 else "",
            Text(" ".join(f"{name} {value:.3g}" for name, value in figures), style="dim"),
        )
    return table
