"""However a server ends, and whenever: the right exit code, and nothing left behind."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from dynamictp.testing.server_process import START_S, ServerProcess
from tests.e2e.conftest import complaints
from tests.e2e.live import Api, until

pytestmark = pytest.mark.e2e

END_S = 15.0


class Watched:
    """A server whose every process is watched, with a folder of its own for temporary files."""

    def __init__(self, server: ServerProcess, folder: Path, port: int) -> None:
        self.server = server
        self.folder = folder
        self.port = port
        self._pidfds: dict[int, str] = {}

    def watch_children(self) -> None:
        """Remember the descendants that run now."""
        for pid, command in self.server.children().items():
            with suppress(ProcessLookupError):  # a loader may be done
                self._pidfds[os.pidfd_open(pid)] = command
        assert self._pidfds

    def assert_children_end(self, within_s: float) -> None:
        """All watched descendants end in time."""
        deadline = time.monotonic() + within_s
        for pidfd, command in self._pidfds.items():
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([pidfd], [], [], left_s)[0], f"still runs after {within_s:g} s: {command}"

    def assert_nothing_left(self) -> None:
        self.assert_children_end(END_S)
        assert list(self.folder.iterdir()) == []
        with socket.create_server(("127.0.0.1", self.port)):
            pass

    def close(self) -> None:
        for pidfd in self._pidfds:
            os.close(pidfd)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def watched(*arguments: str) -> Iterator[Watched]:
    """A server that has just been started."""
    port = free_port()
    with ExitStack() as stack:
        # Paths of sockets are short: a test's own folder may be too deep.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="e2e-")))
        server = ServerProcess(
            "serve", "demo", "--devices", "2", "--kv-memory", "256MiB", "--port", str(port), *arguments,
            environment={"TMPDIR": str(folder)},
        )  # fmt: skip
        stack.callback(server.stop)
        running = Watched(server, folder, port)
        stack.callback(running.close)
        yield running


def interrupt(server: ServerProcess) -> None:
    """As a terminal does it: the whole group gets the signal."""
    os.killpg(server.pid, signal.SIGINT)


def terminate(server: ServerProcess) -> None:
    server.send_signal(signal.SIGTERM)


BOTH = pytest.mark.parametrize(("end", "code"), [(interrupt, 130), (terminate, 0)])


@BOTH
@pytest.mark.parametrize("moment", ["starting engine", "loading demo"])
def test_a_signal_during_the_start(end: object, code: int, moment: str) -> None:
    assert callable(end)
    with watched() as running:
        server = running.server
        until(lambda: any(line.startswith(moment) for line in server.lines), moment)
        # The line comes just before the first of them is started.
        until(server.children, "some child runs")
        running.watch_children()
        end(server)
        assert server.wait_exit(END_S) == code
        assert not complaints(server.wait_output_end())
        assert not any("DynamicTP ready" in line for line in server.lines)
        running.assert_nothing_left()


@BOTH
def test_a_signal_before_anything_is_started(end: object, code: int) -> None:
    assert callable(end)
    with watched() as running:
        server = running.server
        # The command line is parsed and the signal handlers are there; imports go on.
        until(lambda: catches(server.pid, signal.SIGTERM), "a handler for SIGTERM")
        end(server)
        assert server.wait_exit(END_S) == code
        assert not complaints(server.wait_output_end())
        assert list(running.folder.iterdir()) == []


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@BOTH
def test_a_signal_while_streaming(end: object, code: int) -> None:
    assert callable(end)
    with watched("--drain-s", "0.5") as running, Api(running.server.wait_ready(START_S)) as api:
        server = running.server
        running.watch_children()
        assert not [pid for pid in (server.pid, *server.children()) if shared_memory_files(pid)]
        assert len(list(running.folder.iterdir())) == 1
        with api.stream("Once upon a time", 2000, ignore_eos=True) as (stream, events):
            for _ in range(3):
                next(events)
            end(server)
            list(events)
        # The client is told, rather than left with half an answer.
        assert stream.done
        assert "shutting down" in stream.events[-1]["error"]["message"]
        assert server.wait_exit(END_S) == code
        assert not complaints(server.wait_output_end())
        running.assert_nothing_left()


def shared_memory_files(pid: int) -> list[str]:
    """Named shared memory that a process maps or has open."""
    mapped = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    opened = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return [text for text in (*mapped, *opened) if "/dev/shm/" in text]


def test_a_killed_server_takes_its_children_with_it() -> None:
    with watched() as running, Api(running.server.wait_ready(START_S)) as api:
        server = running.server
        running.watch_children()
        with api.stream("Once upon a time", 2000, ignore_eos=True) as (_, events):
            next(events)
            server.send_signal(signal.SIGKILL)
            running.assert_children_end(2.0)
            with pytest.raises(httpx.HTTPError):
                list(events)
        assert server.wait_exit(END_S) == -signal.SIGKILL
        with socket.create_server(("127.0.0.1", running.port)):
            pass


def test_a_server_killed_in_mid_ramp_with_a_leased_device() -> None:
    with watched("--devices", "3") as running, Api(running.server.wait_ready(START_S)) as api:
        server = running.server
        command = [sys.executable, "-m", "dynamictp", "lease", "--url", api.url, "--", "sleep", "600"]
        job = subprocess.Popen(command)
        try:
            until(lambda: api.http.get("/admin/leases").json()["leases"], "a device is leased")
            ramp = api.put_layout("tp1@1", wait="none", ramp=True).json()["switch"]["id"]
            path = f"/admin/switches/{ramp}"
            until(lambda: api.http.get(path).json()["switch"]["ramp_share"] > 0, "the ramp begins")
            running.watch_children()
            server.send_signal(signal.SIGKILL)
            running.assert_children_end(2.0)
            # It would wait 15 s for the server to come back.
            job.terminate()
            assert job.wait(END_S) == 128 + signal.SIGTERM
        finally:
            job.kill()
            job.wait()


def test_a_server_killed_during_the_start_leaves_no_process() -> None:
    with watched() as running:
        server = running.server
        until(lambda: any(line.startswith("loading demo") for line in server.lines), "loading")
        until(lambda: len(server.children()) >= 4, "engine, two workers and a loader")
        running.watch_children()
        server.send_signal(signal.SIGKILL)
        # A process that still imports its modules looks for its parent when it is done with that.
        running.assert_children_end(END_S)


@pytest.mark.parametrize("role", ["dynamictp.engine", "dynamictp.worker"])
def test_a_child_that_dies_during_the_start_ends_the_server_with_a_reason(role: str) -> None:
    with watched() as running:
        server = running.server
        until(lambda: any(role in command for command in server.children().values()), role)
        running.watch_children()
        victim = next(pid for pid, command in server.children().items() if role in command)
        os.kill(victim, signal.SIGKILL)
        assert server.wait_exit(END_S) == 1
        output = server.wait_output_end()
        assert "ended unexpectedly with SIGKILL" in output
        assert "Traceback" not in output
        running.assert_nothing_left()


def test_running_streams_may_finish_after_sigterm() -> None:
    with watched() as running, Api(running.server.wait_ready(START_S)) as api:
        server = running.server
        # Three requests are to meet the drain, however slowly they are answered.
        with api.stream("Once upon a time", 400, ignore_eos=True, return_token_ids=True) as (stream, events):
            next(events)
            terminate(server)
            until(lambda: api.http.get("/ready").status_code == 503, "not ready any more")
            refused = api.http.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
            assert "shutting down" in refused.json()["error"]["message"]
            assert api.put_layout("tp2").status_code == 503
            list(events)
        assert stream.done
        assert len(stream.tokens) == 400
        assert server.wait_exit(END_S) == 0
        assert not complaints(server.wait_output_end())
        running.assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_drain(number: signal.Signals, code: int) -> None:
    with watched() as running, Api(running.server.wait_ready(START_S)) as api:
        server = running.server
        with api.stream("Once upon a time", 4000, ignore_eos=True) as (stream, events):
            next(events)
            terminate(server)
            until(lambda: any(line.startswith("draining: 1 ") for line in server.lines), "draining")
            server.send_signal(number)
            list(events)
        assert "shutting down" in stream.events[-1]["error"]["message"]
        assert server.wait_exit(END_S) == code
        running.assert_nothing_left()


def test_the_next_server_removes_what_a_killed_one_left() -> None:
    with watched() as running:
        running.server.wait_ready(START_S)
        running.server.send_signal(signal.SIGKILL)
        running.server.wait_exit(END_S)
        (left,) = running.folder.iterdir()
        environment = {"TMPDIR": str(running.folder)}
        arguments = ("serve", "demo", "--devices", "1", "--kv-memory", "256MiB")
        with ServerProcess(*arguments, environment=environment):
            (folder,) = running.folder.iterdir()
            assert folder != left
        assert list(running.folder.iterdir()) == []
