"""The child process never outlives its owner; the admin client says what the server said."""

from __future__ import annotations

import os
import select
import signal
import sys

import pytest

from dynamictp.bench.admin import Admin
from dynamictp.bench.server import ServerProcess, interrupts_deferred, serve_command
from dynamictp.clock import ManualClock
from dynamictp.errors import FatalError
from tests.bench.scripted_server import Peer, scripted

# A server of two processes; with `stubborn` neither heeds SIGTERM. Reports its child's pid as progress.
TWO_PROCESSES = """
import os, signal, sys
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    print(f"child {child}")
    print("DynamicTP ready: http://127.0.0.1:8123 (pid 1)")
while True:
    signal.pause()
"""


def ends(pidfd: int) -> bool:
    """Whether the process is dead, or dies within ten seconds."""
    try:
        return bool(select.select([pidfd], [], [], 10.0)[0])
    finally:
        os.close(pidfd)


@pytest.mark.multi
def test_leaving_ends_the_server_and_what_it_started() -> None:
    lines: list[str] = []
    with ServerProcess([sys.executable, "-c", TWO_PROCESSES, "polite"], on_line=lines.append) as server:
        assert server.wait_ready(30.0) == "http://127.0.0.1:8123"
        assert server.start_to_ready_s > 0
        child = int(lines[0].split()[1])
        assert os.getpgid(child) == server.pid != os.getpgid(0)
        child_fd = os.pidfd_open(child)
    assert not os.path.exists(f"/proc/{server.pid}")
    assert ends(child_fd)


@pytest.mark.multi
def test_a_server_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamictp.bench.server._TERM_WAIT_S", 0.05)
    with ServerProcess([sys.executable, "-c", TWO_PROCESSES, "stubborn"]) as server:
        server.wait_ready(30.0)
    assert not os.path.exists(f"/proc/{server.pid}")
    server.stop()  # a second time changes nothing


@pytest.mark.multi
def test_a_server_that_ends_early_says_its_last_lines() -> None:
    command = [sys.executable, "-c", "print('model refused: no such file'); raise SystemExit(3)"]
    with ServerProcess(command) as server, pytest.raises(FatalError, match="model refused: no such file"):
        server.wait_ready(30.0)


def test_an_interrupt_waits_for_the_handle() -> None:
    steps = []
    # A shell starts background jobs with SIGINT ignored, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            steps.append("handle assigned")

    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert steps == ["handle assigned"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_command_asks_for_a_free_port() -> None:
    command = serve_command("tp1+tp1", devices=2)
    assert command[1:5] == ["-m", "dynamictp", "serve", "demo"]
    assert command[5:11] == ["--devices", "2", "--layout", "tp1+tp1", "--port", "0"]
    assert command[11:] == ["--max-wait-s", "0", "--mode", "static"]
    assert serve_command("tp1", mode="dynamic")[-2:] == ["--mode", "dynamic"]


async def test_a_switch_as_the_server_reports_it() -> None:
    clock = ManualClock(5.0)

    async def script(peer: Peer) -> None:
        clock.advance(0.25)
        assert (peer.method, peer.path) == ("PUT", "/admin/layout")
        phases = {"prepare_views": 1.5, "commit": 0.25, "ramp": None}
        switch = {"id": "s1", "from": "tp1", "to": "tp2", "outcome": "closed", "phases_ms": phases}
        switch |= {"began_at": 100.0, "committed_at": 100.125, "ended_at": 100.2, "first_admitted_ms": None}
        await peer.json({"switch": switch | {"handovers": 3, "recomputes": 0, "weight_bytes_copied": 0}})

    async with scripted(script) as server, Admin(server.url, clock=clock, key="k") as admin:
        switch = await admin.set_layout("tp2")
    assert (switch.before, switch.after, switch.outcome, switch.handovers) == ("tp1", "tp2", "closed", 3)
    assert switch.phases_ms == {"prepare_views": 1.5, "commit": 0.25}
    assert (switch.started_s, switch.ended_s) == (5.0, 5.25)
    assert (switch.id, switch.committed_ms, switch.first_admitted_ms) == ("s1", 125.0, None)
    assert server.requests[0].body == {"layout": "tp2", "wait": "closed"}
    assert server.requests[0].headers["authorization"] == "bearer k"


async def test_what_the_server_refuses_is_an_error_with_its_words() -> None:
    async def script(peer: Peer) -> None:
        await peer.json({"error": {"message": "tp9 needs 9 devices"}}, status=422)

    async with scripted(script) as server, Admin(server.url) as admin:
        with pytest.raises(FatalError, match=r"422.*tp9 needs 9 devices"):
            await admin.set_layout("tp9")
    async with Admin(server.url) as admin:
        with pytest.raises(FatalError, match="no answer"):
            await admin.layout()
