"""The figures as sheets: titles, columns and cells of text, whatever draws them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dynamictp.bench.accuracy import ClientFigures
from dynamictp.bench.blocks import (
    DEGREES,
    LAYOUTS,
    OTHER,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Block,
    DecodePoint,
    PrefillPoint,
    SwitchFigures,
)
from dynamictp.bench.figures_record import Figures
from dynamictp.bench.metrics_cost import LEAST_RATIO, MetricsCost
from dynamictp.bench.roofline import DecodeBytes, roofline_ms

# From here on other work on the machine is worth a word beside the figures.
_BUSY_CORES = 0.1
# A single stream's TPOT ÷ roofline may be so large: by layout and memory state.
_ROOFLINE_LIMITS = {("tp1", "A"): 1.2, ("tp1", "B"): 1.2, ("tp2", "A"): 1.3, ("tp2", "B"): 1.5}
# Context in the middle of a decode that counts from its second token.
_MEAN_CONTEXT = PROMPT_TOKENS + OUTPUT_TOKENS / 2


@dataclass(frozen=True, slots=True)
class Sheet:
    """The first column names the row, the others hold its figures. `notes` are sentences below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def sheets(figures: Figures) -> Iterator[Sheet]:
    """All sheets of what was measured, in the order of reading."""
    if figures.decode:
        yield _decode(figures.decode)
        if figures.bytes_read is not None:
            yield from _roofline(figures.decode, figures.bytes_read)
        yield from _split(figures.decode)
    if figures.prefill is not None:
        yield _prefill(figures.prefill)
    if figures.rival is not None:
        yield _compared(figures)
    if figures.switch is not None:
        yield _phases(figures.switch)
        yield _gaps(figures.switch.figures)
    if figures.client is not None:
        yield _client(figures.client)
    if figures.metrics is not None:
        yield _metrics(figures.metrics)
    if figures.start_s is not None:
        start = figures.start_s.figures
        row = (f"{start.p50:.2f}", f"{start.max:.2f}", str(start.count), states(figures.start_s))
        yield Sheet("Start to ready, s", ("", "median", "max", "runs", "memory"), (("tp1", *row),))


def states(block: Block[Any]) -> str:
    """The machine's state around a block, in a few characters."""
    before, after = block.before, block.after
    text = f"{before.name} {before.two_gbps:.0f}/{after.two_gbps:.0f} GB/s"
    busy_cores = max(before.busy_cores, after.busy_cores)
    if busy_cores >= _BUSY_CORES:
        text += f", {busy_cores:.1f} cores busy"
    return f"{text} (flipped to {after.name})" if block.flipped else text


def _decode(blocks: Sequence[Block[list[DecodePoint]]]) -> Sheet:
    rows = []
    for block in blocks:
        base = block.figures[0].tokens_per_s
        for point in block.figures:
            against = f"{point.tokens_per_s / base:.2f}×"
            steady = "-" if point.steady_tokens_per_s is None else f"{point.steady_tokens_per_s:.0f}"
            rows.append(
                (str(point.streams), point.layout, f"{point.tpot_ms:.1f}", f"{point.tokens_per_s:.0f}",
                 against, steady, states(block))
            )  # fmt: skip
    columns = ("streams", "layout", "TPOT ms", "tokens/s", "against tp1", "decoding", "memory before/after")
    note = (
        "tokens/s: output tokens from the first request sent to the last token, prefill included; decoding:"
        " output tokens per second while all streams decode, which compares with the kernels by themselves."
    )
    return Sheet(f"Decode, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out", columns, tuple(rows), (note,))


def _roofline(blocks: Sequence[Block[list[DecodePoint]]], read: DecodeBytes) -> Iterator[Sheet]:
    rows = []
    for block in blocks:
        for point in block.figures:
            if point.streams != 1 or point.layout == OTHER:
                continue
            # Both looks count: the block lies between them.
            limit_ms = roofline_ms(
                read.step(_MEAN_CONTEXT), (block.before, block.after), DEGREES[point.layout]
            )
            limit = _ROOFLINE_LIMITS[point.layout, block.before.name]
            rows.append(
                (point.layout, f"{limit_ms:.2f}", f"{point.tpot_ms:.2f}", f"{point.tpot_ms / limit_ms:.2f}",
                 f"≤ {limit}", states(block))
            )  # fmt: skip
    if rows:
        note = (
            f"{read.weights / 1e6:.0f} MB of weights and {read.kv_per_token / 1e3:.0f} kB of keys and values"
            f" per token of context, {_MEAN_CONTEXT:.0f} tokens on average, ÷ what one core (tp1) or two"
            " together (tp2) read per second in the same state."
        )
        columns = ("layout", "roofline ms", "TPOT ms", "TPOT ÷ roofline", "wanted", "memory before/after")
        yield Sheet("One stream against the roofline", columns, tuple(rows), (note,))


def _split(blocks: Sequence[Block[list[DecodePoint]]]) -> Iterator[Sheet]:
    rows = []
    for block in blocks:
        for point in block.figures:
            split, engine = point.split, point.engine_us
            if split is None:
                continue
            rows.append(
                (f"{point.streams}, {point.layout}", f"{split.step_ms:.2f}", f"{split.weights_ms:.2f}",
                 f"{split.attention_ms:.2f}", f"{split.wait_ms:.2f} ({split.wait_share:.0%})",
                 f"{split.other_ms:.2f}", f"{split.host_ms:.2f} ({split.host_share:.0%})",
                 "-" if engine is None else f"{engine:.0f}")
            )  # fmt: skip
    if rows:
        columns = ("streams, layout", "step", "weights", "attention", "wait", "other", "host", "engine µs")
        note = (
            "Means over decode steps, on rank 0: step = weights + attention + wait + other; host passes"
            " between two steps, its share is of both. Engine time runs beside the step; median per step."
        )
        yield Sheet("Where a decode step's time goes, ms", columns, tuple(rows), (note,))


def _prefill(block: Block[list[PrefillPoint]]) -> Sheet:
    rows = tuple(
        (p.layout, f"{p.ttft_ms.p50:.0f}", f"{p.ttft_ms.max:.0f}", str(p.ttft_ms.count), states(block))
        for p in block.figures
    )
    columns = ("layout", "median", "max", "runs", "memory before/after")
    return Sheet("Prefill of 1,000 tokens, TTFT ms", columns, rows)


def _compared(figures: Figures) -> Sheet:
    """Ours ÷ the other server's: below 1 is better for times, above 1 for throughput."""
    assert figures.rival is not None
    rows: list[tuple[str, ...]] = []
    for block in figures.decode:
        points = {point.layout: point for point in block.figures}
        streams = block.figures[0].streams
        tpot_ms = {name: point.tpot_ms for name, point in points.items()}
        rate = {name: point.tokens_per_s for name, point in points.items()}
        rows.append(_ratios(f"TPOT ms, streams: {streams}", tpot_ms, 1, states(block)))
        rows.append(_ratios(f"tokens/s, streams: {streams}", rate, 0, states(block)))
    if figures.prefill is not None:
        ttft_ms = {point.layout: point.ttft_ms.p50 for point in figures.prefill.figures}
        rows.append(_ratios("TTFT ms, prefill of 1,000", ttft_ms, 0, states(figures.prefill)))
    rival = figures.rival
    version = f", version {rival.version}" if rival.version else ""
    notes = [f"The other server: {rival.model}{version}; {rival.form}. Turns alternate within each round."]
    if rival.short:
        notes.append("It ended some outputs early.")
    columns = ("", "other", "tp1", "tp1 ÷ other", "tp2", "tp2 ÷ other", "memory before/after")
    return Sheet("Against another server", columns, tuple(rows), tuple(notes))


def _ratios(title: str, values: dict[str, float], digits: int, memory: str) -> tuple[str, ...]:
    other = values[OTHER]
    cells = [f"{other:.{digits}f}"]
    for layout in LAYOUTS:
        cells += [f"{values[layout]:.{digits}f}", f"{values[layout] / other:.2f}×"]
    return (title, *cells, memory)


def _phases(block: Block[SwitchFigures]) -> Sheet:
    figures = block.figures
    rows = [(name, f"{phase.p50:.1f}", f"{phase.max:.1f}") for name, phase in figures.phases_ms.items()]
    total = figures.total_ms
    rows.append(("request to closed (client)", f"{total.p50:.1f}", f"{total.max:.1f}"))
    title = f"{len(figures.switches)} switches under load, ms ({states(block)})"
    return Sheet(title, ("phase", "median", "max"), tuple(rows))


def _gaps(figures: SwitchFigures) -> Sheet:
    rows = [
        (f"no switch, {layout}", f"{gap_s * 1e3:.0f}", "") for layout, gap_s in figures.gap_without_s.items()
    ]
    failed = f", {figures.failures} of {figures.requests} requests failed" if figures.failures else ""
    verdict = "criterion held" if figures.held else f"criterion missed{failed}"
    rows.append(("with switches", f"{figures.gap_with_s * 1e3:.0f}", verdict))
    if figures.verdicts:
        worst = max(figures.verdicts, key=lambda item: item.longest_s / item.limit_s)
        limit = f"limit {worst.limit_s * 1e3:.0f}"
        rows.append(("closest to its limit during a switch", f"{worst.longest_s * 1e3:.0f}", limit))
    return Sheet("Longest gap in any stream, ms", ("play", "gap", "verdict"), tuple(rows))


def _client(block: Block[ClientFigures]) -> Sheet:
    """Errors of the load client's stamps and token gaps against a server that says when each token left, how
    late it sent, and its share of a core.
    """
    figures = block.figures
    rows = []
    for name, seen in (
        (f"{figures.streams.requests} streams", figures.streams),
        (f"{figures.rate_per_s:.0f} requests/s", figures.rate),
    ):
        error, gap, p99 = seen.token_error, seen.gap_error, seen.token_error.p99
        rows.append(
            (name, f"{error.p50.value * 1e3:.2f}", "-" if p99 is None else f"{p99.value * 1e3:.2f}",
             f"{error.max * 1e3:.1f}", "-" if gap is None else f"{gap.p50.value * 1e3:.2f}",
             f"{seen.dispatch.p50.value * 1e3:.2f}", f"{seen.requests}", f"{seen.cpu_share:.0%}")
        )  # fmt: skip
    stall = (
        f"{figures.stalled} requests due while the server stood still for a second: mean TTFT"
        f" {figures.stall_ttft_mean_s * 1e3:.0f} ms (nothing omitted: {figures.stall_expected_s * 1e3:.0f})."
    )
    columns = ("load", "error P50", "P99", "max", "gap P50", "late P50", "sent", "core")
    verdict = "accurate" if figures.held else "NOT accurate enough"
    return Sheet(f"The load client, ms ({states(block)})", columns, tuple(rows), (stall, f"{verdict}."))


def _metrics(block: Block[MetricsCost]) -> Sheet:
    """Throughput and the server process's processor time with metrics, scraped each second, and without."""
    figures = block.figures
    rows = (
        ("with, scraped every second", f"{figures.with_tokens_per_s:.0f}", f"{figures.with_cpu_us:.0f}"),
        ("without", f"{figures.without_tokens_per_s:.0f}", f"{figures.without_cpu_us:.0f}"),
    )
    ratio = figures.ratio
    verdict = "held" if figures.held else "NOT held"
    notes = (
        f"Median over {figures.rounds} rounds of with ÷ without: {ratio.value:.3f} (95 % interval"
        f" {ratio.low:.3f} to {ratio.high:.3f}); at least {LEAST_RATIO}: {verdict}.",
        f"{figures.scrapes} scrapes, median {figures.scrape_ms:.1f} ms as the client sees them.",
    )
    title = f"Metrics, {figures.streams} streams at {figures.layout} ({states(block)})"
    return Sheet(title, ("metrics", "tokens/s", "server µs a token"), rows, notes)
