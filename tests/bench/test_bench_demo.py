from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from dynamictp.bench.admin import Switch
from dynamictp.bench.demo import (
    LAYOUTS,
    Display,
    Options,
    Progress,
    build_schedule,
    parse_options,
    play,
    tour,
)
from dynamictp.bench.demo_report import (
    ACROSS,
    Play,
    as_json,
    layout_strip,
    load_strip,
    render,
    rows_by_layout,
    stages_of,
)
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.clock import SystemClock
from dynamictp.errors import FatalError


def switch(before: str, after: str, start_s: float, end_s: float, handovers: int = 0) -> Switch:
    return Switch(before, after, "closed", {"commit": 0.5, "drain": 12.0}, handovers, 0, 0, start_s, end_s)


def result(intended_s: float, end_s: float, failure: Failure | None = None, handovers: int = 0) -> Result:
    first_s, last_s = intended_s + 0.1, end_s
    report = {"choices": [{"handovers": handovers, "recomputes": 0}]}
    return Result(
        Request(0.0, "x", 5), intended_s, intended_s, end_s, (first_s, last_s), (1, 1),
        finish_reason="length", failure=failure, report=report,
    )  # fmt: skip


PLAY = Play(
    started_s=100.0,
    ended_s=140.0,
    first_layout="tp1",
    results=(
        result(101.0, 105.0),
        result(109.0, 112.0, handovers=1),  # across tp1 → tp2
        result(112.0, 115.0),
        result(131.0, 139.0),
        result(132.0, 133.0, failure=Failure(FailureKind.STREAM, "lost")),
    ),
    switches=(switch("tp1", "tp2", 110.0, 110.5, handovers=1), switch("tp2", "tp1", 130.0, 130.5)),
)


def shown(play_: Play, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(play_))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_stages_are_the_spans_between_switches() -> None:
    spans = [(s.layout, s.start_s, s.end_s) for s in stages_of(PLAY)]
    assert spans == [("tp1", 100.0, 110.0), ("tp2", 110.5, 130.0), ("tp1", 130.5, 140.0)]


def test_requests_belong_to_the_layout_they_lived_under_wholly() -> None:
    rows = {row.layout: row for row in rows_by_layout(PLAY)}
    assert {name: row.requests for name, row in rows.items()} == {"tp1": 2, "tp2": 1, ACROSS: 1}
    assert rows["tp2"].tpot is not None
    assert rows["tp2"].tpot.p50 == pytest.approx(2.9)
    assert rows["tp1"].ttft is not None
    assert rows["tp1"].ttft.p50 == pytest.approx(0.1)


def test_the_strip_shows_each_layout_for_its_share_of_the_time() -> None:
    assert layout_strip(PLAY, 40) == "tp1-------|tp2----------------|tp1------"
    assert layout_strip(PLAY, 4) == "t|t|"


def test_running_requests_as_bars() -> None:
    strip = load_strip(PLAY, 40)
    assert len(strip) == 40
    assert strip[0] == " "
    assert strip[2] == "▄"  # one of at most two
    assert strip[32] == "█"


def test_the_report_names_what_matters() -> None:
    text = shown(PLAY)
    for words in ("requests", "failures", "stream: lost", "longest gap", "tp1 → tp2", "TTFT P95", "12.0"):
        assert words in text
    assert "Traceback" not in text
    assert max(len(line) for line in shown(PLAY, width=80).splitlines()) <= 80


def test_a_play_without_results_still_renders() -> None:
    assert "failures" in shown(Play(0.0, 1.0, "tp1", (), ()))


def test_json_holds_the_same_figures() -> None:
    plain = json.loads(msgspec.json.encode(as_json(PLAY)))
    assert plain["requests"] == 5
    assert len(plain["failures"]) == 1
    assert plain["handovers"] == 1
    assert plain["switches"][0]["started_s"] == 10.0
    assert plain["layouts"][0]["ttft_s"]["count"] == 2


def test_the_schedule_is_seeded_chat_with_each_switch_inside_a_burst() -> None:
    schedule = build_schedule(100.0, seed=5)
    assert schedule == build_schedule(100.0, seed=5)
    assert all(20 <= r.max_tokens <= 60 and r.endpoint == "chat" for r in schedule)
    near = [sum(abs(r.intended_s - at_s) < 2.0 for r in schedule) for at_s in (20, 40, 60, 80)]
    calm = [sum(abs(r.intended_s - at_s) < 2.0 for r in schedule) for at_s in (15, 35, 55, 75)]
    assert min(near) > 5
    assert sum(near) > 2 * sum(calm)


def test_the_tour_takes_only_legal_layouts() -> None:
    assert tour(()) == tour(("tp1", "tp2", "tp1+tp1")) == LAYOUTS
    assert set(tour(("tp1", "tp1+tp1"))) == {"tp1", "tp1+tp1"}
    assert len(tour(("tp1", "tp1+tp1"))) == len(LAYOUTS)


class InstantSender:
    async def send(self, request: Request, intended_s: float) -> Result:
        now = SystemClock().now()
        await asyncio.sleep(0)
        return Result(request, intended_s, now, now, (now,), (1,), finish_reason="stop")


class Layouts:
    """Remembers what was asked for; refuses from the `refuse`-th change on."""

    def __init__(self, refuse: int = 99) -> None:
        self.asked: list[str] = []
        self._refuse = refuse

    async def set_layout(self, layout: str) -> Switch:
        if len(self.asked) >= self._refuse:
            raise FatalError("409: a switch is in flight")
        before, now = (self.asked or ["tp1"])[-1], SystemClock().now()
        self.asked.append(layout)
        return switch(before, layout, now, now)


OPTIONS = Options(seconds=0.5, seed=1, json_path=None, url=None)


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_play_changes_the_layouts_in_order_and_restores_the_cursor(terminal: bool) -> None:
    out = io.StringIO()
    layouts = Layouts()
    with Display(Console(file=out, force_terminal=terminal, width=100)) as display:
        seen = await play(InstantSender(), layouts, OPTIONS, display, SystemClock())
    assert tuple(layouts.asked) == LAYOUTS[1:]
    assert [s.after for s in seen.switches] == layouts.asked
    assert len(seen.results) == len(build_schedule(OPTIONS.seconds, OPTIONS.seed))
    assert not seen.failures
    assert "tp1 → tp2: closed" in out.getvalue()
    if terminal:
        assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")
    else:
        assert "\x1b" not in out.getvalue()


async def test_a_refused_switch_ends_the_play_and_its_load() -> None:
    with Display(Console(file=io.StringIO())) as display, pytest.raises(FatalError, match="in flight"):
        await play(InstantSender(), Layouts(refuse=1), OPTIONS, display, SystemClock())
    assert len(asyncio.all_tasks()) == 1  # this test's own


async def test_progress_counts_what_passes_through() -> None:
    progress = Progress(InstantSender(), "tp1")
    task = asyncio.create_task(progress.send(Request(0.0, "x", 1), 0.0))
    await asyncio.sleep(0)
    assert progress.running == 1
    await task
    assert (progress.running, progress.finished, progress.failed, progress.tokens) == (0, 1, 0, 1)
    assert "finished   1" in progress.line(3.0)


def test_options() -> None:
    options = parse_options(["--seconds", "60", "--json", "out.json", "--url", "http://h:1"])
    assert options == Options(60.0, 0, Path("out.json"), "http://h:1")
    with pytest.raises(SystemExit) as caught:
        parse_options(["--seconds", "1"])
    assert caught.value.code == 2
