"""History, the page that draws it, and the terminal screen."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from importlib import resources

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from dynamictp.cli import cli
from dynamictp.clock import ManualClock
from dynamictp.messages import DomainStatus, Snapshot
from dynamictp.observe.families import TPOT_S, TTFT_S, Histogram
from dynamictp.observe.history import COARSE_POINTS, FINE_POINTS, History
from dynamictp.observe.top import View, screen, spark
from tests.server.server_stack import on_port, running_stack


@dataclass
class Totals:
    tokens_total: int = 0
    arrivals_total: int = 0
    latencies: tuple[Histogram, ...] = field(
        default_factory=lambda: (Histogram(TTFT_S), Histogram(TTFT_S), Histogram(TPOT_S))
    )


def snapshot(*domains: DomainStatus) -> Snapshot:
    layout = "+".join(f"tp{d.tp}" for d in domains if d.state == "serving")
    running = sum(d.running for d in domains)
    return Snapshot(
        0.0, layout, 3, running, running, domains, (), pages_free=60, pages_cached=20, pages_total=100
    )


def domain(tp: int, state: str = "serving", running: int = 0) -> DomainStatus:
    return msgspec.convert(
        {"id": f"d{tp}", "epoch": 1, "model": "", "tp": tp, "pp": 1, "devices": list(range(tp)),
         "state": state, "running": running, "kv_pages_used": 2, "kv_pages_cap": 10},
        DomainStatus,
    )  # fmt: skip


class Clocked:
    """A history on virtual time."""

    def __init__(self) -> None:
        self.clock = ManualClock(50.0)
        self.totals = Totals()
        self.history = History(self.clock, lambda: 1e9 + self.clock.now())

    def look(self, seconds: float, *domains: DomainStatus) -> None:
        self.clock.advance(seconds)
        self.history.look(snapshot(*(domains or (domain(1),))), self.totals)


def test_a_point_a_second_with_rates_since_the_one_before() -> None:
    on = Clocked()
    on.look(0.0)
    on.totals.tokens_total, on.totals.arrivals_total = 50, 3
    for _ in range(4):
        on.look(0.25)
    on.look(0.25, domain(2, running=1), domain(1, "draining", running=3))
    on.totals.tokens_total = 60
    on.look(1.75, domain(2))
    columns = on.history.columns()
    assert columns["t"] == [1e9 + 50, 1e9 + 51, 1e9 + 53]
    assert columns["tokens"] == [0, 50, 5]
    assert columns["arrivals"] == [0, 3, 0]
    assert columns["kv"] == [0.2, 0.2, 0.2]
    assert on.history.columns(since=1e9 + 51)["layout"] == ["tp2"]


def test_the_degree_of_the_layout_and_that_of_requests_are_apart() -> None:
    on = Clocked()
    on.look(1.0, domain(2, running=1), domain(1, "draining", running=3))
    point = on.history.points()[0]
    assert (point.layout, point.degree, point.used) == ("tp2", 2, 1.25)


def test_latencies_are_of_the_last_seconds_only() -> None:
    on = Clocked()
    on.look(1.0)
    on.totals.latencies[0].observe(0.3)
    on.look(1.0)
    for _ in range(11):
        on.look(1.0)
    on.totals.latencies[1].observe(3.0)
    on.look(1.0)
    short = [point.ttft_short for point in on.history.points()]
    assert short[0] is None
    assert short[1] == pytest.approx(0.4875)
    assert short[-1] is None
    assert on.history.points()[-1].ttft_long == pytest.approx(4.875)


def test_old_points_get_rare_and_their_number_is_bounded() -> None:
    on = Clocked()
    for _ in range(FINE_POINTS + 300):
        on.look(1.0)
    points = on.history.points()
    assert len(points) == FINE_POINTS + 300 // 15
    assert points == sorted(points, key=lambda point: point.t)
    for _ in range(COARSE_POINTS + 100):
        on.look(20.0)
    assert len(on.history.points()) <= FINE_POINTS + COARSE_POINTS


async def test_the_endpoints_give_the_page_and_the_history() -> None:
    async with running_stack() as stack:
        page = await stack.http.get("/dashboard")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        await stack.complete(max_tokens=3)
        body = (await stack.http.get("/admin/history?since=0")).json()
        assert body["model"] == "tiny"
        assert body["points"]["layout"][0] == "tp1"
        assert len({len(values) for values in body["points"].values()}) == 1
        refused = await stack.http.get("/admin/history?since=x")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "since"


def test_the_page_asks_nobody_else_and_reads_what_there_is() -> None:
    page = (resources.files("dynamictp.observe") / "data" / "dashboard.html").read_text()
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in page
    assert not re.search(r"<(script|link|img)[^>]+src=", page)
    from dynamictp.observe.history import Point
    from tests.observe.test_alerts import exported

    fields = set(re.findall(r'field: "(\w+)"', page)) | set(re.findall(r'last(?:Known)?\("(\w+)"\)', page))
    assert fields <= set(Point.__struct_fields__)
    assert set(re.findall(r"dtp_\w+", page)) <= exported()


def test_sparks_scale_to_the_largest_and_leave_gaps() -> None:
    assert spark([0, 1, None, 4, 8], 6) == "  ▁ ▄█"
    assert spark([], 3) == "   "


def shown(view: View) -> str:
    console = Console(width=120, record=True, file=None)
    with console.capture() as capture:
        console.print(screen(view, 120))
    return capture.get()


def test_the_screen_shows_domains_switches_and_decisions() -> None:
    layout = {
        "mode": "dynamic", "pinned": True, "observed": "tp2", "switch": {"to": "tp1", "phase": "proof"},
        "domains": [{"id": "d3", "tp": 2, "devices": [0, 1], "state": "serving", "running": 4,
                     "kv_pages_used": 5, "kv_pages_cap": 10}],
        "devices": [{"id": 0, "state": "serving"}, {"id": 2, "state": "leased", "lease": "l1"}],
    }  # fmt: skip
    switch = {"from": "tp1", "to": "tp2", "outcome": "failed", "reason": "admin", "phases_ms": {"proof": 5.0},
              "error": "a worker ended"}  # fmt: skip
    hold = {
        "reason": "hold",
        "wanted": "tp2",
        "target": None,
        "figures": {"load": 0.5},
        "alarms": ["flapping"],
    }
    text = shown(View("demo", layout, {"degree": [1, 2], "tokens": [10.0, 20.0]}, [switch], [hold, hold]))
    crashed = shown(
        View("demo", layout, crashes={"counts": {"worker": 2, "engine": 0}, "last": 900.0}, now=930.0)
    )
    assert "crashes: 2 of worker, the last 30 s ago" in crashed
    old = shown(
        View("demo", layout, crashes={"counts": {"worker": 2, "engine": 0}, "last": 100.0}, now=930.0)
    )
    assert "crashes" not in old
    for expected in ("tp2", "pinned", "switching to tp1: proof", "flapping", "50 %", "lease l1", "failed",
                     "a worker ended", "hold", "2×", "load 0.5", "tokens/s"):  # fmt: skip
        assert expected in text


async def test_top_prints_a_screen_of_a_server() -> None:
    async with running_stack() as stack, on_port(stack) as url:
        result = await asyncio.to_thread(CliRunner().invoke, cli, ["top", url, "--once"])
        assert result.exit_code == 0, result.output
        assert "tp1" in result.output
        assert "between tokens" in result.output
        refused = await asyncio.to_thread(CliRunner().invoke, cli, ["top", f"{url}/nowhere", "--once"])
        assert "is no DynamicTP server: it has no /nowhere/admin/history" in str(refused.exception)
