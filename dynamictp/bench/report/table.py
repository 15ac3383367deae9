"""A benchmark as tables on the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dynamictp.bench.measure import Group, RunFigures
from dynamictp.bench.record import Bench
from dynamictp.bench.report.rows import GROUP_COLUMNS, Row, group_cells, side_by_side


def render(bench: Bench, figures: Sequence[RunFigures]) -> RenderableType:
    """Side by side, then classes and tenants of each run."""
    labels = [run.label for run in figures]
    parts: list[RenderableType] = [rows_table(labels, side_by_side(figures))]
    for run in figures:
        for what, groups in (("class", run.classes), ("tenant", run.tenants)):
            if len(groups) > 1:
                parts.append(groups_table(f"{run.label}, by {what}; latencies in ms", what, groups))
    parts.append(Text(identity(bench), style="dim"))
    return Lines(*parts)


def identity(bench: Bench) -> str:
    """What makes two benchmarks comparable."""
    lengths = {
        "server": "prompt lengths counted by the server's tokenizer",
        "file": "prompt lengths counted by a tokenizer file, without the server's chat template",
        "approximate": "prompt lengths approximate: the server tells no tokens",
    }[bench.exactness]
    parts = [
        f"seed {bench.seed}, plan {bench.plan_digest[:12]}, schedule {bench.schedule_digest[:12]}",
        lengths,
        "[low–high]: 95 % interval (bootstrap; of shares: Wilson's)",
    ]
    if bench.shortened:
        parts.insert(2, f"{bench.shortened} requests shortened to the model's context")
    if bench.lengthened:
        parts.insert(
            2, f"{bench.lengthened} prompts longer than planned, as short as the chat template allows"
        )
    return "; ".join(parts) + "."


def rows_table(labels: Sequence[str], rows: Sequence[Row]) -> Table:
    """A column for each label."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for label in labels:
        table.add_column(label, justify="right")
    for row in rows:
        if row.heading:
            table.add_section()
            table.add_row(Text(row.name, style="bold"))
        else:
            cells = (Text(cell, style="bold red" if "INVALID" in cell else "") for cell in row.cells)
            table.add_row(f"  {row.name}", *cells)
    return table


def groups_table(title: str, what: str, groups: Sequence[Group]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(what)
    for name in GROUP_COLUMNS:
        table.add_column(name, justify="right")
    for group in groups:
        table.add_row(group.name, *group_cells(group))
    return table
