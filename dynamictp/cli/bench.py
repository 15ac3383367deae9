"""`dynamictp bench`: play a workload against a server, compare layouts, make reports."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dynamictp.cli.bench_options import job_options, make_job, output_options
from dynamictp.extras import need_plots

# A pipe has no width; the tables need this much.
_FILE_COLUMNS = 130


COMMON = (
    ("--rate 2", "requests a second, at random moments (Poisson) [default: 1]"),
    ("--arrivals FORM", "other arrivals: even, bursts, ramps, day and night, recorded, a closed loop"),
    ("--duration 60", "seconds of load"),
    ("--mix chat-rag", "which kinds of requests; --scale 0.2 shortens all of them for a small machine"),
    ("--slo-ttft-s, --slo-tpot-ms", "targets of goodput"),
    ("--set-layout 20=tp2", "change the layout of a DynamicTP server during the run"),
    ("--api-key-file FILE", "where the server wants a key; or the variable OPENAI_API_KEY"),
    ("--html FILE, --json FILE", "the report; everything that was measured"),
)


class DefaultGroup(click.Group):
    """A group whose `run` command may be left out: `bench URL` is `bench run URL`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            args = ["run", *args]
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lines as they are: click would fill them."""
        with formatter.section("Options that `bench URL` is mostly used with"):
            formatter.write_dl(COMMON)
        formatter.write(
            "\nAll of them: `dynamictp bench run --help`. What to choose from: `bench workloads`.\n"
        )

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "URL [OPTIONS] | COMMAND [ARGS]...")


@click.group(cls=DefaultGroup, context_settings={"ignore_unknown_options": True})
def bench() -> None:
    """Measure any OpenAI-compatible server: `bench URL` plays a workload against it."""


@bench.command()
@click.argument("url")
@click.option("--label", help="name of the run in tables and reports (default: the server's layout or model)")
@click.option(
    "--set-layout",
    "changes",
    multiple=True,
    metavar="SECONDS=LAYOUT",
    help="change the layout of a DynamicTP server during the run; may be repeated",
)
@job_options
@output_options
def run(url: str, label: str | None, changes: tuple[str, ...], **given: Any) -> None:
    """Play a workload against the server at URL."""
    job = make_job(given, changes)
    if given["dry_run"]:
        _show_plan(job)
        return
    from dynamictp.bench.benchmark import benchmark  # noqa: PLC0415

    _interrupt_on_signals()
    _finish(lambda console: benchmark(url, label or "", job, console), given)


@bench.command()
@click.option(
    "--layouts", required=True, help="layouts to compare, such as tp2,2*tp1; dynamic: the planner chooses"
)
@click.option(
    "--serve", "model", default="demo", show_default=True, help="model to serve: folder, file or demo"
)
@click.option(
    "--devices", type=click.IntRange(1), help="devices of each server (default: the widest layout's)"
)
@job_options
@output_options
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def compare(
    layouts: str, model: str, devices: int | None, serve_flags: tuple[str, ...], **given: Any
) -> None:
    """Start a server with each layout in turn, play the same schedule, and report side by side.

    SERVE_FLAGS, after --, are further flags of the servers.
    """
    from dynamictp.bench.benchmark import Servers  # noqa: PLC0415
    from dynamictp.bench.benchmark import compare as compare_layouts  # noqa: PLC0415

    job = make_job(given, ())
    servers = Servers(tuple(filter(None, layouts.split(","))), model, devices or 0, serve_flags)
    servers.commands()
    if given["dry_run"]:
        _show_plan(job)
        return
    _interrupt_on_signals()
    _finish(lambda console: compare_layouts(servers, job, console), given)


@bench.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@output_options
def report(files: tuple[Path, ...], **given: Any) -> None:
    """Put the runs of earlier benchmarks (their --json FILES) side by side."""
    from dynamictp.bench.benchmark import merge  # noqa: PLC0415
    from dynamictp.bench.record import read_json  # noqa: PLC0415

    _finish(lambda _console: merge([read_json(file) for file in files]), given)


@bench.command()
def workloads() -> None:
    """List the classes, mixes, arrivals and traces to choose from."""
    from dynamictp.bench.workload import classes, spec, traces  # noqa: PLC0415

    click.echo("Classes (prompt and output in tokens, MEAN/P95):")
    for item in classes.CLASSES.values():
        when = "  only near the peak rate" if item.when == "peak" else ""
        click.echo(f"  {item.name:<12} {item.prompt!s:>10} : {item.output!s:<10}{when}")
    click.echo("\nMixes:")
    for name, mix in classes.MIXES.items():
        click.echo(f"  {name:<12} {', '.join(f'{item.name}={item.weight:g}' for item in mix)}")
    click.echo("\nArrivals:")
    for form in spec.FORMS:
        click.echo(f"  {form}")
    click.echo(
        f"\nTraces of requests (replay:): {', '.join(traces.REQUEST_TRACES)}, or a .csv or .jsonl file"
    )
    click.echo(f"Recorded rates (rates:): {', '.join(traces.RATE_TRACES)}, or a .csv file")


def _show_plan(job: Any) -> None:
    """What would be asked for, without a server."""
    from dynamictp.bench.workload.plan import make_plan  # noqa: PLC0415

    plan = make_plan(job.workload)
    prompts = sum(request.prompt_tokens for request in plan.requests)
    outputs = sum(request.output_tokens for request in plan.requests)
    click.echo(
        f"{len(plan.requests)} requests over {job.workload.duration_s:g} s: {prompts} prompt tokens, "
        f"{outputs} output tokens; plan {plan.digest[:12]}"
    )
    by_class: dict[str, int] = {}
    for request in plan.requests:
        by_class[request.traffic_class] = by_class.get(request.traffic_class, 0) + 1
    click.echo(", ".join(f"{name} {count}" for name, count in sorted(by_class.items())))


def _finish(measure: Callable[[Console], Any], given: dict[str, Any]) -> None:
    """Measures, shows the table, writes the files; exit code 1 when a run is invalid."""
    from dynamictp.bench.benchmark import figures_of  # noqa: PLC0415
    from dynamictp.bench.record import write_json  # noqa: PLC0415
    from dynamictp.bench.report import table  # noqa: PLC0415

    page_path, json_path = given["html"], given["json"]
    if page_path is not None:
        need_plots("--html", "; or use --json now and `dynamictp bench report FILE --html …` later")
    measured = measure(Console(stderr=True))
    figures = figures_of(measured)
    if json_path is not None:
        write_json(measured, figures, json_path)
    if page_path is not None:
        from dynamictp.bench.report import page  # noqa: PLC0415

        page_path.write_text(page.render(measured, figures), encoding="utf-8")
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    console.print(table.render(measured, figures))
    if not all(seen.validity.valid for seen in figures):
        sys.exit(1)


def _interrupt_on_signals() -> None:
    """A closed terminal or a polite kill ends the run as Ctrl-C does: no server stays behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
