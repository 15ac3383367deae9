"""A study that was stopped: what it has so far, in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dynamictp.bench.dynamic.outcome import Outcome, Study
from dynamictp.bench.dynamic.phases import StudyRun, Verdict
from dynamictp.bench.machine import MemoryState, describe_machine, probe_memory
from dynamictp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kept:
    """The runs there are, and where they were made. `study.capacity_per_s` is 0 until it is measured."""

    study: Study
    machine: str
    before: MemoryState
    runs: tuple[StudyRun, ...] = ()

    def missing(self, labels: Sequence[str]) -> list[tuple[int, str]]:
        """(seed, configuration) of the runs still to be made, in order."""
        there = {(run.seed, run.label) for run in self.runs}
        wanted = [(seed, label) for seed in self.study.seeds for label in labels]
        return [one for one in wanted if one not in there]

    def outcome(self, verdicts: tuple[Verdict, ...], after: MemoryState, date: str) -> Outcome:
        return Outcome(self.study, self.machine, self.before, after, self.runs, verdicts, date)


def open_kept(file: Path | None, study: Study) -> Kept:
    """What `file` has of the study, or a new one. Raises `ConfigError` for another study or machine's."""
    machine = str(describe_machine())
    if file is None or not file.exists():
        return Kept(study, machine, probe_memory())
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=Kept)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is no kept study: {error}") from error
    # The file may be given more seeds, and knows the capacity.
    wanted = replace(study, seeds=kept.study.seeds, capacity_per_s=kept.study.capacity_per_s)
    if wanted != kept.study or machine != kept.machine:
        raise ConfigError(f"{file} is of another study or machine: give another file, or the options it had")
    capacity = kept.study.capacity_per_s
    if study.capacity_per_s not in (0.0, capacity):
        raise ConfigError(f"{file} has runs at a capacity of {capacity:g}, not {study.capacity_per_s:g}")
    return replace(kept, study=replace(kept.study, seeds=study.seeds))


def save_kept(file: Path | None, kept: Kept) -> None:
    """Replace the file, if one is wanted, in one step: an interrupt loses at most the run in progress."""
    if file is None:
        return
    new = file.with_name(file.name + ".new")
    new.write_bytes(msgspec.json.encode(kept))
    new.replace(file)
