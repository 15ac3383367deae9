"""The figures as tables and as plain values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamictp.bench.accuracy import ClientFigures
from dynamictp.bench.blocks import Block, DecodePoint, PrefillPoint, SwitchFigures
from dynamictp.bench.machine import Machine
from dynamictp.bench.stats import Quantiles

NOTES = (
    "Through HTTP, from a client on the same machine at lower priority. TPOT: median over streams, then"
    " over rounds. Throughput: output tokens from the first request sent to the last token, prefill"
    " included. Compare rows of one block; blocks in different memory states, or beside other busy"
    " processes, don't compare.",
)


# From here on other work on the machine is worth a word beside the figures.
_BUSY_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything one run measured; None or empty where a part was not asked for."""

    machine: Machine
    start_s: Block[Quantiles] | None
    decode: tuple[Block[list[DecodePoint]], ...]
    prefill: Block[list[PrefillPoint]] | None
    switch: Block[SwitchFigures] | None
    client: Block[ClientFigures] | None = None


def as_json(figures: Figures) -> Mapping[str, Any]:
    """Plain values; the criterion's verdict and the state's name are spelled out."""
    plain: dict[str, Any] = msgspec.to_builtins(figures)
    blocks: list[tuple[Any, Block[Any]]] = list(zip(plain["decode"], figures.decode, strict=True))
    for name, block in (
        ("start_s", figures.start_s),
        ("prefill", figures.prefill),
        ("switch", figures.switch),
        ("client", figures.client),
    ):
        if block is not None:
            blocks.append((plain[name], block))
    for target, block in blocks:
        target["state_before"], target["state_after"] = block.before.name, block.after.name
    if figures.switch is not None:
        plain["switch"]["figures"]["held"] = figures.switch.figures.held
    if figures.client is not None:
        plain["client"]["figures"]["held"] = figures.client.figures.held
    return plain


def render(figures: Figures) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = [Text(str(figures.machine))]
    if figures.decode:
        parts.append(_decode_table(figures.decode))
    if figures.prefill is not None:
        parts.append(_prefill_table(figures.prefill))
    if figures.switch is not None:
        parts += [_phase_table(figures.switch), _gap_table(figures.switch.figures)]
    if figures.client is not None:
        parts.append(_client_table(figures.client))
    if figures.start_s is not None:
        start = figures.start_s.figures
        parts.append(Text(f"start to ready: {start.p50:.2f} s (median of {start.count})"))
    return Group(*parts, *(Text(note, style="dim") for note in NOTES))


def states(block: Block[Any]) -> str:
    """The machine's state around a block, in a few characters."""
    before, after = block.before, block.after
    text = f"{before.name} {before.two_gbps:.0f}/{after.two_gbps:.0f} GB/s"
    busy_cores = max(before.busy_cores, after.busy_cores)
    if busy_cores >= _BUSY_CORES:
        text += f", {busy_cores:.1f} cores busy"
    return f"{text} (flipped to {after.name})" if block.flipped else text


def _table(title: str, left: str, right: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(left)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _decode_table(blocks: Iterable[Block[list[DecodePoint]]]) -> Table:
    columns = ("layout", "TPOT ms", "tokens/s", "against tp1", "memory before/after")
    table = _table("Decode, 64 tokens in, 64 out", "streams", columns)
    for block in blocks:
        base = block.figures[0].tokens_per_s
        for point in block.figures:
            table.add_row(
                str(point.streams),
                point.layout,
                f"{point.tpot_ms:.1f}",
                f"{point.tokens_per_s:.0f}",
                f"{point.tokens_per_s / base:.2f}×",
                states(block),
            )
    return table


def _prefill_table(block: Block[list[PrefillPoint]]) -> Table:
    table = _table(
        "Prefill of 1,000 tokens, TTFT ms", "layout", ("median", "max", "runs", "memory before/after")
    )
    for point in block.figures:
        ttft = point.ttft_ms
        table.add_row(point.layout, f"{ttft.p50:.0f}", f"{ttft.max:.0f}", str(ttft.count), states(block))
    return table


def _phase_table(block: Block[SwitchFigures]) -> Table:
    figures = block.figures
    title = f"{len(figures.switches)} switches under load, ms ({states(block)})"
    table = _table(title, "phase", ("median", "max"))
    for name, phase in figures.phases_ms.items():
        table.add_row(name, f"{phase.p50:.1f}", f"{phase.max:.1f}")
    table.add_row("request to closed (client)", f"{figures.total_ms.p50:.1f}", f"{figures.total_ms.max:.1f}")
    return table


def _gap_table(figures: SwitchFigures) -> Table:
    table = _table("Longest gap in any stream, ms", "play", ("gap", "verdict"))
    for layout, gap_s in figures.gap_without_s.items():
        table.add_row(f"no switch, {layout}", f"{gap_s * 1e3:.0f}", "")
    failed = f", {figures.failures} of {figures.requests} requests failed" if figures.failures else ""
    verdict = "criterion held" if figures.held else f"criterion missed{failed}"
    table.add_row("with switches", f"{figures.gap_with_s * 1e3:.0f}", verdict)
    if figures.verdicts:
        worst = max(figures.verdicts, key=lambda item: item.longest_s / item.limit_s)
        limit = f"limit {worst.limit_s * 1e3:.0f}"
        table.add_row("closest to its limit during a switch", f"{worst.longest_s * 1e3:.0f}", limit)
    return table


def _client_table(block: Block[ClientFigures]) -> RenderableType:
    """Errors of the load client's stamps and token gaps against a server that says when each token left, how
    late it sent, and its share of a core.
    """
    figures = block.figures
    columns = ("error P50", "P99", "max", "gap P50", "late P50", "sent", "core")
    table = _table(f"The load client, ms ({states(block)})", "load", columns)
    for name, seen in (
        (f"{figures.streams.requests} streams", figures.streams),
        (f"{figures.rate_per_s:.0f} requests/s", figures.rate),
    ):
        error, gap, p99 = seen.token_error, seen.gap_error, seen.token_error.p99
        table.add_row(
            name,
            f"{error.p50.value * 1e3:.2f}",
            "-" if p99 is None else f"{p99.value * 1e3:.2f}",
            f"{error.max * 1e3:.1f}",
            "-" if gap is None else f"{gap.p50.value * 1e3:.2f}",
            f"{seen.dispatch.p50.value * 1e3:.2f}",
            f"{seen.requests}",
            f"{seen.cpu_share:.0%}",
        )
    stall = (
        f"{figures.stalled} requests due while the server stood still for a second: mean TTFT"
        f" {figures.stall_ttft_mean_s * 1e3:.0f} ms (nothing omitted: {figures.stall_expected_s * 1e3:.0f})"
    )
    return Group(table, Text(stall), Text("accurate" if figures.held else "NOT accurate enough"), Text(""))
