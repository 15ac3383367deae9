"""The study of switches: its plan, the arithmetic of its report on made-up plays, a play on a fake server."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from rich.console import Console

from dynamictp.bench.admin import Switch
from dynamictp.bench.figures import parse_options
from dynamictp.bench.machine import Build, Machine, MemoryState
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.switches.outcome import (
    Outcome,
    RoundSeen,
    baseline_of,
    curve_of,
    opens,
    outcome_of,
    switch_figures,
)
from dynamictp.bench.switches.page import page
from dynamictp.bench.switches.play import Player, finished_per_s, on_schedule_time
from dynamictp.bench.switches.plot import plot
from dynamictp.bench.switches.run import Job, job_of, measure, write
from dynamictp.bench.switches.study import CYCLE, LONG_TOKENS, SHORT_TOKENS, Study, endless, schedule_of
from dynamictp.errors import FatalError
from tests.bench.fake_serve import FakeServe
from tests.bench.scripted_server import scripted

QUIET = MemoryState(30.0, 36.0)
IDS = tuple(range(2000))


# ---------------------------------------------------------------- the plan


def test_the_tours_hold_every_switch_once_and_go_on_where_the_last_one_stopped() -> None:
    study = Study(switches=200)
    tours = study.tours
    assert sum(len(tour.layouts) for tour in tours) == 200
    assert {len(tour.layouts) for tour in tours} <= {22, 23}
    assert tours[0].start == "tp1"
    walk = [tours[0].start, *(layout for tour in tours for layout in tour.layouts)]
    assert [tour.start for tour in tours[1:]] == [tour.layouts[-1] for tour in tours[:-1]]
    changes = Counter(pairwise(walk))
    assert len(changes) == 6
    assert set(changes.values()) == {33, 34}
    assert all(before != after for before, after in changes)
    # 8.5 minutes at most with switches, and the same for each control.
    assert study.seconds == pytest.approx((200 + len(tours)) * study.every_s * 4)


def test_a_schedule_is_its_studys_and_rounds_and_has_both_lengths() -> None:
    study = Study(switches=12, every_s=1.0, rate_per_s=40.0)
    (tour,) = study.tours
    schedule = schedule_of(study, tour, IDS)
    assert schedule == schedule_of(study, tour, IDS)
    assert schedule != schedule_of(replace(study, seed=1), tour, IDS)
    assert 400 < len(schedule) < 640  # 520 expected
    assert max(request.intended_s for request in schedule) < study.load_s(tour) == 13.0
    lengths = Counter(request.max_tokens for request in schedule)
    assert set(lengths) == {LONG_TOKENS, SHORT_TOKENS}
    assert 0.2 < lengths[LONG_TOKENS] / len(schedule) < 0.4
    assert [request.intended_s for request in endless(3, IDS)] == [0.0] * 3


@pytest.mark.parametrize(
    "changes", [{"switches": 0}, {"every_s": 0.0}, {"rate_per_s": -1.0}, {"controls": ()}]
)
def test_a_study_of_nothing_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"expected|control"):
        replace(Study(), **changes)  # type: ignore[arg-type]


def test_options() -> None:
    study = parse_options(["--only", "switches", "--switches", "200", "--", "--kernels", "torch"]).study
    assert study is not None
    assert (study.study, study.serve_flags) == (Study(switches=200), ("--kernels", "torch"))
    short = parse_options(["--quick", "--only", "switches", "--page", "docs/switches.md"]).study
    assert short is not None
    assert (short.study.switches, short.study.controls) == (12, ("tp1",))
    assert short.study.seconds < 30
    assert short.picture() == Path("docs/img/switches.svg")
    for bad in (
        ["--switches", "3"],
        ["--only", "switches", "--switches", "0"],
        ["--only", "switches,client"],
    ):
        with pytest.raises(SystemExit):
            parse_options(bad)


# ---------------------------------------------------------------- the arithmetic


def stream(name: str, *chunk_s: float, failure: Failure | None = None) -> Result:
    request = Request(chunk_s[0], "x", 5, name=name)
    ones = (1,) * len(chunk_s)
    return Result(request, chunk_s[0], chunk_s[0], chunk_s[-1], chunk_s, ones, failure=failure)


def steady(name: str, start_s: float, gap_s: float, count: int) -> Result:
    return stream(name, *(start_s + i * gap_s for i in range(count)))


def stalled(name: str, at_s: float, gap_s: float) -> Result:
    """Chunks every 10 ms, and one gap at `at_s`."""
    before = [at_s - 0.01 * i for i in range(10, -1, -1)]
    return stream(name, *before, *(at_s + gap_s + 0.01 * i for i in range(10)))


def change(
    before: str, after: str, start_s: float, end_s: float, first_ms: float | None, *, commit_ms: float = 0.1
) -> Switch:
    phases = {"proof": 20.0, "commit": commit_ms}
    return Switch(before, after, "closed", phases, 2, 1, 0, start_s, end_s, "s1", 40.0, first_ms)


def test_a_switch_takes_effect_with_the_first_admission_or_later_than_was_seen() -> None:
    longest = {"tp1": 0.05}
    told = switch_figures(0, change("tp1", "tp2", 1.0, 1.1, 300.0), 3.0, [], longest)
    assert (told.effect_ms, told.effect_seen) == (300.0, True)
    unmet = switch_figures(0, change("tp1", "tp1+tp1", 1.0, 1.1, None), 3.0, [], longest)
    assert (unmet.effect_ms, unmet.effect_seen) == (2000.0, False)
    nothing = switch_figures(0, change("tp1+tp1", "tp1", 1.0, 1.1, None), 3.0, [], longest)
    assert (nothing.effect_ms, nothing.effect_seen) == (None, False)
    assert told.total_ms == pytest.approx(100.0)
    assert (told.handovers, told.recomputes, told.streams, told.gap) == (2, 1, 0, None)


@pytest.mark.parametrize(
    ("before", "after", "opened"),
    [("tp1", "tp2", True), ("tp2", "tp1", True), ("tp1", "tp1+tp1", True), ("2*tp1", "tp1", False),
     ("tp2+tp1", "tp2", False), ("tp2+tp1", "3*tp1", True)],
)  # fmt: skip
def test_a_switch_opens_the_shapes_that_were_not_there(before: str, after: str, opened: bool) -> None:
    assert opens(change(before, after, 0.0, 1.0, None)) is opened


def test_the_control_is_the_worse_of_the_two_layouts_of_the_switch() -> None:
    longest = {"tp1": 0.3, "tp2": 0.1, "tp1+tp1": 0.2}
    assert baseline_of(change("tp2", "tp1+tp1", 0.0, 1.0, None), longest) == 0.2
    assert baseline_of(change("tp1", "tp2", 0.0, 1.0, None), longest) == 0.3
    assert baseline_of(change("tp2", "tp1+tp1", 0.0, 1.0, None), {"tp1": 0.3}) == 0.3


def test_streams_beyond_their_limit_are_counted_and_named() -> None:
    switch = change("tp1", "tp2", 1.0, 1.1, 300.0)
    results = [
        stalled("far", 1.05, 0.4),
        stalled("excused", 1.05, 0.2),  # over 150 ms, under 1.5 x the control's 160 ms
        stalled("elsewhere", 2.0, 0.9),  # not at the switch
        steady("slow", 0.0, 0.1, 30),  # 5 x its median allows 500 ms
        stream("before", 0.1, 0.2),
    ]
    seen = switch_figures(3, switch, 3.0, results, {"tp1": 0.16, "tp2": 0.02})
    assert seen.baseline_s == 0.16
    assert seen.streams == 3
    assert [verdict.stream for verdict in seen.out] == ["far"]
    assert (seen.out[0].longest_s, seen.out[0].limit_s) == (pytest.approx(0.4), pytest.approx(0.24))
    assert seen.out[0].median_s == pytest.approx(0.01)
    assert seen.gap == seen.out[0]
    assert seen.beyond_own == 2


def test_a_curve_keeps_the_longest_gap_and_falls() -> None:
    gaps = [0.01] * 990 + [0.1] * 9 + [0.5]
    curve = curve_of(gaps)
    assert curve[0] == (0.01, 1.0)
    assert curve[-1] == (0.5, 0.001)
    assert (0.1, 0.01) in curve
    assert all(a[0] <= b[0] and a[1] > b[1] for a, b in pairwise(curve))
    assert curve_of([]) == ()


def rounds(commit_ms: float = 0.1) -> list[RoundSeen]:
    """Two rounds of two switches each, whose plays differ from their controls in one gap each."""
    seen = []
    tours = Study(switches=30, every_s=1.0).tours
    for number in (0, 1):
        switches = (
            change("tp1", "tp2", 1.0, 1.1, 100.0 + number, commit_ms=commit_ms),
            change("tp2", "tp1+tp1", 2.0, 2.2, None),
        )
        with_gap = stalled(f"r{number}-0", 1.05, 0.12)
        without = stalled(f"r{number}-0", 1.05, 0.04)
        tour = replace(tours[number], layouts=("tp2", "tp1+tp1"))
        seen.append(RoundSeen(tour, switches, (with_gap,), {"tp1": (without,)}, QUIET, QUIET))
    return seen


def outcome(seen: list[RoundSeen]) -> Outcome:
    study = Study(switches=4, every_s=1.0, controls=("tp1",), rate_per_s=3.0, saturated_per_s=5.0)
    machine, build = Machine("A CPU", 2, 24.0, "6.1"), Build("2030-01-02", "0.1.0", "abcdef0123")
    return outcome_of(study, machine, build, seen)


def test_the_criteria_hold_by_the_99th_percentile_and_by_every_stream() -> None:
    good = outcome(rounds())
    assert good.held
    assert [s.effect_ms for s in good.switches] == [100.0, 1000.0, 101.0, 1000.0]
    texts = [verdict.text for verdict in good.verdicts]
    assert texts[0] == "4 of 4 switches done"
    assert "P99 1000.0 ms, wanted at most 2000 ms" in texts[1]
    assert texts[3] == "0 of 2 running streams at a switch beyond their gap limit"
    assert texts[4] == "0 of 4 requests failed, with switches and without"

    late = outcome(rounds(commit_ms=80.0))
    assert [verdict.held for verdict in late.verdicts] == [True, True, False, True, True, True]

    lost = rounds()
    broken = stream("r0-9", 0.1, 0.2, failure=Failure(FailureKind.STREAM, "lost"))
    lost[0] = replace(lost[0], results=(*lost[0].results, broken, stalled("r0-8", 2.1, 0.3)))
    bad = outcome(lost)
    assert [verdict.held for verdict in bad.verdicts] == [True, True, True, False, False, True]
    assert bad.verdicts[3].text.startswith("1 of 3 ")
    assert bad.verdicts[4].text.startswith("1 of 6 ")

    undone = rounds()
    failed = replace(undone[0].switches[0], outcome="committed", weight_bytes_copied=7)
    undone[0] = replace(undone[0], switches=(failed, undone[0].switches[1]))
    assert [v.held for v in outcome(undone).verdicts] == [False, True, True, True, True, False]
    with pytest.raises(ValueError, match="no round"):
        outcome([])


def test_a_run_in_which_no_stream_met_a_switch_proves_nothing() -> None:
    idle = [replace(seen, results=(stream("early", 0.1, 0.2),)) for seen in rounds()]
    assert not outcome(idle).verdicts[3].held


def test_gaps_at_the_switches_are_compared_with_the_same_moments_without() -> None:
    seen = outcome(rounds())
    (control,) = seen.controls
    assert (seen.switching.requests, control.requests, control.label) == (2, 2, "tp1")
    assert seen.switching.during is not None
    assert control.during is not None
    assert seen.switching.during.max == pytest.approx(0.12)
    assert control.during.max == pytest.approx(0.04)
    assert seen.switching.gaps is not None
    assert seen.switching.gaps.count == 2 * 20
    assert seen.switching.longest is not None
    assert (seen.switching.longest.count, seen.switching.longest.max) == (2, pytest.approx(0.12))


def test_the_page_says_what_was_measured_where_and_when() -> None:
    text = page(outcome(rounds()), "img/x.svg")
    for words in ("A CPU, 2 usable cores", "2030-01-02", "](img/x.svg)",
                  "60% of the 5.00 that `tp1` finishes",
                  "| commit (P99 at most 50) | 4 | 0.1 | 0.1 | 0.1 |",
                  "| tp1 → tp2 | 2 | 40, 40 | 100, 101 |",
                  "Switches that saw no request before the next one: 2. 8 running requests were handed over",
                  "| with switches | 2 | 0 | 10 |", "| tp1 | 2 | 0 | 10 |", "memory state A (36 to 36 GB/s",
                  "0 of 2 running streams at a switch beyond their gap limit: held"):  # fmt: skip
        assert words in text, words
    assert "MISSED" not in text
    assert "**A short run: 200 switches are wanted" in text
    assert "Streams beyond" not in text


def test_the_page_lists_streams_beyond_their_limit() -> None:
    bad = rounds()
    bad[1] = replace(bad[1], results=(stalled("r1-7", 2.1, 0.3),))
    text = page(outcome(bad), "img/x.svg")
    assert "1 of 2 running streams at a switch beyond their gap limit: **MISSED**" in text
    assert "| r1-7 | tp2 → tp1+tp1 | 2.0 | 300 | 150 | 10 |" in text


def test_page_plot_and_json_are_written_together(tmp_path: Path) -> None:
    job = Job(Study(), page=tmp_path / "switches.md", json=tmp_path / "switches.json")
    measured = outcome(rounds())
    write(job, measured)
    assert "](img/switches.svg)" in (tmp_path / "switches.md").read_text()
    drawn = (tmp_path / "img" / "switches.svg").read_text()
    assert drawn == plot(measured) + "\n"
    root = ET.fromstring(drawn)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = {text.strip() for text in root.itertext()}
    assert {"decision to first admitted", "no request before the next switch", "tp1, no switch"} <= words
    again = msgspec.json.decode((tmp_path / "switches.json").read_bytes(), type=Outcome)
    assert again == measured


# ---------------------------------------------------------------- playing


def test_a_full_loop_counts_what_ended_while_all_users_were_busy() -> None:
    results = [replace(steady(f"{i}", i * 1.0, 0.1, 11), end_s=i * 1.0 + 1.5) for i in range(5)]
    assert finished_per_s(results) == pytest.approx(3 / 4)
    with pytest.raises(FatalError, match="no request ended"):
        finished_per_s(results[:1])
    lost = stream("x", 0.0, 0.1, failure=Failure(FailureKind.TIMEOUT, "late"))
    with pytest.raises(FatalError, match="failed on tp1"):
        finished_per_s([*results, lost])


def test_times_are_the_schedules() -> None:
    result = replace(stream("a", 101.5, 101.6), request=Request(1.5, "x", 5), intended_s=101.5)
    played = on_schedule_time([result], [change("tp1", "tp2", 103.0, 103.5, 1.0)])
    assert played.results[0].chunk_s == (1.5, 1.6)
    assert (played.switches[0].started_s, played.switches[0].ended_s) == (3.0, 3.5)
    with pytest.raises(FatalError, match="no request"):
        on_schedule_time([], [])


async def test_a_study_plays_its_rounds_and_controls_in_turn() -> None:
    fake = FakeServe()
    study = Study(switches=26, every_s=0.02, controls=("tp1", "tp2"), rate_per_s=100.0)
    job = replace(job_of(None, 0.0, quick=True, page=None, json=None, serve_flags=()), study=study)
    console = Console(file=io.StringIO())
    async with scripted(fake) as server:
        player = await asyncio.to_thread(Player, server.url)
        measured = await asyncio.to_thread(measure, job, player, lambda: QUIET, console)
    first, second = study.tours
    # With switches and the controls, beginning with another one each round.
    assert fake.layouts == [
        *(first.start, *first.layouts, "tp1", "tp2"),
        *("tp1", "tp2", second.start, *second.layouts),
    ]
    assert [(s.before, s.after) for s in measured.switches] == list(
        pairwise(("tp1", *(CYCLE[i % 6] for i in range(26))))
    )
    # The fake counts the layouts it is given, from 1.
    assert [s.effect_ms for s in measured.switches[:13]] == [102.0 + i for i in range(13)]
    assert {play.label: play.failed for play in measured.controls} == {"tp1": 0, "tp2": 0}
    assert measured.switching.requests == measured.controls[0].requests > 0
    assert "round 2 of 2, with switches" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_the_load_is_a_share_of_what_tp1_finishes_without_a_pause() -> None:
    fake = FakeServe()
    async with scripted(fake) as server:
        player = await asyncio.to_thread(Player, server.url)
        full = await asyncio.to_thread(player.saturated_per_s, 40)
    assert fake.layouts == ["tp1"]
    assert full > 0
    assert len([peer for peer in server.requests if peer.path == "/v1/completions"]) == 40
