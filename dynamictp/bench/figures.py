"""`scripts/bench`: measures the figures the documentation quotes, with the machine's state beside each.

Starts its own servers of the embedded model. Exit code 0 when every request was served, every switch
kept the gap criterion and the load client its accuracy, 1 otherwise, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from dynamictp.bench.accuracy import measure_client
from dynamictp.bench.blocks import Block, DecodePoint, PrefillPoint, Session, SwitchFigures, guarded
from dynamictp.bench.figures_report import Figures, as_json, render
from dynamictp.bench.machine import describe_machine, probe_memory
from dynamictp.bench.server import ServerProcess, interrupts_deferred, serve_command
from dynamictp.bench.stats import Quantiles, quantiles
from dynamictp.errors import FatalError

PARTS = ("client", "start", "decode", "prefill", "switch")
_WITHOUT_SERVER = {"client", "start"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    streams: tuple[int, ...]
    decode_rounds: int
    prefill_rounds: int
    switches: int
    starts: int


FULL = Plan(streams=(1, 4, 16, 32), decode_rounds=3, prefill_rounds=5, switches=12, starts=3)
QUICK = Plan(streams=(1, 4, 16, 32), decode_rounds=1, prefill_rounds=2, switches=4, starts=1)


@dataclass(frozen=True, slots=True)
class Options:
    plan: Plan
    parts: tuple[str, ...]
    json_path: Path | None
    serve_flags: tuple[str, ...]


def with_server(options: Options, console: Console, use: Callable[[ServerProcess, str], None]) -> None:
    """Runs `use` against a fresh server, which is gone afterwards whatever happens."""
    server: ServerProcess | None = None
    try:
        with interrupts_deferred():
            server = ServerProcess(
                [*serve_command("tp1"), *options.serve_flags],
                on_line=lambda line: console.print(Text(f"  {line}", style="dim")),
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
    return Figures(describe_machine(), None, tuple(decode), prefill, switch)


def measure(options: Options, console: Console) -> Figures:
    """Everything asked for."""
    figures = Figures(describe_machine(), None, (), None, None)
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
    return figures


def parse_options(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="fewer rounds and switches")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"comma-separated parts of {', '.join(PARTS)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("serve_flags", nargs="*", help="after --: further flags of the server")
    arguments = parser.parse_args(argv)
    parts = tuple(arguments.only.split(","))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    return Options(
        plan=QUICK if arguments.quick else FULL,
        parts=parts,
        json_path=arguments.json,
        serve_flags=tuple(arguments.serve_flags),
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        figures = measure(options, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except FatalError as error:
        Console(stderr=True).print(Text(f"bench: {error}", style="red"))
        return 1
    console.print(render(figures))
    if options.json_path is not None:
        encoded = msgspec.json.encode(as_json(figures))
        options.json_path.write_bytes(msgspec.json.format(encoded) + b"\n")
    held = [block.figures.held for block in (figures.switch, figures.client) if block is not None]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
