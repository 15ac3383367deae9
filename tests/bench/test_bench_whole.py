"""Demo and figures from end to end against a fake server; interrupts leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynamictp.bench import blocks
from dynamictp.errors import FatalError
from tests.bench.fake_serve import FakeServe
from tests.bench.scripted_server import Peer, scripted

HERE = Path(__file__).parent

# The demo with another server command; everything else is as the user runs it.
DEMO = """
import sys
import dynamictp.bench.demo as demo
command = [sys.executable, *sys.argv[1].split()]
demo.serve_command = lambda layout: command
sys.exit(demo.main(sys.argv[2:]))
"""


def start_demo(server_arguments: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DEMO, f"{HERE / 'fake_serve.py'}{server_arguments}", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )


def read_until(demo: subprocess.Popen[str], words: str) -> str:
    assert demo.stdout is not None
    for line in demo.stdout:
        if words in line:
            return line
    raise AssertionError(f"the demo ended before it said {words!r}")


@pytest.mark.multi
def test_the_demo_plays_reports_and_ends(tmp_path: Path) -> None:
    report = tmp_path / "demo.json"
    demo = start_demo("", "--seconds", "5", "--json", str(report))
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, output
    for words in ("tp1 → tp2: closed", "tp1+tp1", "across a switch", "failures"):
        assert words in output
    plain = json.loads(report.read_text())
    assert plain["failures"] == []
    assert [s["to"] for s in plain["switches"]] == ["tp2", "tp1+tp1", "tp2", "tp1"]


@pytest.mark.multi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("arguments", "when"), [(" slow-start", "pid"), ("", "running")])
def test_an_interrupt_at_start_or_under_load_leaves_no_server(
    arguments: str, when: str, number: signal.Signals
) -> None:
    demo = start_demo(arguments, "--seconds", "60")
    try:
        server_fd = os.pidfd_open(int(read_until(demo, "pid").split()[1]))
        if when != "pid":
            read_until(demo, when)
        demo.send_signal(number)
        assert "interrupted" in demo.communicate(timeout=30)[0]
        assert demo.returncode == 130
        assert select.select([server_fd], [], [], 10.0)[0], "the server outlived the demo"
        os.close(server_fd)
    finally:
        demo.kill()
        demo.communicate()


async def test_a_session_measures_decode_and_prefill_under_each_layout() -> None:
    fake = FakeServe()
    async with scripted(fake) as server:
        session = await asyncio.to_thread(blocks.Session, server.url)
        decode = await asyncio.to_thread(session.decode, 4, 2)
        prefill = await asyncio.to_thread(session.prefill, 2)
    assert [(p.layout, p.streams, p.rounds) for p in decode] == [("tp1", 4, 2), ("tp2", 4, 2)]
    assert all(p.tpot_ms > 0 and p.tokens_per_s > 0 for p in decode)
    assert [(p.layout, p.ttft_ms.count) for p in prefill] == [("tp1", 2), ("tp2", 2)]
    assert fake.layouts == ["tp1", "tp2"] * 4  # taking turns within each round
    sent = [peer.body for peer in server.requests if peer.path == "/v1/completions"]
    lengths = [len(body["prompt"]) for body in sent if isinstance(body["prompt"], list)]
    assert lengths == [64] * 16 + [1000] * 4
    assert all(body["ignore_eos"] is True for body in sent)


class TextOnly(FakeServe):
    """Another server: no admin interface, text prompts only, and no field it does not know."""

    async def __call__(self, peer: Peer) -> None:
        if peer.path == "/v1/models":
            await peer.json({"data": [{"id": "small"}, {"id": "big"}]})
        elif peer.path != "/v1/completions":
            await peer.json({"error": {"message": "no such route"}}, status=404)
        elif not isinstance(peer.body["prompt"], str) or "ignore_eos" in peer.body:
            await peer.json({"error": {"message": "unknown field"}}, status=422)
        else:
            await super().__call__(peer)


async def test_another_server_takes_turns_and_is_asked_as_it_wants() -> None:
    fake = FakeServe()
    async with scripted(fake) as server, scripted(TextOnly()) as other:
        session = await asyncio.to_thread(blocks.Session, server.url)
        await asyncio.to_thread(session.compare_with, f"{other.url}/v1", "big", "sk-there")
        decode = await asyncio.to_thread(session.decode, 2, 2)
        prefill = await asyncio.to_thread(session.prefill, 1)
        with pytest.raises(FatalError, match="serves small, big, not 'huge'"):
            await asyncio.to_thread(session.compare_with, other.url, "huge", None)
    assert [point.layout for point in decode] == [point.layout for point in prefill]
    assert [point.layout for point in decode] == ["tp1", "tp2", "other"]
    assert fake.layouts == ["tp1", "tp2"] * 3
    assert session.rival is not None
    facts = session.rival.facts
    assert (facts.model, facts.short) == ("big", True)
    assert facts.form == "prompts as text, outputs that may end early (it does not take ignore_eos)"
    sent = [peer for peer in other.requests if peer.path == "/v1/completions"]
    assert len(sent) == 4 + 4 + 1  # the forms tried, decode, prefill
    assert [len(str(peer.body["prompt"]).split()) for peer in sent[4:]] == [64] * 4 + [1000]
    assert all(peer.headers["authorization"] == "bearer sk-there" for peer in sent)


async def test_a_server_that_takes_no_completions_is_refused() -> None:
    async def chat_only(peer: Peer) -> None:
        listed = {"data": [{"id": "m"}]}
        if peer.path == "/v1/models":
            await peer.json(listed)
        else:
            await peer.json({"error": {"message": "chat only"}}, status=404)

    async with scripted(FakeServe()) as server, scripted(chat_only) as other:
        session = await asyncio.to_thread(blocks.Session, server.url)
        with pytest.raises(FatalError, match="takes no completion request"):
            await asyncio.to_thread(session.compare_with, other.url, None, None)


async def test_a_session_measures_switches_against_the_same_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SWITCH_EVERY_S", 0.1)
    monkeypatch.setattr(blocks, "SWITCH_LOAD_PER_S", 50.0)
    fake = FakeServe()
    async with scripted(fake) as server:
        session = await asyncio.to_thread(blocks.Session, server.url)
        figures = await asyncio.to_thread(session.switches, 5)
    assert fake.layouts[:3] == ["tp1", "tp2", "tp1"]  # two plays without a switch, then the start
    assert fake.layouts[3:] == ["tp2", "tp1+tp1", "tp2", "tp1", "tp2"]
    assert [s.after for s in figures.switches] == fake.layouts[3:]
    assert set(figures.gap_without_s) == {"tp1", "tp2"}
    assert figures.failures == 0
    assert figures.phases_ms["commit"].count == 5
    prompts = [str(p.body["prompt"]) for p in server.requests if p.path == "/v1/completions"]
    assert sorted(prompts[: figures.requests]) == sorted(prompts[-figures.requests :])
