"""The study as Markdown, for the terminal and for the documentation. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dynamictp.bench.benchmark import DYNAMIC
from dynamictp.bench.dynamic.outcome import Outcome
from dynamictp.bench.dynamic.phases import PhaseFigures, StudyRun


def markdown(outcome: Outcome) -> str:
    """The whole report."""
    return "\n".join(_lines(outcome)) + "\n"


def _lines(outcome: Outcome) -> Iterator[str]:
    study = outcome.study
    yield f"{outcome.machine}  "
    yield f"{outcome.date}; memory before: {outcome.before}; after: {outcome.after}  "
    yield (
        f"mix {study.mix}, lengths x {study.scale:g}; what tp1 carries within the targets: "
        f"{study.capacity_per_s:.2f} requests/s; shrink_after_s {study.shrink_after_s:g}; "
        f"notice of the leased job {study.notice_s:g} s"
    )
    yield ""
    phases = ", ".join(f"{p.name} {p.rate_per_s:.2f}/s for {p.end_s - p.start_s:.0f} s" for p in study.phases)
    yield f"Phases: {phases}."
    for seed in study.seeds:
        yield from _seed([run for run in outcome.runs if run.seed == seed], seed)
    yield ""
    yield "#### Criteria"
    yield ""
    for verdict in outcome.verdicts:
        yield f"- seed {verdict.seed}: {verdict.text}: {'held' if verdict.held else 'MISSED'}"


def _seed(runs: list[StudyRun], seed: int) -> Iterator[str]:
    if not runs:
        return
    yield ""
    yield f"#### Seed {seed}"
    yield ""
    names = [phase.phase for phase in runs[0].phases]
    columns = [
        "",
        *(f"{name}: goodput, TTFT P95, TPOT" for name in names),
        "device-s",
        "failed",
        "job rounds",
    ]
    yield f"| {' | '.join(columns)} |"
    yield f"| --- |{' --: |' * (len(columns) - 1)}"
    for run in runs:
        job = "-" if run.job_rounds < 0 else str(run.job_rounds)
        cells = [run.label, *map(_phase, run.phases), f"{run.device_s:.0f}", str(run.failed), job]
        yield f"| {' | '.join(cells)} |"
    for run in runs:
        if run.label == DYNAMIC:
            yield ""
            yield "Layouts: " + ", ".join(f"{layout} from {at_s:.1f} s" for at_s, layout in run.changes) + "."


def _phase(figures: PhaseFigures) -> str:
    ttft = "-" if figures.ttft_p95_s is None else f"{figures.ttft_p95_s:.2f} s"
    tpot = "-" if figures.tpot_mean_s is None else f"{figures.tpot_mean_s * 1e3:.0f} ms"
    return f"{figures.goodput:.0%} of {figures.due}, {ttft}, {tpot}"
