"""The layout over time: what polling saw, joined with what this client did."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from dynamictp.bench.admin import Switch
from dynamictp.bench.record import ClientFacts, LayoutSample, Run, ServerFacts
from dynamictp.bench.watcher import Change, LayoutWatcher, changes_of, read_sample, spans_of
from dynamictp.clock import SystemClock
from tests.bench.fake_serve import FakeServe
from tests.bench.scripted_server import Peer, scripted


def run_of(samples: str, *switches: Switch, layout: str | None = None) -> Run:
    """`samples` are layouts half a second apart."""
    seen = tuple(LayoutSample(0.5 * i, text, 0, 0) for i, text in enumerate(samples.split()))
    facts = ServerFacts("http://s", "m", layout={"observed": layout} if layout else None)
    client = ClientFacts(0.0, "", "")
    return Run("r", "", facts, client, 4.0, 4.0, (), samples=seen, switches=switches)


def test_polling_finds_changes_between_its_looks() -> None:
    run = run_of("tp1 tp1 tp2 tp2 tp1+tp1")
    assert changes_of(run) == (
        Change("tp1", "tp2", 0.5, 1.0, False),
        Change("tp2", "tp1+tp1", 1.5, 2.0, False),
    )
    assert [(s.layout, s.start_s, s.end_s) for s in spans_of(run)] == [
        ("tp1", 0.0, 0.75), ("tp2", 0.75, 1.75), ("tp1+tp1", 1.75, 4.0)
    ]  # fmt: skip


def test_switches_made_here_are_exact_and_not_counted_twice() -> None:
    made = Switch("tp1", "tp2", "closed", {}, 0, 0, 0, 0.6, 0.7)
    nothing = Switch("tp2", "tp2", "noop", {}, 0, 0, 0, 1.6, 1.7)
    run = run_of("tp1 tp1 tp2 tp2", made, nothing)
    assert changes_of(run) == (Change("tp1", "tp2", 0.6, 0.7, True),)
    assert [(s.layout, s.start_s) for s in spans_of(run)] == [("tp1", 0.0), ("tp2", 0.6)]


def test_servers_without_layouts_have_no_spans() -> None:
    assert spans_of(run_of("")) == ()
    assert [span.layout for span in spans_of(run_of("", layout="tp4"))] == ["tp4"]


def test_samples_read_the_admin_interface() -> None:
    state = {
        "observed": "tp2",
        "waiting": 3,
        "switch": {"from": "tp1", "to": "tp2"},
        "domains": [{"running": 2}, {"running": 1}],
    }
    assert read_sample(json.dumps(state).encode(), 1.5) == LayoutSample(1.5, "tp2", 3, 3, "tp1 → tp2")
    for bad in (b"", b"[]", b"{}"):
        with pytest.raises((msgspec.MsgspecError, KeyError, TypeError, ValueError)):
            read_sample(bad, 0.0)


async def test_the_watcher_polls_and_outlives_refusals() -> None:
    fake, answers = FakeServe(), 0
    polled_thrice = asyncio.Event()

    async def script(peer: Peer) -> None:
        nonlocal answers
        answers += 1
        if answers == 1:
            await peer.json({"error": {"message": "starting"}}, status=503)
        else:
            await fake(peer)
        if answers == 3:
            polled_thrice.set()  # the answer before this poll has been read

    clock = SystemClock()
    async with scripted(script) as server:
        watcher = LayoutWatcher(server.url, "k", clock)
        task = asyncio.create_task(watcher.watch(clock.now()))
        await polled_thrice.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert watcher.samples[0].layout == "tp1"
    assert server.requests[0].headers["authorization"] == "bearer k"
    assert (server.requests[0].method, server.requests[0].path) == ("GET", "/admin/layout")
