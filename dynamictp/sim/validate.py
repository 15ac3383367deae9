"""`scripts/check-simulator`: a recorded run of the real server against the simulator's replay of it.

Starts a server of the embedded model in dynamic mode on two cores, plays short bursts and a long one, keeps
the benchmark's record and the planner's journal, replays both, and compares. Exit code 0 when throughput,
mean time per token and the number of switches are within 15 %, P95 of the time to the first token within
30 %. Steps of a replay vary by chance, as the measured ones do: switches are the mean of 20.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from rich.console import Console
from rich.text import Text

from dynamictp.bench.benchmark import Job, bench_of, figures_of, with_server
from dynamictp.bench.client import run_lowered
from dynamictp.bench.live import Counters
from dynamictp.bench.machine import describe_machine, probe_memory
from dynamictp.bench.measure import RunFigures
from dynamictp.bench.record import Bench, Slo, read_json, write_json
from dynamictp.bench.report import table
from dynamictp.bench.server import serve_command
from dynamictp.bench.session import Options, look, play, prepare
from dynamictp.bench.watcher import spans_of
from dynamictp.bench.workload.classes import MIXES, Workload
from dynamictp.cost.calibration import Calibration
from dynamictp.errors import FatalError
from dynamictp.sim.replay import Recording, read_recording, replay, switches
from dynamictp.sim.speeds import calibrated

JOURNAL, RECORD = "journal.jsonl", "record.json"
SLO = Slo(ttft_s=2.0, tpot_s=0.1, ttft_per_token_s=0.002)
CLOSE, LOOSE = 0.15, 0.30
REPLAYS = 20
"""Whose switches are counted; all other figures are those of the first. The counts scatter by a quarter of
their mean, so that of 20 is known to 6 %."""
_BURSTS = ((0.05, 0.11), (0.2, 0.26), (0.35, 0.53), (0.62, 0.68), (0.77, 0.83), (0.92, 0.97))
"""Parts of the run with high load. Each should cost two switches: 15 % of a few would be less than one."""
BUSY_CORES = 0.3
"""Above this, other work decides what is measured."""


class Plan(msgspec.Struct, frozen=True):
    """What is played: low load, and bursts enough to count switches by, in parts of `seconds`."""

    seconds: float
    low_per_s: float
    high_per_s: float
    scale: float
    shrink_after_s: float
    seed: int = 0

    @property
    def arrivals(self) -> str:
        low, high = self.low_per_s, self.high_per_s
        edges = [(0.0, low)]
        for begin, end in _BURSTS:
            edges += [(begin, high), (end, low)]
        return "steps:" + ",".join(f"{share * self.seconds:g}={rate:g}" for share, rate in edges)

    @property
    def workload(self) -> Workload:
        return Workload(
            MIXES["chat-rag"], self.arrivals, self.seconds, self.seed, self.scale, endpoint="completions"
        )

    def command(self, journal: Path) -> list[str]:
        return [
            *serve_command("tp1", 2, mode="dynamic"), "--journal", str(journal),
            "--shrink-after-s", f"{self.shrink_after_s:g}",
            "--slo-ttft-p99-s", f"{SLO.ttft_s:g}", "--slo-tpot-p99-ms", f"{SLO.tpot_s * 1e3:g}",
            "--slo-ttft-per-token-ms", f"{SLO.ttft_per_token_s * 1e3:g}",
        ]  # fmt: skip


class Check(msgspec.Struct, frozen=True):
    """One figure, measured and simulated. `limit` as a fraction."""

    name: str
    measured: float
    simulated: float
    limit: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1 if self.measured else 0.0

    @property
    def holds(self) -> bool:
        return abs(self.simulated - self.measured) <= self.limit * self.measured + 1e-9


def record(plan: Plan, folder: Path, console: Console) -> None:
    """Plays the plan on a fresh server and leaves journal and record in `folder`."""
    workload, options = plan.workload, Options(warmup=4, drain_s=30.0)
    (folder / JOURNAL).unlink(missing_ok=True)

    def use(url: str) -> None:
        async def main() -> Bench:
            facts = await look(url, options)
            prepared = await prepare(workload, facts, options)
            console.print(f"{len(prepared.schedule)} requests, {plan.arrivals} over {plan.seconds:g} s")
            facts = replace(facts, command=tuple(plan.command(folder / JOURNAL)[1:]))
            run = await play("measured", facts, prepared, options, Counters())
            return bench_of(Job(workload, options, SLO), prepared, (run,))

        bench = run_lowered(main)
        write_json(bench, figures_of(bench), folder / RECORD)

    with_server(plan.command(folder / JOURNAL), console, use)


def compare(bench: Bench, counts: Sequence[int]) -> tuple[Check, ...]:
    """`bench` holds the measured run and the simulated one; `counts` are switches of several replays."""
    measured, simulated = figures_of(bench)
    return (
        Check(
            "output tokens/s", measured.total.decode_tokens_per_s, simulated.total.decode_tokens_per_s, CLOSE
        ),
        Check("requests finished", measured.total.finished, simulated.total.finished, CLOSE),
        Check("TPOT mean, ms", _tpot_ms(measured), _tpot_ms(simulated), CLOSE),
        Check("switches", switches(bench.runs[0]), statistics.fmean(counts), CLOSE),
        Check("TTFT P95, ms", _ttft_ms(measured), _ttft_ms(simulated), LOOSE),
    )


def _tpot_ms(figures: RunFigures) -> float:
    """Mean of the requests' means."""
    seen = figures.total.tpot
    if seen is None:
        raise FatalError(f"{figures.label}: no request had two tokens")
    return seen.mean * 1e3


def _ttft_ms(figures: RunFigures) -> float:
    seen = figures.total.ttft
    if seen is None:
        raise FatalError(f"{figures.label}: no request had a first token")
    return seen.p95.value * 1e3


def page(
    bench: Bench, checks: Sequence[Check], counts: Sequence[int], recording: Recording, about: str
) -> str:
    """The comparison as Markdown."""
    lines = [
        "# The simulator against the real server",
        "",
        "Made by `scripts/check-simulator`: a run of the real server in dynamic mode, and the replay of its",
        "record and journal ([simulator](simulator.md#replay-of-a-recorded-run)). Step times come from the",
        "journal of the same run; everything else is predicted.",
        "",
        about,
        "",
        "| figure | measured | simulated | error | allowed | |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for check in checks:
        verdict = "holds" if check.holds else "OFF"
        lines.append(
            f"| {check.name} | {check.measured:.4g} | {check.simulated:.4g} | {check.error:+.1%} "
            f"| {check.limit:.0%} | {verdict} |"
        )
    lines += [
        "",
        f"Switches of {len(counts)} replays: {', '.join(map(str, counts))}; the table has their mean.",
    ]
    for run in bench.runs:
        text = ", ".join(f"{span.layout} from {span.start_s:.1f} s" for span in spans_of(run))
        lines += ["", f"Layouts, {run.label}: {text}."]
    points = calibrated(recording.head.facts, recording.steps).points
    text = ", ".join(f"tp{p.tp} {p.size} tokens {p.ratio:.2f}" for p in points if p.op == "base")
    lines += ["", f"Measured ÷ expected step times, from {len(recording.steps)} steps: {text}."]
    return "\n".join(lines) + "\n"


def check(folder: Path, calibration: Calibration | None, about: str, console: Console) -> tuple[str, bool]:
    """(the page, whether all held) of what `folder` holds."""
    recording = read_recording(folder / JOURNAL, folder / RECORD)
    both = replay(recording, calibration=calibration)
    console.print(table.render(both, figures_of(both)))
    replays = [replay(recording, calibration=calibration, seed=seed) for seed in range(1, REPLAYS)]
    counts = [switches(bench.runs[1]) for bench in (both, *replays)]
    checks = compare(both, counts)
    return page(both, checks, counts, recording, about), all(item.holds for item in checks)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/check-simulator", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=600.0, help="length of the recorded run")
    parser.add_argument("--low", type=float, default=0.4, help="requests per second between the bursts")
    parser.add_argument("--high", type=float, default=1.7, help="requests per second in bursts")
    parser.add_argument("--scale", type=float, default=0.5, help="multiplies the lengths of the mix")
    parser.add_argument("--shrink-after-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave record and journal here")
    parser.add_argument("--only-replay", type=Path, metavar="FOLDER", help="of an earlier --keep; no server")
    parser.add_argument("--calibration", type=Path, help="step times by `dynamictp calibrate` instead")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the comparison here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = parse_options(argv)
    console = Console(width=110, highlight=False)
    plan = Plan(given.seconds, given.low, given.high, given.scale, given.shrink_after_s, given.seed)
    try:
        calibration = Calibration.load(given.calibration) if given.calibration else None
        if given.only_replay is not None:
            text, held = check(given.only_replay, calibration, _about(given.only_replay), console)
        else:
            with TemporaryDirectory() as temporary:
                folder = given.keep or Path(temporary)
                folder.mkdir(parents=True, exist_ok=True)
                before = probe_memory()
                record(plan, folder, console)
                after = probe_memory()
                busy = before.busy_cores > BUSY_CORES
                if busy:
                    console.print(Text(f"{before.busy_cores:.1f} cores were busy: these figures say little"))
                memory = f"memory before: {before}; after: {after}"
                text, held = check(folder, calibration, f"{_about(folder)}; {memory}.", console)
    except KeyboardInterrupt:
        return 130
    except FatalError as error:
        Console(stderr=True).print(f"check-simulator: {error}")
        return error.exit_code
    console.print(text, markup=False, soft_wrap=True)
    if given.markdown is not None:
        given.markdown.write_text(text, encoding="utf-8")
    return 0 if held else 1


def _about(folder: Path) -> str:
    bench = read_json(folder / RECORD)
    work, run = bench.workload, bench.runs[0]
    return (
        f"{describe_machine()}; {time.strftime('%Y-%m-%d')}; {len(run.results)} requests of mix chat-rag, "
        f"lengths x {work.get('scale', 1):g}, arrivals `{work.get('arrivals')}` over {run.load_s:g} s"
    )


if __name__ == "__main__":
    sys.exit(main())
