"""`python -m dynamictp.bench.demo`: a small service whose degree changes under load, told in a minute.

Starts a server of the embedded model on two devices (or uses `--url`), plays seeded bursts of chat
requests against it, changes the layout four times meanwhile, and reports what the clients saw.
Exit code 0 when no request failed, 1 otherwise, 130 when interrupted; nothing is left running.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dynamictp.bench.admin import Admin, Switch
from dynamictp.bench.client import Client, Sender
from dynamictp.bench.demo_report import Play, as_json, render
from dynamictp.bench.prompts import QUESTIONS
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.server import ServerProcess, interrupts_deferred, serve_command
from dynamictp.bench.switching import LayoutSetter, play_switches
from dynamictp.bench.workload import arrivals
from dynamictp.clock import Clock, SystemClock
from dynamictp.errors import FatalError

LAYOUTS = ("tp1", "tp2", "tp1+tp1", "tp2", "tp1")
NARROW_LAYOUTS = ("tp1", "tp1+tp1", "tp1", "tp1+tp1", "tp1")
"""Where ranks can't meet: without the native extension only tp1 shapes are legal."""
# The client yields to the server's workers, which share its cores.
NICENESS = 5
_LINE_EVERY_S = 5.0
_REFRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    seconds: float
    seed: int
    json_path: Path | None
    url: str | None


def build_schedule(seconds: float, seed: int) -> list[Request]:
    """Chat requests of 20 to 60 tokens, in bursts placed so that each change of layout meets one."""
    stage_s = seconds / len(LAYOUTS)
    rates = arrivals.on_off(
        base_per_s=0.8,
        burst_per_s=4.0,
        period_s=stage_s / 2,
        burst_s=0.2 * stage_s,
        duration_s=seconds,
        offset_s=-0.1 * stage_s,
    )
    rng = np.random.default_rng(seed)
    times = arrivals.draw(rates, 1.0, rng)
    return [
        Request(
            intended_s=at_s,
            prompt=QUESTIONS[int(rng.integers(len(QUESTIONS)))],
            max_tokens=int(rng.integers(20, 61)),
            endpoint="chat",
            name=f"chat-{i}",
            temperature=0.7,
            seed=int(rng.integers(2**31)),
        )
        for i, at_s in enumerate(times)
    ]


def tour(legal: Sequence[str]) -> tuple[str, ...]:
    """The layouts to go through, given those the server takes (empty: it does not say)."""
    return LAYOUTS if not legal or set(LAYOUTS) <= set(legal) else NARROW_LAYOUTS


class Progress:
    """Counts requests on their way through a sender; owns the live figures of the demo."""

    def __init__(self, sender: Sender, layout: str) -> None:
        self.running = 0
        self.finished = 0
        self.failed = 0
        self.tokens = 0
        self.layout = layout
        self._sender = sender

    async def send(self, request: Request, intended_s: float) -> Result:
        self.running += 1
        try:
            result = await self._sender.send(request, intended_s)
        finally:
            self.running -= 1
        self.finished += 1
        self.failed += result.failure is not None
        self.tokens += result.output_tokens
        return result

    def line(self, at_s: float) -> str:
        return (
            f"{at_s:5.1f} s  layout {self.layout:<16}  running {self.running:2}  finished {self.finished:3}"
            f"  failed {self.failed}  tokens {self.tokens}"
        )


class Display:
    """Live line on a terminal; elsewhere a plain line now and then. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._next_line_s = 0.0

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(Text(""), console=self._console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self, progress: Progress, at_s: float) -> None:
        """The state of things, `at_s` seconds into the run."""
        if self._live is not None:
            self._live.update(Text(progress.line(at_s), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif at_s >= self._next_line_s:
            self._next_line_s = at_s + _LINE_EVERY_S
            self.note(progress.line(at_s))

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text))


async def play(
    sender: Sender,
    admin: LayoutSetter,
    options: Options,
    display: Display,
    clock: Clock,
    *,
    layouts: Sequence[str] = LAYOUTS,
) -> Play:
    """Plays the load while the layout goes through `layouts` at equal distances.

    Raises FatalError when a change of layout is refused or the server is gone.
    """
    schedule = build_schedule(options.seconds, options.seed)
    display.note(f"{len(schedule)} requests over {options.seconds:.0f} s, seed {options.seed}")
    progress = Progress(sender, layouts[0])
    started_s = clock.now()

    async def refresh() -> None:
        while True:
            display.show(progress, clock.now() - started_s)
            await asyncio.sleep(_REFRESH_S)

    def on_start(layout: str) -> None:
        progress.layout = f"{progress.layout} → {layout}"

    def on_switch(switch: Switch) -> None:
        progress.layout = switch.after
        display.note(
            f"{switch.started_s - started_s:5.1f} s  {switch.before} → {switch.after}: {switch.outcome} in"
            f" {(switch.ended_s - switch.started_s) * 1e3:.0f} ms, {progress.running} requests running"
        )

    changes = [(options.seconds * i / len(layouts), layout) for i, layout in enumerate(layouts[1:], 1)]
    painter = asyncio.create_task(refresh())
    try:
        results, switches = await play_switches(
            progress, admin, schedule, changes, clock, on_start=on_start, on_switch=on_switch
        )
    finally:
        painter.cancel()
        await asyncio.gather(painter, return_exceptions=True)
    return Play(started_s, clock.now(), layouts[0], tuple(results), tuple(switches))


async def run(url: str, options: Options, console: Console) -> Play:
    """The demo against a server that is ready; a server given by `--url` gets its layout back."""
    clock = SystemClock()
    async with Admin(url, clock=clock) as admin:
        client = Client(url, await admin.served_model(), clock=clock, return_token_ids=True)
        before = await admin.layout()
        layouts = tour(before.legal)
        if layouts != LAYOUTS:
            console.print("this server has no tp2 (no native extension?): switching between tp1 and tp1+tp1")
        try:
            await admin.set_layout(layouts[0])
            with Display(console) as display:
                return await play(client, admin, options, display, clock, layouts=layouts)
        finally:
            if options.url is not None:
                if before.mode == "dynamic" and not before.pinned:
                    await admin.release_layout()
                else:
                    await admin.set_layout(before.observed)


def parse_options(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m dynamictp.bench.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=75.0, help="length of the load (default 75)")
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals and prompts (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--url", help="use this running server of two or more devices")
    arguments = parser.parse_args(argv)
    if not 5 <= arguments.seconds <= 3600:
        parser.error("--seconds must be between 5 and 3600")
    return Options(arguments.seconds, arguments.seed, arguments.json, arguments.url)


def _measure(options: Options, console: Console) -> Play:
    server: ServerProcess | None = None
    try:
        url = options.url
        if url is None:
            console.print("starting a server of the embedded model on two devices")
            with interrupts_deferred():
                server = ServerProcess(
                    serve_command(LAYOUTS[0]),
                    on_line=lambda line: console.print(Text(f"  {line}", style="dim"), soft_wrap=True),
                )
            url = server.wait_ready()
            console.print(f"ready after {server.start_to_ready_s:.1f} s")
        os.nice(NICENESS)  # after the start: the server would inherit it
        return asyncio.run(run(url, options, console))
    finally:
        if server is not None:
            server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    console = Console()
    # A closed terminal or a polite kill ends the demo as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        report = _measure(options, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except FatalError as error:
        Console(stderr=True).print(Text(f"demo: {error}", style="red"))
        return 1
    finally:
        console.show_cursor(True)
    console.print(render(report))
    if options.json_path is not None:
        options.json_path.write_bytes(msgspec.json.format(msgspec.json.encode(as_json(report))) + b"\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
