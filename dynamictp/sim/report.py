"""A simulation as tables: for the terminal, as Markdown and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from dynamictp.bench.report.rows import GROUP_COLUMNS, Row, group_cells
from dynamictp.bench.report.table import groups_table, rows_table
from dynamictp.sim.outcome import Outcome
from dynamictp.sim.rows import rows
from dynamictp.sim.scenario import Scenario


def tables(outcome: Outcome) -> RenderableType:
    """Side by side, then by class and tenant."""
    parts: list[RenderableType] = [Text(headline(outcome), style="bold")]
    parts.append(rows_table(outcome.configurations, rows(outcome)))
    for figures in outcome.figures():
        for what, groups in (("class", figures.classes), ("tenant", figures.tenants)):
            if len(groups) > 1:
                parts.append(groups_table(f"{figures.label}, by {what}; latencies in ms", what, groups))
    parts += [Text(line, style="dim") for line in notes(outcome)]
    return Lines(*parts)


def headline(outcome: Outcome) -> str:
    scenario = outcome.scenario
    requests = sum(result.requests for result in outcome.of(outcome.configurations[0]))
    return (
        f"{scenario.name or scenario.model}: {scenario.model} on {scenario.devices} x {scenario.device}, "
        f"{requests} requests over {_duration(scenario.duration_s)}"
        + (f" x {len(scenario.seeds)} seeds" if len(scenario.seeds) > 1 else "")
    )


def _duration(seconds: float) -> str:
    """In the unit that people would say."""
    if seconds < 2 * 60:
        return f"{seconds:g} s"
    return f"{seconds / 60:.4g} min" if seconds < 2 * 3600 else f"{seconds / 3600:.4g} h"


def notes(outcome: Outcome) -> Iterator[str]:
    """What a reader has to know to judge the figures."""
    scenario = outcome.scenario
    seeds = ", ".join(map(str, scenario.seeds))
    if len(scenario.seeds) > 1:
        yield (
            f"Seeds {seeds}. Values are means over seeds, [low–high] their 95 % interval (Student's t); "
            "counts are sums."
        )
    else:
        yield f"Seed {seeds}. [low–high]: 95 % interval within the run (bootstrap; of shares: Wilson's)."
    yield f"Mix {scenario.mix}, lengths x {scenario.scale:g}, arrivals {scenario.arrivals}."
    yield (
        f"Targets: TTFT {scenario.slo.ttft_p99_s:g} s, TPOT {scenario.slo.tpot_p99_ms:g} ms. Refused and "
        f"unfinished requests count against them. The first {scenario.warmup_s:g} s are not counted."
    )
    for text in scenario.assumptions:
        yield f"Assumed: {text}."


def markdown(outcome: Outcome) -> str:
    """The tables, and the scenario that gives them again."""
    lines = [f"# {headline(outcome)}", ""]
    lines += _markdown_rows(outcome.configurations, rows(outcome))
    for figures in outcome.figures():
        for what, groups in (("class", figures.classes), ("tenant", figures.tenants)):
            if len(groups) > 1:
                lines += ["", f"{figures.label}, by {what}; latencies in ms:", ""]
                lines += _line((what, *GROUP_COLUMNS)), _line(["---", *["--:"] * len(GROUP_COLUMNS)])
                lines += [_line((group.name, *group_cells(group))) for group in groups]
    lines += [
        "",
        *(f"- {note}" for note in notes(outcome)),
        "",
        "```yaml",
        scenario_text(outcome.scenario),
        "```",
    ]
    return "\n".join(lines) + "\n"


def scenario_text(scenario: Scenario) -> str:
    """As YAML."""
    return msgspec.yaml.encode(msgspec.to_builtins(scenario)).decode().rstrip()


def as_json(outcome: Outcome) -> bytes:
    """Everything, the same bytes for the same outcome; `summary` has the benchmark's figures."""
    plain = msgspec.to_builtins(outcome, str_keys=True)
    plain["summary"] = msgspec.to_builtins(outcome.figures())
    for result, row in zip(outcome.results, plain["results"], strict=True):
        use = result.use
        row["use"] |= {"load": use.load, "busy": use.busy, "compute": use.compute, "devices": use.devices}
    return msgspec.json.encode(plain, order="deterministic") + b"\n"


def _markdown_rows(labels: Sequence[str], found: Sequence[Row]) -> Iterator[str]:
    yield _line(("", *labels))
    yield _line(["---", *["--:"] * len(labels)])
    for row in found:
        if row.heading:
            yield _line((f"**{row.name}**", *[""] * len(labels)))
        else:
            yield _line((row.name, *row.cells))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
