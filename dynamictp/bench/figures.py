"""`scripts/bench`: measures the figures the documentation quotes, with the machine's state beside each.

Starts its own servers of the embedded model. With --compare the decode and prefill loads are played on
another OpenAI-compatible server too, turn by turn (its key is taken from the variable OPENAI_API_KEY).
`--only switches` is a study by itself, of half an hour: many switches under load, and a page about them.
Exit code 0 when every request was served, every switch kept the gap criterion, the load client its accuracy
and metrics their share of the throughput; 1 otherwise, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from dynamictp import native
from dynamictp.bench.accuracy import measure_client
from dynamictp.bench.blocks import Block, DecodePoint, PrefillPoint, Session, SwitchFigures, guarded, measured
from dynamictp.bench.figures_record import Figures, as_json, read_json
from dynamictp.bench.figures_report import markdown, render
from dynamictp.bench.kernel_figures import QUICK_RUNS, RUNS, measure_kernels
from dynamictp.bench.machine import describe_build, describe_machine, probe_memory
from dynamictp.bench.metrics_cost import measure_metrics_cost
from dynamictp.bench.roofline import served_bytes
from dynamictp.bench.server import ServerProcess, interrupts_deferred, serve_command
from dynamictp.bench.stats import Quantiles, quantiles
from dynamictp.bench.switches.run import Job, job_of, run
from dynamictp.errors import ConfigError, FatalError, ModelRefused

PARTS = ("kernels", "client", "start", "decode", "prefill", "switch", "metrics")
STUDY = "switches"
"""Measured only by itself, into a page of its own."""
_WITHOUT_SERVER = {"kernels", "client", "start", "metrics"}
_MODEL = "demo"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    streams: tuple[int, ...]
    decode_rounds: int
    prefill_rounds: int
    switches: int
    starts: int
    metric_rounds: int
    kernel_runs: tuple[tuple[str, ...], ...] = RUNS


FULL = Plan(
    streams=(1, 4, 16, 32), decode_rounds=3, prefill_rounds=5, switches=12, starts=3, metric_rounds=24
)
QUICK = Plan(
    (1, 4, 16, 32), decode_rounds=1, prefill_rounds=2, switches=4, starts=1, metric_rounds=2,
    kernel_runs=QUICK_RUNS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    plan: Plan
    parts: tuple[str, ...]
    json_path: Path | None
    serve_flags: tuple[str, ...]
    compare_url: str | None = None
    compare_model: str | None = None
    markdown_path: Path | None = None
    study: Job | None = None


def with_server(options: Options, console: Console, use: Callable[[ServerProcess, str], None]) -> None:
    """Runs `use` against a fresh server, which is gone afterwards whatever happens."""
    server: ServerProcess | None = None
    try:
        with interrupts_deferred():
            server = ServerProcess(
                [*serve_command("tp1", model=_MODEL), *options.serve_flags],
                on_line=lambda line: console.print(Text(f"  {line}", style="dim"), soft_wrap=True),
            )
        use(server, server.wait_ready())
    finally:
        if server is not None:
            server.stop()


def measure_starts(options: Options, console: Console) -> Quantiles:
    """Seconds from starting the process to its ready line, over several starts."""
    seconds: list[float] = []
    for _ in range(options.plan.starts):
        with_server(options, console, lambda server, _url: seconds.append(server.start_to_ready_s))
    starts = quantiles(seconds)
    assert starts is not None
    return starts


def measure_served(options: Options, console: Console, url: str) -> Figures:
    """Every block that runs on one server."""
    plan = options.plan
    session = Session(url)
    if options.compare_url is not None:
        session.compare_with(
            options.compare_url, options.compare_model, os.environ.get("OPENAI_API_KEY") or None
        )
    decode: list[Block[list[DecodePoint]]] = []
    prefill: Block[list[PrefillPoint]] | None = None
    switch: Block[SwitchFigures] | None = None
    session.decode(1, rounds=1)  # warm-up: first use of every layout's communicator
    if "decode" in options.parts:
        for streams in plan.streams:
            console.print(f"decode, {streams} streams")
            one_count = partial(session.decode, streams, plan.decode_rounds)
            decode.append(guarded(f"{streams} streams", one_count, probe_memory))
    if "prefill" in options.parts:
        console.print("prefill of 1,000 tokens")
        prefill = guarded("prefill", lambda: session.prefill(plan.prefill_rounds), probe_memory)
    if "switch" in options.parts:
        console.print(f"{plan.switches} switches under load")
        switch = guarded("switches", lambda: session.switches(plan.switches), probe_memory)
    rival = None if session.rival is None else session.rival.facts
    read = served_bytes(_MODEL, options.serve_flags) if decode else None
    return replace(nothing(options), decode=tuple(decode), prefill=prefill, switch=switch,
                   bytes_read=read, rival=rival)  # fmt: skip


def nothing(options: Options) -> Figures:
    """Figures before any is measured."""
    return Figures(
        describe_machine(), None, (), None, None, build=describe_build(), flags=options.serve_flags
    )


def measure(options: Options, console: Console) -> Figures:
    """Everything asked for."""
    figures = nothing(options)
    if set(options.parts) - _WITHOUT_SERVER:
        served: list[Figures] = []
        with_server(
            options, console, lambda _server, url: served.append(measure_served(options, console, url))
        )
        figures = served[0]
    if "start" in options.parts:
        console.print(f"{options.plan.starts} starts")
        starts = guarded("start", lambda: measure_starts(options, console), probe_memory)
        figures = replace(figures, start_s=starts)
    if "client" in options.parts:
        console.print("accuracy of the load client")
        figures = replace(figures, client=guarded("client", measure_client, probe_memory))
    if "metrics" in options.parts:
        rounds = options.plan.metric_rounds
        console.print(f"{rounds} rounds with and without metrics")
        cost = partial(measure_metrics_cost, rounds, options.serve_flags)
        figures = replace(figures, metrics=measured("metrics", cost, probe_memory))
    if "kernels" in options.parts:
        if native.load() is None:
            console.print("no kernels by themselves: the native extension is not built")
        else:
            console.print("the kernels by themselves")
            kernels = partial(measure_kernels, options.plan.kernel_runs)
            figures = replace(figures, kernels=guarded("kernels", kernels, probe_memory))
    return figures


def parse_options(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="fewer rounds and switches")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"comma-separated parts of {', '.join(PARTS)}; or {STUDY}"
    )
    parser.add_argument("--switches", type=int, metavar="N", help=f"of --only {STUDY}: 200; 12 with --quick")
    parser.add_argument("--rate", type=float, default=0.0, help="its requests/s; from what tp1 carries")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write its page, and the plot to img/ there"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--compare", metavar="URL", help="another server to play decode and prefill on")
    parser.add_argument("--compare-model", metavar="NAME", help="its model; the first it lists by default")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="print a --json file as Markdown tables; measure nothing",
    )
    parser.add_argument("serve_flags", nargs="*", help="after --: further flags of the server")
    arguments = parser.parse_args(argv)
    parts = tuple(arguments.only.split(","))
    study = _study(parser, arguments) if parts == (STUDY,) else None
    if study is None and (arguments.switches is not None or arguments.rate or arguments.page):
        parser.error(f"--switches, --rate and --page belong to --only {STUDY}")
    unknown = set(parts) - set(PARTS)
    if study is None and unknown:
        parser.error(f"--only knows {', '.join(PARTS)}, or {STUDY} alone; got {', '.join(sorted(unknown))}")
    return Options(
        plan=QUICK if arguments.quick else FULL,
        parts=parts,
        json_path=arguments.json,
        serve_flags=tuple(arguments.serve_flags),
        compare_url=arguments.compare,
        compare_model=arguments.compare_model,
        markdown_path=arguments.markdown,
        study=study,
    )


def _study(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Job:
    try:
        return job_of(
            arguments.switches,
            arguments.rate,
            quick=arguments.quick,
            page=arguments.page,
            json=arguments.json,
            serve_flags=arguments.serve_flags,
        )
    except (ConfigError, ValueError) as error:
        parser.error(str(error))


def print_markdown(path: Path) -> int:
    try:
        sys.stdout.write(markdown(read_json(path.read_bytes())))
    except (OSError, ConfigError) as error:
        Console(stderr=True).print(Text(f"bench: {error}", style="red"))
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    console = Console()
    if options.markdown_path is not None:
        return print_markdown(options.markdown_path)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        if options.study is not None:
            return 0 if run(options.study, console) else 1
        figures = measure(options, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except (FatalError, ModelRefused) as error:
        Console(stderr=True).print(Text(f"bench: {error}", style="red"))
        return 1
    console.print(render(figures))
    if options.json_path is not None:
        encoded = msgspec.json.encode(as_json(figures))
        options.json_path.write_bytes(msgspec.json.format(encoded) + b"\n")
    held = [
        block.figures.held for block in (figures.switch, figures.client, figures.metrics) if block is not None
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
