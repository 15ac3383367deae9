"""Figures of a run by phase of its load, and what it took in devices. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamictp.bench.dynamic.job import Progress
from dynamictp.bench.record import Run, Slo
from dynamictp.bench.watcher import spans_of
from dynamictp.layout import spec_of


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the load: requests due in [start_s, end_s)."""

    name: str
    start_s: float
    end_s: float
    rate_per_s: float

    @property
    def quiet(self) -> bool:
        return self.name != "burst"


def low_burst_low(duration_s: float, low_per_s: float, burst_per_s: float) -> tuple[Phase, ...]:
    """Two fifths low, one fifth burst, two fifths low."""
    first, second = 0.4 * duration_s, 0.6 * duration_s
    return (
        Phase("low", 0.0, first, low_per_s),
        Phase("burst", first, second, burst_per_s),
        Phase("low again", second, duration_s, low_per_s),
    )


def arrivals_of(phases: Sequence[Phase]) -> str:
    """The phases as an arrival process of the benchmark."""
    return "steps:" + ",".join(f"{phase.start_s:g}={phase.rate_per_s:.4g}" for phase in phases)


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """Requests due in one phase. `goodput`: the share of them that finished within both targets."""

    phase: str
    due: int
    failed: int
    met: int
    ttft_p95_s: float | None
    tpot_mean_s: float | None

    @property
    def goodput(self) -> float:
        return self.met / self.due if self.due else 1.0


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One configuration on one schedule. `job_rounds` in the quiet phases; -1 where no job was leased to."""

    label: str
    seed: int
    phases: tuple[PhaseFigures, ...]
    device_s: float
    changes: tuple[tuple[float, str], ...]
    """(seconds, layout) from then on."""
    job_rounds: int = -1
    job_cpu_s: float = 0.0

    @property
    def failed(self) -> int:
        return sum(phase.failed for phase in self.phases)


def phase_figures(run: Run, phases: Sequence[Phase], slo: Slo) -> tuple[PhaseFigures, ...]:
    """What became of the requests of each phase. Cut requests count as missed: they were due."""
    found = []
    for phase in phases:
        due = [r for r in run.results if phase.start_s <= r.intended_s < phase.end_s]
        ttfts = sorted(r.ttft_s for r in due if r.ttft_s is not None)
        tpots = [r.tpot_s for r in due if r.tpot_s is not None]
        found.append(
            PhaseFigures(
                phase.name,
                due=len(due),
                failed=sum(r.failure is not None and not r.cut for r in due),
                met=sum(slo.met(r) for r in due),
                ttft_p95_s=ttfts[min(int(0.95 * len(ttfts)), len(ttfts) - 1)] if ttfts else None,
                tpot_mean_s=sum(tpots) / len(tpots) if tpots else None,
            )
        )
    return tuple(found)


def device_seconds(run: Run) -> float:
    """Devices of the layout in force, integrated over the load."""
    return sum(
        devices_of(span.layout) * max(0.0, min(span.end_s, run.load_s) - max(span.start_s, 0.0))
        for span in spans_of(run)
    )


def devices_of(text: str) -> int:
    """Devices that a layout takes."""
    return spec_of(text).devices


def study_run(
    run: Run,
    seed: int,
    phases: Sequence[Phase],
    slo: Slo,
    *,
    progress: Sequence[Progress] | None,
    origin_s: float,
) -> StudyRun:
    """The figures of one run. `progress` is the leased job's, on Unix time; the load began at `origin_s`."""
    spans = spans_of(run)
    job_rounds, job_cpu_s = -1, 0.0
    if progress is not None:
        calm = [phase for phase in phases if phase.quiet]
        at = [(step.at_s - origin_s, step) for step in progress]
        quiet = [step for t, step in at if any(p.start_s <= t < p.end_s for p in calm)]
        job_rounds = sum(step.rounds for step in quiet)
        job_cpu_s = sum(step.cpu_s for step in quiet)
    return StudyRun(
        label=run.label,
        seed=seed,
        phases=phase_figures(run, phases, slo),
        device_s=device_seconds(run),
        changes=tuple((span.start_s, span.layout) for span in spans),
        job_rounds=job_rounds,
        job_cpu_s=job_cpu_s,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """One criterion of one seed, in words and whether it held."""

    seed: int
    text: str
    held: bool


GOODPUT_SHARE = 0.95
DEVICE_SHARE = 0.75


def judge(runs: Sequence[StudyRun], dynamic: str = "dynamic") -> tuple[Verdict, ...]:
    """The criteria, seed by seed: no failure; per phase at least 95 % of the best static layout's goodput;
    at most 75 % of the device-seconds of the layouts that hold two devices; a job that got on.
    """
    verdicts = []
    for seed in sorted({run.seed for run in runs}):
        mine = [run for run in runs if run.seed == seed]
        static = [run for run in mine if run.label != dynamic]
        for run in (run for run in mine if run.label == dynamic):
            verdicts.append(Verdict(seed, f"failed requests: {run.failed}", run.failed == 0))
            for index, phase in enumerate(run.phases):
                best = max(static, key=lambda other, index=index: other.phases[index].goodput)  # type: ignore[misc]
                wanted = GOODPUT_SHARE * best.phases[index].goodput
                text = (
                    f"{phase.phase}: goodput {phase.goodput:.1%}, "
                    f"best static {best.phases[index].goodput:.1%} ({best.label})"
                )
                verdicts.append(Verdict(seed, text, phase.goodput >= wanted))
            two = max(other.device_s for other in static)
            share = run.device_s / two
            verdicts.append(
                Verdict(
                    seed,
                    f"device-seconds {run.device_s:.0f} of {two:.0f} ({share:.0%})",
                    share <= DEVICE_SHARE,
                )
            )
            text = f"leased job: {run.job_rounds} rounds, {run.job_cpu_s:.1f} s of a core in the quiet phases"
            verdicts.append(Verdict(seed, text, run.job_rounds > 0))
    return tuple(verdicts)
