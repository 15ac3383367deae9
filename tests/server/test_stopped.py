"""Stopped children are found, others are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamictp.server.stopped import StoppedProcesses


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


def wait_state(pid: int, stopped: bool) -> None:
    """The kernel stops and continues a process a moment after the signal."""
    os.waitid(os.P_PID, pid, os.WSTOPPED if stopped else os.WCONTINUED)


def test_a_process_that_stays_stopped_is_found(child: subprocess.Popen[bytes]) -> None:
    watch, pids = StoppedProcesses(1.0), [os.getpid(), child.pid]
    assert watch.look(pids, 100.0) == []
    child.send_signal(signal.SIGSTOP)
    wait_state(child.pid, stopped=True)
    assert [watch.look(pids, 100.0 + t) for t in (0.25, 0.75, 1.25, 1.5)] == [[], [], [], [child.pid]]
    # This process was stopped as well: all begin anew.
    assert watch.look(pids, 200.0) == []
    assert [watch.look(pids, 200.0 + t) for t in (0.5, 1.0, 1.5)] == [[], [], [child.pid]]
    child.send_signal(signal.SIGCONT)
    wait_state(child.pid, stopped=False)
    assert watch.look(pids, 202.0) == []


def test_a_process_that_is_gone_is_not_stopped() -> None:
    assert not Path("/proc/4194305").exists()
    assert StoppedProcesses(0.0).look([4_194_305], 1.0) == []
