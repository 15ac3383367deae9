"""`dynamictp simulate`: a scenario on virtual time, or the replay of a recorded run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from dynamictp.cli.numbers import FiniteRange
from dynamictp.errors import ConfigError
from dynamictp.extras import need_plots

_FILE = click.Path(dir_okay=False, path_type=Path)
_INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)
_COLUMNS = 130


@click.command()
@click.argument("scenario", required=False, type=_INPUT)
@click.option("--seeds", type=click.IntRange(1, 1000), help="run with the seeds 0 to N-1 instead of its own")
@click.option("--duration", type=FiniteRange(0, min_open=True), help="seconds of load instead of its own")
@click.option("--only", multiple=True, metavar="NAME", help="this configuration only; may be repeated")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="processes to run in")
@click.option("--json", "json_path", type=_FILE, help="write everything here")
@click.option("--html", "html_path", type=_FILE, help="write the report here")
@click.option("--markdown", "markdown_path", type=_FILE, help="write the tables here")
@click.option("--trace", "trace_path", type=_FILE, help="write a Chrome trace of the first seed here")
@click.option("--from-journal", type=_INPUT, help="replay a run: the planner's journal (serve --journal)")
@click.option("--record", type=_INPUT, help="with --from-journal: the benchmark's --json of that run")
@click.option("--calibration", type=_INPUT, help="with --from-journal: step times of `dynamictp calibrate`")
def simulate(scenario: Path | None, **given: Any) -> None:
    """Play SCENARIO on virtual time under the production planner, router and switches.

    SCENARIO is a YAML file (docs/simulator.md): a model on devices, a workload of the benchmark's, and the
    configurations to compare, static layouts and planners. Sweeps run in parallel with --jobs.
    """
    if (scenario is None) == (given["from_journal"] is None):
        raise click.UsageError("give a SCENARIO, or --from-journal and --record")
    if scenario is None:
        _replay(given)
        return
    from dynamictp.sim.run import simulate as run  # noqa: PLC0415  (help stays instant)

    wanted = _scenario(scenario, given)
    if given["html_path"] is not None:
        need_plots("--html")
    from dynamictp.sim.bar import ProgressBar  # noqa: PLC0415

    with ProgressBar(wanted, Console(stderr=True)) as bar:
        outcome = run(wanted, jobs=min(given["jobs"], os.cpu_count() or 1), progress=bar.tell)
    _write(outcome, given)


def _scenario(file: Path, given: dict[str, Any]) -> Any:
    """The file's scenario with what the flags change."""
    from dynamictp.sim.scenario import check_scenario, read_scenario  # noqa: PLC0415

    scenario = read_scenario(file)
    changes: dict[str, Any] = {}
    if given["seeds"] is not None:
        changes["seeds"] = tuple(range(given["seeds"]))
    if given["duration"] is not None:
        changes["duration_s"] = given["duration"]
        changes["warmup_s"] = min(scenario.warmup_s, given["duration"] / 10)
    if given["only"]:
        scenario = scenario.expanded()
        known = {configuration.label: configuration for configuration in scenario.configurations}
        if unknown := [name for name in given["only"] if name not in known]:
            raise ConfigError(f"--only {unknown[0]}: the scenario has {', '.join(known)}")
        changes["configurations"] = tuple(known[name] for name in given["only"])
    scenario = msgspec.structs.replace(scenario, **changes)
    check_scenario(scenario)
    return scenario


def _write(outcome: Any, given: dict[str, Any]) -> None:
    from dynamictp.sim import report  # noqa: PLC0415

    if given["json_path"] is not None:
        given["json_path"].write_bytes(report.as_json(outcome))
    if given["markdown_path"] is not None:
        given["markdown_path"].write_text(report.markdown(outcome), encoding="utf-8")
    if given["trace_path"] is not None:
        from dynamictp.sim.trace import chrome_trace  # noqa: PLC0415

        given["trace_path"].write_bytes(chrome_trace(outcome))
    if given["html_path"] is not None:
        from dynamictp.sim import page  # noqa: PLC0415

        given["html_path"].write_text(page.render(outcome), encoding="utf-8")
    _console().print(report.tables(outcome))


def _replay(given: dict[str, Any]) -> None:
    from dynamictp.bench.benchmark import figures_of  # noqa: PLC0415
    from dynamictp.bench.record import write_json  # noqa: PLC0415
    from dynamictp.bench.report import table  # noqa: PLC0415
    from dynamictp.cost.calibration import Calibration  # noqa: PLC0415
    from dynamictp.sim.replay import read_recording, replay  # noqa: PLC0415

    if given["record"] is None:
        raise click.UsageError("--from-journal needs --record, the benchmark's --json of the same run")
    for name in ("seeds", "duration", "markdown_path", "trace_path"):
        if given[name] is not None:
            flag = name.removesuffix("_path")
            raise click.UsageError(f"--{flag} is for scenarios, not for --from-journal")
    if given["html_path"] is not None:
        need_plots("--html")
    calibration = Calibration.load(given["calibration"]) if given["calibration"] is not None else None
    both = replay(read_recording(given["from_journal"], given["record"]), calibration=calibration)
    figures = figures_of(both)
    if given["json_path"] is not None:
        write_json(both, figures, given["json_path"])
    if given["html_path"] is not None:
        from dynamictp.bench.report import page  # noqa: PLC0415

        given["html_path"].write_text(page.render(both, figures), encoding="utf-8")
    _console().print(table.render(both, figures))


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _COLUMNS)
    return console
