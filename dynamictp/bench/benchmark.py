"""Whole benchmarks: of one address, or of several layouts of this project's server in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from dynamictp import __version__
from dynamictp.bench.client import run_lowered
from dynamictp.bench.live import Counters, LiveView
from dynamictp.bench.measure import RunFigures, run_figures
from dynamictp.bench.record import Bench, Run, ServerFacts, Slo
from dynamictp.bench.server import ServerProcess, interrupts_deferred, serve_command
from dynamictp.bench.session import Options, Prepared, look, play, prepare
from dynamictp.bench.workload.classes import Workload
from dynamictp.errors import ConfigError, FatalError, LayoutRefused
from dynamictp.layout import LayoutSpec

DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure, how, and against which targets."""

    workload: Workload
    options: Options = field(default_factory=Options)
    slo: Slo = field(default_factory=Slo)


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers to compare: `layouts` of one model on `devices` (0: as many as the widest layout takes).

    `dynamic` is a server whose planner chooses the layout, from `tp1` on.
    """

    layouts: tuple[str, ...]
    model: str = "demo"
    devices: int = 0
    flags: tuple[str, ...] = ()

    def commands(self) -> dict[str, list[str]]:
        """Command line by layout. Raises ConfigError for what is no layout, and for `dynamic` alone without
        a number of devices.
        """
        try:
            specs = {text: LayoutSpec.parse(text) for text in self.layouts if text != DYNAMIC}
        except LayoutRefused as error:
            raise ConfigError(str(error)) from error
        if not self.layouts:
            raise ConfigError("name the layouts to compare, such as --layouts tp2,2*tp1,dynamic")
        devices = self.devices or max((spec.devices for spec in specs.values()), default=0)
        if not devices:
            raise ConfigError("'dynamic' alone says nothing of the pool; give --devices")
        return {text: [*self._command(text, devices), *self.flags] for text in dict.fromkeys(self.layouts)}

    def _command(self, text: str, devices: int) -> list[str]:
        if text == DYNAMIC:
            return serve_command("tp1", devices, self.model, mode=DYNAMIC)
        return serve_command(text, devices, self.model)


def benchmark(url: str, label: str, job: Job, console: Console) -> Bench:
    """Plays the job's workload against a running server. Without a label, the layout or the model names it.

    Raises FatalError when that can't be done.
    """
    facts = run_lowered(lambda: look(url, job.options))
    name = label or str((facts.layout or {}).get("observed") or facts.model)
    prepared = _prepare(job, facts, console)
    return bench_of(job, prepared, (_play(name, facts, prepared, job.options, console),))


def compare(servers: Servers, job: Job, console: Console) -> Bench:
    """Starts each layout's server in turn and plays the same schedule against each.

    The text is made once, with the first server's tokenizer. Raises FatalError when a server doesn't start.
    """
    runs: list[Run] = []
    prepared: Prepared | None = None
    for layout, command in servers.commands().items():
        console.print(Text(f"starting a server with layout {layout}"))

        def use(url: str, layout: str = layout, command: Sequence[str] = command) -> None:
            nonlocal prepared
            facts = replace(run_lowered(lambda: look(url, job.options)), command=tuple(command[1:]))
            prepared = prepared or _prepare(job, facts, console)
            runs.append(_play(layout, facts, prepared, job.options, console))

        with_server(command, console, use)
    assert prepared is not None
    return bench_of(job, prepared, tuple(runs))


def with_server(command: Sequence[str], console: Console, use: Callable[[str], None]) -> None:
    """Runs `use` with the address of a fresh server, which is gone afterwards whatever happens."""
    server: ServerProcess | None = None
    try:
        with interrupts_deferred():
            server = ServerProcess(
                command, on_line=lambda line: console.print(Text(f"  {line}", style="dim"))
            )
        use(server.wait_ready())
    finally:
        if server is not None:
            server.stop()


def bench_of(job: Job, prepared: Prepared, runs: tuple[Run, ...]) -> Bench:
    """The record of runs of one schedule."""
    return Bench(
        workload=plain_workload(prepared.workload),
        seed=prepared.workload.seed,
        plan_digest=prepared.plan.digest,
        schedule_digest=prepared.digest,
        exactness=prepared.exactness,
        shortened=prepared.plan.shortened,
        lengthened=prepared.lengthened,
        slo=job.slo,
        runs=runs,
        version=__version__,
    )


def merge(benches: Sequence[Bench]) -> Bench:
    """Runs of several records side by side. Raises ConfigError when their plans differ: other requests at
    other times don't compare. Another tokenizer makes another schedule of the same plan, which does.
    """
    first = benches[0]
    for other in benches[1:]:
        if other.plan_digest != first.plan_digest:
            raise ConfigError(
                f"these runs don't compare: plan {first.plan_digest[:12]} against {other.plan_digest[:12]}"
                " (another workload, seed or context)"
            )
    runs = tuple(run for bench in benches for run in bench.runs)
    labels = [run.label for run in runs]
    numbered = tuple(
        replace(run, label=f"{run.label} #{labels[: i + 1].count(run.label)}")
        if labels.count(run.label) > 1
        else run
        for i, run in enumerate(runs)
    )
    return replace(first, runs=numbered)


def figures_of(bench: Bench) -> tuple[RunFigures, ...]:
    """The figures of every run."""
    return tuple(run_figures(run, bench.slo) for run in bench.runs)


def plain_workload(workload: Workload) -> Mapping[str, Any]:
    """As plain values; lengths in their text form."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(workload))
    for item, own in zip(plain["classes"], workload.classes, strict=True):
        item |= {"prompt": str(own.prompt), "output": str(own.output)}
    return plain


def _prepare(job: Job, facts: ServerFacts, console: Console) -> Prepared:
    console.print(Text(f"{facts.url} serves {facts.model} {facts.owned_by} {facts.version}".rstrip()))
    prepared = run_lowered(lambda: prepare(job.workload, facts, job.options))
    plan = prepared.plan
    tokens = sum(request.prompt_tokens for request in plan.requests)
    console.print(
        Text(f"{len(plan.requests)} requests, {tokens} prompt tokens, schedule {prepared.digest[:12]}")
    )
    return prepared


def _play(label: str, facts: ServerFacts, prepared: Prepared, options: Options, console: Console) -> Run:
    counters = Counters()
    if prepared.warmup:
        console.print(
            Text(
                f"warm-up: {len(prepared.warmup)} requests like the load's, not counted (--warmup 0 leaves "
                f"them out); then {prepared.workload.duration_s:g} s of load"
            )
        )
    with LiveView(console, counters, label) as view:
        run = run_lowered(
            lambda: play(label, facts, prepared, options, counters), meanwhile=view.paint, every_s=0.5
        )
    if not run.results:
        raise FatalError("the run sent no request")
    return run
