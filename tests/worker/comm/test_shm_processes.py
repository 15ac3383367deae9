"""Ranks as processes over a memfd: thousands of barriers, more ranks than cores, and killed peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamictp.worker.comm.control import ControlBlock, ControlState, open_control
from dynamictp.worker.comm.shm import create_shared, default_spin, map_shared, region_bytes
from tests.worker.comm.comm_harness import needs_native, poll

pytestmark = [needs_native, pytest.mark.multi]

RANK = Path(__file__).with_name("rank_process.py")
EPOCH = 3
WRITTEN_AT = 4096
OFFSET = 8192


@dataclass
class Ranks:
    """The processes of one domain, what they write before each barrier, and the engine's control block."""

    processes: list[subprocess.Popen[str]]
    written: np.ndarray
    control: ControlBlock

    def result(self, rank: int) -> dict[str, Any]:
        out, _ = self.processes[rank].communicate(timeout=60)
        assert self.processes[rank].returncode == 0
        result: dict[str, Any] = json.loads(out)
        return result


@contextmanager
def spawn(world: int, *, rounds: int, deadline_s: float = 60.0) -> Iterator[Ranks]:
    size = region_bytes(world, 1024)
    fd = create_shared("test-ranks", OFFSET + size)
    memory = map_shared(fd)
    control = open_control(memory, 1, world)
    control.set_control(0, EPOCH, ControlState.LIVE)
    plan = {
        "fd": fd,
        "offset": OFFSET,
        "size": size,
        "world": world,
        "epoch": EPOCH,
        "written_at": WRITTEN_AT,
    }
    plan |= {"rounds": rounds, "deadline_s": deadline_s, "spin": default_spin(world)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(plan | {"rank": rank})],
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    os.close(fd)
    try:
        yield Ranks(processes, np.frombuffer(memory, np.int64, world, WRITTEN_AT), control)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.mark.parametrize(("world", "rounds"), [(1, 1000), (2, 4000), (5, 1000)])
def test_thousands_of_barriers(world: int, rounds: int) -> None:
    with spawn(world, rounds=rounds) as ranks:
        for rank in range(world):
            assert ranks.result(rank) == {"rounds": rounds, "state": "ready"}


def test_killed_peer_and_an_abort_by_the_engine() -> None:
    with spawn(3, rounds=10**9) as ranks:
        poll(lambda: int(ranks.written.min()) > 1000)
        ranks.processes[1].kill()
        ranks.processes[1].wait()
        start = time.monotonic()
        ranks.control.set_control(0, EPOCH, ControlState.ABORTED)
        for rank in (0, 2):
            result = ranks.result(rank)
            assert result["state"] == "broken"
            assert "aborted" in result["broken"]
            assert result["at"] - start < 1.0


def test_killed_peer_is_named_at_the_deadline() -> None:
    with spawn(3, rounds=10**9, deadline_s=0.5) as ranks:
        poll(lambda: int(ranks.written.min()) > 1000)
        ranks.processes[1].kill()
        results = [ranks.result(rank) for rank in (0, 2)]
        assert [result["state"] for result in results] == ["broken", "broken"]
        assert all("missing ranks: 1" in result["broken"] for result in results)
        assert any("deadline of 0.5" in result["broken"] for result in results)
        assert ranks.control.control(0) == (EPOCH, ControlState.ABORTED)
