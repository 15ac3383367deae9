"""`scripts/bench --only switches`: the study from the command line to the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from dynamictp.bench.benchmark import with_server
from dynamictp.bench.machine import MemoryState, describe_build, describe_machine, probe_memory
from dynamictp.bench.server import serve_command
from dynamictp.bench.switches.outcome import Outcome, RoundSeen, outcome_of
from dynamictp.bench.switches.page import page
from dynamictp.bench.switches.play import Player
from dynamictp.bench.switches.study import LOAD_SHARE, Study
from dynamictp.extras import need_plots

SHORT_SWITCHES, SHORT_EVERY_S, SHORT_CONTROLS = 12, 1.0, ("tp1",)
"""The short form, in less than a minute: the plays without a switch on the slowest layout only."""
_SATURATION_REQUESTS, _SHORT_SATURATION_REQUESTS = 160, 48


@dataclass(frozen=True, slots=True)
class Job:
    """A study and where its report goes. The plot goes beside the page, into `img/`."""

    study: Study
    quick: bool = False
    page: Path | None = None
    json: Path | None = None
    serve_flags: tuple[str, ...] = ()

    def picture(self) -> Path | None:
        return None if self.page is None else self.page.parent / "img" / f"{self.page.stem}.svg"


def job_of(
    switches: int | None,
    rate_per_s: float,
    *,
    quick: bool,
    page: Path | None,
    json: Path | None,
    serve_flags: Sequence[str],
) -> Job:
    """The full study or its short form. Raises ConfigError for a page without a library to draw its plot."""
    if page is not None:
        need_plots("--page")
    study = Study(rate_per_s=rate_per_s)
    if quick:
        study = replace(study, switches=SHORT_SWITCHES, every_s=SHORT_EVERY_S, controls=SHORT_CONTROLS)
    if switches is not None:
        study = replace(study, switches=switches)
    return Job(study, quick, page, json, tuple(serve_flags))


def run(job: Job, console: Console) -> bool:
    """Plays the study on a fresh server, prints and writes the report. Returns whether all criteria held.

    Raises FatalError when a server does not start, or a switch or a warm-up request fails.
    """
    console.print(f"{job.study.switches} switches under load, {job.study.seconds:.0f} s of plays")
    found: list[Outcome] = []
    command = [*serve_command("tp1"), *job.serve_flags]
    with_server(command, console, lambda url: found.append(measure(job, Player(url), probe_memory, console)))
    outcome = found[0]
    write(job, outcome)
    console.print(page(outcome, "img/switches.svg"), markup=False, highlight=False, soft_wrap=True)
    return outcome.held


def measure(job: Job, player: Player, probe: Callable[[], MemoryState], console: Console) -> Outcome:
    """All rounds of the study, at a rate that `tp1` carries unless one is given."""
    study = job.study
    if not study.rate_per_s:
        full = player.saturated_per_s(_SHORT_SATURATION_REQUESTS if job.quick else _SATURATION_REQUESTS)
        study = replace(study, saturated_per_s=full, rate_per_s=LOAD_SHARE * full)
        console.print(f"tp1 finishes {full:.2f} requests/s; the load is {study.rate_per_s:.2f}")
    rounds: list[RoundSeen] = []
    for tour in study.tours:
        rounds.append(player.round(study, tour, probe, lambda text: console.print(Text(text, style="dim"))))
    return outcome_of(study, describe_machine(), describe_build(), rounds)


def write(job: Job, outcome: Outcome) -> None:
    """The JSON, the page and its plot, as far as they were asked for."""
    if job.json is not None:
        job.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)) + b"\n")
    picture = job.picture()
    if job.page is None or picture is None:
        return
    from dynamictp.bench.switches.plot import plot  # noqa: PLC0415 - matplotlib is optional

    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(plot(outcome) + "\n", encoding="utf-8")
    address = picture.relative_to(job.page.parent).as_posix()
    job.page.write_text(page(outcome, address), encoding="utf-8")
