"""The study of dynamic mode: phases, device-seconds, the leased job, the criteria."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dynamictp.bench.dynamic import study as study_module
from dynamictp.bench.dynamic.job import Progress, read_progress
from dynamictp.bench.dynamic.kept import open_kept, save_kept
from dynamictp.bench.dynamic.outcome import Outcome, Study
from dynamictp.bench.dynamic.phases import (
    PhaseFigures,
    StudyRun,
    arrivals_of,
    device_seconds,
    judge,
    low_burst_low,
    phase_figures,
    study_run,
)
from dynamictp.bench.dynamic.study import SLO, parse_options, run_study
from dynamictp.bench.dynamic.tables import markdown
from dynamictp.bench.machine import MemoryState
from dynamictp.bench.record import ClientFacts, LayoutSample, Run, ServerFacts
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.workload import arrivals
from dynamictp.errors import ConfigError

PHASES = low_burst_low(100.0, 1.0, 4.0)


def answer(
    due_s: float, ttft_s: float = 1.0, *, prompt: int = 10, failure: FailureKind | None = None
) -> Result:
    first = due_s + ttft_s
    return Result(
        request=Request(due_s, "", 3, prompt_tokens=prompt),
        intended_s=due_s,
        sent_s=due_s,
        end_s=first + 0.05,
        chunk_s=(first, first + 0.05),
        chunk_tokens=(1, 1),
        prompt_tokens=prompt,
        failure=Failure(failure, "x") if failure else None,
    )


def run_of(label: str, *results: Result, layouts: tuple[tuple[float, str], ...] = ((0.0, "tp2"),)) -> Run:
    samples = tuple(LayoutSample(at_s, layout, 0, 0) for at_s, layout in layouts)
    return Run(
        label, "now", ServerFacts("http://s", "m"), ClientFacts(0.1, "cpu", "3"), 100.0, 110.0, results,
        samples=samples,
    )  # fmt: skip


def test_the_phases_are_two_fifths_one_fifth_two_fifths_of_the_load() -> None:
    assert [(p.name, p.start_s, p.end_s) for p in PHASES] == [
        ("low", 0.0, 40.0),
        ("burst", 40.0, 60.0),
        ("low again", 60.0, 100.0),
    ]
    assert [p.quiet for p in PHASES] == [True, False, True]
    assert arrivals_of(PHASES) == "steps:0=1,40=4,60=1"
    curve = arrivals.steps([(0.0, 1.0), (40.0, 4.0), (60.0, 1.0)], 100.0)
    assert curve.expected == pytest.approx(160.0)


def test_each_request_counts_in_the_phase_it_was_due_in_and_its_target_grows_with_the_prompt() -> None:
    run = run_of(
        "x",
        answer(1.0),
        answer(39.9, ttft_s=2.1),  # 2.02 s allowed
        answer(41.0, ttft_s=2.1, prompt=100),  # 2.2 s allowed
        answer(42.0, failure=FailureKind.TIMEOUT),
        answer(99.0, failure=FailureKind.CUT),
    )
    low, burst, again = phase_figures(run, PHASES, SLO)
    assert (low.due, low.met, low.failed, low.goodput) == (2, 1, 0, 0.5)
    assert (burst.due, burst.met, burst.failed) == (2, 1, 1)
    assert (again.due, again.met, again.failed) == (1, 0, 0)
    assert low.tpot_mean_s == pytest.approx(0.05)
    assert phase_figures(run_of("x"), PHASES, SLO)[0].goodput == 1.0


def test_device_seconds_are_the_layouts_devices_over_the_load() -> None:
    grown = run_of(
        "dynamic", layouts=((0.0, "tp1"), (39.0, "tp1"), (41.0, "tp2"), (79.0, "tp2"), (81.0, "tp1"))
    )
    assert device_seconds(grown) == pytest.approx(40 + 2 * 40 + 20)
    assert device_seconds(run_of("tp2")) == pytest.approx(200)
    assert device_seconds(run_of("2", layouts=((0.0, "tp1+tp1"),))) == pytest.approx(200)


def figures(*goodputs: float) -> tuple[PhaseFigures, ...]:
    return tuple(
        PhaseFigures(phase.name, 100, 0, round(100 * goodput), 0.5, 0.05)
        for phase, goodput in zip(PHASES, goodputs, strict=True)
    )


RUNS = (
    StudyRun("tp1", 0, figures(1.0, 0.2, 0.9), 100.0, ()),
    StudyRun("tp2", 0, figures(1.0, 0.9, 1.0), 200.0, ()),
    StudyRun("dynamic", 0, figures(0.96, 0.87, 0.95), 140.0, ((0.0, "tp1"), (41.0, "tp2")), 10, 5.0),
)


def test_the_criteria_compare_with_the_best_static_layout_of_each_phase() -> None:
    assert all(verdict.held for verdict in judge(RUNS))
    for change in (
        {"phases": figures(0.94, 0.9, 1.0)},
        {"device_s": 151.0},
        {"job_rounds": 0},
        {"phases": (replace(RUNS[2].phases[0], failed=1), *RUNS[2].phases[1:])},
    ):
        verdicts = judge((*RUNS[:2], replace(RUNS[2], **change)))  # type: ignore[arg-type]
        assert sum(not verdict.held for verdict in verdicts) == 1, change


def test_the_report_shows_losing_cases_too() -> None:
    study = Study((0,), 100.0, 0.5, "chat-rag", 20.0, 3.0, 2.0)
    state = MemoryState(30.0, 36.0, 0.0)
    runs = (*RUNS[:2], replace(RUNS[2], device_s=160.0))
    text = markdown(Outcome(study, "A CPU", state, state, runs, judge(runs), "2030-01-02"))
    assert "| tp1 | 100% of 100, 0.50 s, 50 ms | 20% of 100, 0.50 s, 50 ms |" in text
    assert "device-seconds 160 of 200 (80%): MISSED" in text
    assert "Layouts: tp1 from 0.0 s, tp2 from 41.0 s." in text


def test_the_jobs_work_counts_in_quiet_phases_only() -> None:
    progress = [Progress(1000.0 + at_s, 7, 0.5, (1,)) for at_s in (10.0, 45.0, 70.0, 101.0)]
    seen = study_run(run_of("dynamic"), 3, PHASES, SLO, progress=progress, origin_s=1000.0)
    assert (seen.seed, seen.job_rounds, seen.job_cpu_s) == (3, 14, 1.0)
    assert study_run(run_of("tp1"), 3, PHASES, SLO, progress=None, origin_s=0.0).job_rounds == -1


def test_the_job_works_until_it_is_told_to_leave(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    assert read_progress(file) == []
    job = subprocess.Popen([sys.executable, "-m", "dynamictp.bench.dynamic.job", str(file)])
    try:
        deadline = time.monotonic() + 60
        while not (seen := read_progress(file)) and time.monotonic() < deadline:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 0
    finally:
        job.kill()
        job.wait()
    assert seen[0].rounds > 0
    assert seen[0].cpu_s > 0
    assert set(seen[0].cores) <= os.sched_getaffinity(0)


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    study, given = parse_options(["--seeds", "2", "--first-seed", "5", "--json", "x.json"])
    assert study.seeds == (5, 6)
    assert (given.json, given.markdown, given.keep) == (Path("x.json"), None, None)
    with pytest.raises(SystemExit):
        parse_options(["--most", "1"])
    assert "--keep" in capsys.readouterr().err


def test_a_stopped_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[int, str]] = []

    def play(label: str, seed: int, study: Study, console: Console) -> StudyRun:
        played.append((seed, label))
        return replace(RUNS[0], label=label, seed=seed)

    monkeypatch.setattr(study_module, "measure_capacity", lambda study, console: 2.0)
    monkeypatch.setattr(study_module, "run_configuration", play)
    console, file = Console(quiet=True), tmp_path / "kept"
    study = Study((0, 1), 100.0, 0.5, "chat-rag", 20.0, 3.0)
    first = run_study(study, console, file, most=3)
    assert first.study.capacity_per_s == 2.0
    assert len(first.runs) == 3
    monkeypatch.setattr(study_module, "measure_capacity", None)
    whole = run_study(study, console, file)
    assert played == [(seed, label) for seed in (0, 1) for label in ("tp1", "tp2", "tp1+tp1", "dynamic")]
    assert [(run.seed, run.label) for run in whole.runs] == played
    assert whole.runs[:3] == first.runs


@pytest.mark.parametrize("change", [{"scale": 1.0}, {"capacity_per_s": 3.0}, {"shrink_after_s": 300.0}])
def test_another_study_does_not_go_on_in_the_same_file(tmp_path: Path, change: dict[str, float]) -> None:
    study = Study((0,), 100.0, 0.5, "chat-rag", 20.0, 3.0, 2.0)
    file = tmp_path / "kept"
    save_kept(file, open_kept(file, study))
    assert open_kept(file, replace(study, capacity_per_s=0.0, seeds=(0, 1))).study.seeds == (0, 1)
    with pytest.raises(ConfigError, match=r"another study|capacity"):
        open_kept(file, replace(study, **change))  # type: ignore[arg-type]
    file.write_bytes(b"{}")
    with pytest.raises(ConfigError, match="no kept study"):
        open_kept(file, study)
