"""The HTML report: one file with everything inside, which a browser opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from dynamictp.bench.measure import RunFigures
from dynamictp.bench.record import Bench, Run, Slo
from dynamictp.bench.report import plots
from dynamictp.bench.report.rows import GROUP_COLUMNS, group_cells, number, side_by_side
from dynamictp.bench.report.series import SwitchGaps, gaps_around
from dynamictp.bench.report.table import identity
from dynamictp.bench.watcher import changes_of

TEMPLATE = Path(__file__).with_name("page.html.j2")


def render(bench: Bench, figures: Sequence[RunFigures]) -> str:
    """The page's text. `figures` are of the bench's runs, in their order."""
    runs = bench.runs
    return fill(
        title=_title(bench),
        subtitle=_subtitle(bench),
        identity=identity(bench),
        problems=[
            {"label": seen.label, "text": "; ".join(seen.validity.problems)}
            for seen in figures
            if not seen.validity.valid
        ],
        labels=[seen.label for seen in figures],
        rows=side_by_side(figures),
        targets=_targets(bench.slo),
        goodput=plots.goodput_bars("goodput", figures),
        cdfs=plots.cdf_row("all", runs, bench.slo),
        grids=[
            {"what": what, "plot": plots.cdf_grid(what, runs, key, bench.slo)}
            for what, key in (("class", "traffic_class"), ("tenant", "tenant"))
            if len({getattr(r.request, key) for run in runs for r in run.results} - {""}) > 1
        ],
        runs=[_run(i, run, seen, bench.slo) for i, (run, seen) in enumerate(zip(runs, figures, strict=True))],
        columns=GROUP_COLUMNS,
        details=_details(bench),
    )


def fill(**values: object) -> str:
    """The template with these values. Raises jinja2.UndefinedError when one is missing."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(**values)


def _title(bench: Bench) -> str:
    models = dict.fromkeys(Path(run.server.model).name or run.server.model for run in bench.runs)
    return f"Benchmark of {', '.join(models)}: {', '.join(run.label for run in bench.runs)}"


def _subtitle(bench: Bench) -> str:
    first = bench.runs[0]
    work = bench.workload
    classes = ", ".join(f"{item['name']} {item['weight']:g}" for item in work.get("classes", ()))
    count = len(first.results) + first.unsent
    parts = (
        first.started_at,
        f"{count} requests, arrivals {work.get('arrivals')} over {first.load_s:g} s",
        f"classes {classes}",
        f"lengths × {work.get('scale', 1):g}",
        first.client.machine,
        f"dynamictp {bench.version}",
    )
    return " · ".join(parts)


def _targets(slo: Slo) -> str:
    own = [f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s * 1e3:g} ms"]
    own += [f"{name}: {ttft:g} s, {tpot * 1e3:g} ms" for name, (ttft, tpot) in slo.overrides.items()]
    return "; ".join(own)


def _run(index: int, run: Run, seen: RunFigures, slo: Slo) -> dict[str, Any]:
    changes = changes_of(run)
    gaps = [found for change in changes if (found := gaps_around(run, change)) is not None]
    longest = "–" if seen.total.longest_gap_s is None else number(seen.total.longest_gap_s * 1e3)
    polled = sum(not change.exact for change in changes)
    text = f"{len(changes)} switches, shaded." if changes else ""
    if polled:
        text += f" {polled} of them were seen by polling, half a second apart."
    loop = f"Closed loop of {run.users} users. " if run.users else ""
    return {
        "label": run.label,
        "about": f"{loop}A point is a request at the time it was due. Dashed: end of the load.",
        "switch_text": text,
        "timeline": plots.timeline(f"time-{index}", run, slo),
        "gaps": plots.switch_gaps(f"gaps-{index}", gaps) if gaps else "",
        "gap_rows": [(*_gap_row(found), longest) for found in gaps],
        "tables": [
            {"what": what, "rows": [(group.name, *group_cells(group)) for group in groups]}
            for what, groups in (("class", seen.classes), ("tenant", seen.tenants))
            if len(groups) > 1
        ],
    }


def _gap_row(seen: SwitchGaps) -> tuple[str, ...]:
    change = seen.change
    took_ms = (change.end_s - change.start_s) * 1e3
    return (
        f"{change.before} → {change.after}",
        f"{change.start_s:.1f}",
        number(took_ms) if change.exact else f"≤ {number(took_ms)}",
        str(seen.streams),
        number(seen.median_s * 1e3),
        number(seen.longest_s * 1e3),
    )


def _details(bench: Bench) -> list[dict[str, str]]:
    workload = msgspec.yaml.encode(bench.workload, order=None).decode()
    items = [{"name": "The workload", "text": workload}]
    for run in bench.runs:
        facts = {"server": run.server, "client": run.client}
        items.append({"name": f"The server of {run.label}", "text": msgspec.yaml.encode(facts).decode()})
    return items
