"""The figures drawn: tables for the terminal, and Markdown for the documentation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamictp.bench.figures_record import Figures
from dynamictp.bench.figures_sheets import Sheet, sheets, states

NOTES = (
    "Through HTTP, from a client on the same machine at lower priority. TPOT: median over streams, then"
    " over rounds. Throughput: output tokens from the first request sent to the last token, prefill"
    " included. Compare rows of one block; blocks in different memory states, or beside other busy"
    " processes, don't compare.",
)


def render(figures: Figures) -> RenderableType:
    """The whole report for a terminal."""
    parts: list[RenderableType] = [Text(line) for line in headline(figures)]
    for sheet in sheets(figures):
        parts.append(_table(sheet))
        parts += [Text(f"  {note}", style="dim") for note in sheet.notes]
    if figures.kernels is not None:
        parts.append(Text(f"\n{_kernels_title(figures)}", style="italic"))
        parts += [Text(f"  {line}") for line in figures.kernels.figures.lines]
    return Group(*parts, *(Text(note, style="dim") for note in NOTES))


def markdown(figures: Figures) -> str:
    """The same as a section of a Markdown page: what was measured where and when, then a table per sheet."""
    parts = ["  \n".join(headline(figures))]
    parts += [_markdown_sheet(sheet) for sheet in sheets(figures)]
    if figures.kernels is not None:
        lines = "\n".join(figures.kernels.figures.lines)
        parts.append(f"### {_kernels_title(figures)}\n\n```\n{lines}\n```")
    return "\n\n".join((*parts, *NOTES)) + "\n"


def headline(figures: Figures) -> Iterator[str]:
    """Machine, build, flags, and the memory states that the blocks saw."""
    yield str(figures.machine)
    if figures.build is not None:
        yield str(figures.build)
    if figures.flags:
        yield f"server flags: {' '.join(figures.flags)}"
    blocks = [block for _, block in figures.blocks()]
    names = sorted({state.name for block in blocks for state in (block.before, block.after)})
    if names:
        repeated = sum(block.repeated for block in blocks)
        flips = f"; {repeated} repeated because it flipped" if repeated else ""
        yield f"memory state: {' and '.join(names)}{flips}"


def _kernels_title(figures: Figures) -> str:
    assert figures.kernels is not None
    return f"The kernels by themselves, in-process ({states(figures.kernels)})"


def _table(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left", box=SIMPLE_HEAD)
    first, *others = sheet.columns
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    return table


def _markdown_sheet(sheet: Sheet) -> str:
    rule = ["---", *("--:" for _ in sheet.columns[1:])]
    lines = [f"### {sheet.title}", "", *map(_markdown_row, (sheet.columns, rule, *sheet.rows))]
    return "\n".join(lines + [part for note in sheet.notes for part in ("", note)])


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
