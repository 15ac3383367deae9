from __future__ import annotations

import io

from rich.console import Console

from dynamictp.bench.live import Counters, LiveView, live_line, live_table
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.clock import ManualClock


class Instant:
    """A sender that answers at once, with the failure that the request's name asks for."""

    async def send(self, request: Request, intended_s: float) -> Result:
        failure = Failure(FailureKind(request.name), "x") if request.name else None
        return Result(request, intended_s, intended_s, 1.0, (intended_s + 0.1, intended_s + 0.2), (1, 1),
                      failure=failure)  # fmt: skip


async def counted() -> Counters:
    counters = Counters()
    counters.start(Instant(), total=4, origin_s=100.0, load_s=10.0)
    for name in ("", "", "timeout", "cut"):
        await counters.send(Request(0.0, "x", 2, name=name), 100.0)
    return counters


async def test_counters_tell_failures_from_what_was_cut() -> None:
    counters = await counted()
    assert (counters.sent, counters.running, counters.failed, counters.cut) == (4, 0, 1, 1)
    assert counters.tokens == 8
    counters.start(Instant(), total=1, origin_s=0.0, load_s=1.0)
    assert (counters.sent, counters.failed, len(counters.recent)) == (0, 0, 0)


async def test_line_and_table_show_progress_rates_and_percentiles() -> None:
    counters = await counted()
    assert "sent 4/4" in live_line(counters, "tp2", 2.0)
    assert "2.0 requests/s, 4 tokens/s" in live_line(counters, "tp2", 2.0)
    console = Console(file=io.StringIO(), width=100)
    console.print(live_table(counters, "tp2", 2.0))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for words in ("tp2, 2.0 of 10 s", "TTFT ms, last 2", "P50 100", "TPOT ms, last 2"):
        assert words in text


async def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    clock = ManualClock(100.0)
    console = Console(file=io.StringIO(), width=200)
    waiting = Counters()
    with LiveView(console, waiting, "tp2", clock) as view:
        view.paint()
    with LiveView(console, await counted(), "tp2", clock) as view:
        for _ in range(24):
            view.paint()
            clock.advance(0.5)
    assert isinstance(console.file, io.StringIO)
    assert len(console.file.getvalue().splitlines()) == 2


async def test_a_terminal_gets_a_live_table() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with LiveView(console, await counted(), "tp2", ManualClock(101.0)) as view:
        view.paint()
    assert isinstance(console.file, io.StringIO)
    assert "TTFT ms" in console.file.getvalue()
