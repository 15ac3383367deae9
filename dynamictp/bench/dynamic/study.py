"""`scripts/bench-dynamic`: does it pay to let the degree follow the traffic?

Measures what `tp1` carries within the targets, then plays low / burst / low (0.25 and 1.4 times that) on
every static layout and in dynamic mode, on the same schedule, seed by seed, while an outside job uses the
device that dynamic mode can spare. Exit code 0 when every criterion held; losing cases are printed too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from rich.console import Console

from dynamictp.bench.benchmark import DYNAMIC, with_server
from dynamictp.bench.client import run_lowered
from dynamictp.bench.dynamic.job import read_progress
from dynamictp.bench.dynamic.kept import open_kept, save_kept
from dynamictp.bench.dynamic.leasing import LeasedJob
from dynamictp.bench.dynamic.outcome import Outcome, Study
from dynamictp.bench.dynamic.phases import StudyRun, arrivals_of, judge, study_run
from dynamictp.bench.dynamic.tables import markdown
from dynamictp.bench.live import Counters
from dynamictp.bench.machine import probe_memory
from dynamictp.bench.measure import run_figures
from dynamictp.bench.record import Run, Slo
from dynamictp.bench.server import serve_command
from dynamictp.bench.session import Options, look, play, prepare
from dynamictp.bench.workload.classes import MIXES, Workload
from dynamictp.errors import FatalError

STATIC = ("tp1", "tp2", "tp1+tp1")
ATTAINED = 0.95
"""A rate is carried when this share of its requests meets the targets."""
SLO = Slo(ttft_s=2.0, tpot_s=0.1, ttft_per_token_s=0.002)
_TRIAL_S = 20.0
_FIRST_RATE = 0.5
_GROWTH = 1.4
_REFINEMENTS = 2


def measure_capacity(study: Study, console: Console) -> float:
    """The highest Poisson rate that `tp1` carries within the targets, requests per second."""
    found: list[float] = []

    def use(url: str) -> None:
        carried, missed, rate = 0.0, 0.0, _FIRST_RATE
        refinements = trial = 0
        while refinements < _REFINEMENTS:
            trial += 1
            workload = study.workload(f"poisson:{rate:.4g}", _TRIAL_S, seed=1000 + trial)
            run, _ = _play_once(url, "capacity", workload)
            (goodput,) = [run_figures(run, SLO).total.goodput]
            share = goodput.value if goodput is not None else 0.0
            console.print(f"  {rate:.2f} requests/s: {share:.0%} within the targets")
            if share >= ATTAINED:
                carried = rate
            else:
                missed = rate
            refinements += bool(carried and missed)
            rate = (carried + missed) / 2 if missed else carried * _GROWTH
            if missed and missed < 0.05:
                raise FatalError("tp1 carries no load within the targets on this machine")
        found.append(carried)

    with_server(serve_command("tp1", 2), console, use)
    return found[0]


def _play_once(url: str, label: str, workload: Workload) -> tuple[Run, float]:
    """The run, and the Unix time of its origin."""

    async def main() -> Run:
        options = Options(drain_s=30.0, warmup=2)
        facts = await look(url, options)
        prepared = await prepare(workload, facts, options)
        return await play(label, facts, prepared, options, counters)

    counters = Counters()
    run = run_lowered(main)
    # The clock of the run is monotonic; its origin on it is what the counters were started with.
    return run, time.time() - (time.monotonic() - counters.origin_s)


def run_configuration(label: str, seed: int, study: Study, console: Console) -> StudyRun:
    """One configuration on the seed's schedule, on a fresh server."""
    phases = study.phases
    workload = study.workload(arrivals_of(phases), study.seconds, seed)
    command = serve_command(label, 2)
    if label == DYNAMIC:
        command = serve_command("tp1", 2, mode="dynamic")
        command += ["--shrink-after-s", f"{study.shrink_after_s:g}"]
        command += ["--slo-ttft-p99-s", f"{SLO.ttft_s:g}", "--slo-tpot-p99-ms", f"{SLO.tpot_s * 1e3:g}"]
        command += ["--slo-ttft-per-token-ms", f"{SLO.ttft_per_token_s * 1e3:g}"]
    found: list[StudyRun] = []

    def use(url: str) -> None:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "progress"
            if label == DYNAMIC:
                with LeasedJob(url, file, study.notice_s):
                    run, origin_s = _play_once(url, label, workload)
            else:
                run, origin_s = _play_once(url, label, workload)
            progress = read_progress(file) if label == DYNAMIC else None
            found.append(study_run(run, seed, phases, SLO, progress=progress, origin_s=origin_s))

    with_server(command, console, use)
    return found[0]


def run_study(study: Study, console: Console, keep: Path | None = None, most: int | None = None) -> Outcome:
    """Everything that `keep` does not have yet, at most `most` runs of it. Prints each run as it ends, and
    keeps it."""
    kept = open_kept(keep, study)
    if not kept.study.capacity_per_s:
        console.print("what tp1 carries within the targets:")
        kept = replace(kept, study=replace(study, capacity_per_s=measure_capacity(study, console)))
        save_kept(keep, kept)
    study = kept.study
    console.print(f"capacity {study.capacity_per_s:.2f} requests/s; shrink_after_s {study.shrink_after_s:g}")
    for seed, label in kept.missing((*STATIC, DYNAMIC))[:most]:
        console.print(f"seed {seed}, {label}")
        run = run_configuration(label, seed, study, console)
        kept = replace(kept, runs=(*kept.runs, run))
        save_kept(keep, kept)
        shares = ", ".join(f"{phase.phase} {phase.goodput:.0%}" for phase in run.phases)
        console.print(f"  {shares}; {run.device_s:.0f} device-seconds, {run.failed} failed")
    return kept.outcome(judge(kept.runs, DYNAMIC), probe_memory(), time.strftime("%Y-%m-%d"))


def parse_options(argv: Sequence[str] | None) -> tuple[Study, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="scripts/bench-dynamic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=3, help="schedules to play (about 21 minutes each)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="length of each run")
    parser.add_argument("--scale", type=float, default=0.5, help="multiplies the lengths of the mix")
    parser.add_argument("--mix", choices=sorted(MIXES), default="chat-rag")
    parser.add_argument("--shrink-after-s", type=float, default=20.0)
    parser.add_argument("--notice", type=float, default=3.0, help="notice of the leased job, seconds")
    parser.add_argument("--capacity", type=float, default=0.0, help="requests/s; measured by default")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="go on where this study stopped")
    parser.add_argument("--most", type=int, metavar="RUNS", help="stop after so many runs (with --keep)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report")
    given = parser.parse_args(argv)
    seeds = tuple(range(given.first_seed, given.first_seed + given.seeds))
    study = Study(
        seeds, given.seconds, given.scale, given.mix, given.shrink_after_s, given.notice, given.capacity
    )
    if given.most is not None and given.keep is None:
        parser.error("--most needs --keep: the other runs would be lost")
    return study, given


def main(argv: Sequence[str] | None = None) -> int:
    study, given = parse_options(argv)
    console = Console(highlight=False)
    try:
        outcome = run_study(study, console, given.keep, given.most)
    except KeyboardInterrupt:
        return 130
    except FatalError as error:
        Console(stderr=True).print(f"bench-dynamic: {error}")
        return error.exit_code
    missing = len(study.seeds) * (len(STATIC) + 1) - len(outcome.runs)
    if missing:
        console.print(f"{missing} runs are missing: the same command goes on")
        return 0
    report = markdown(outcome)
    console.print(report, markup=False, soft_wrap=True)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)) + b"\n")
    if given.markdown is not None:
        given.markdown.write_text(report, encoding="utf-8")
    return 0 if all(verdict.held for verdict in outcome.verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
