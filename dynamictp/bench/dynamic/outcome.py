"""What a study of dynamic mode plays, and all that came of it."""

from __future__ import annotations

from dataclasses import dataclass

from dynamictp.bench.dynamic.phases import Phase, StudyRun, Verdict, low_burst_low
from dynamictp.bench.machine import MemoryState
from dynamictp.bench.workload.classes import MIXES, Workload

LOW, BURST = 0.25, 1.4
"""Rates of the phases, as shares of what `tp1` carries."""


@dataclass(frozen=True, slots=True)
class Study:
    """What is played. `seconds` per run."""

    seeds: tuple[int, ...]
    seconds: float
    scale: float
    mix: str
    shrink_after_s: float
    notice_s: float
    capacity_per_s: float = 0.0

    @property
    def phases(self) -> tuple[Phase, ...]:
        return low_burst_low(self.seconds, LOW * self.capacity_per_s, BURST * self.capacity_per_s)

    def workload(self, arrivals: str, duration_s: float, seed: int) -> Workload:
        return Workload(MIXES[self.mix], arrivals, duration_s, seed, self.scale, endpoint="completions")


@dataclass(frozen=True, slots=True)
class Outcome:
    """All of a study, for the report and as JSON."""

    study: Study
    machine: str
    before: MemoryState
    after: MemoryState
    runs: tuple[StudyRun, ...]
    verdicts: tuple[Verdict, ...]
    date: str
