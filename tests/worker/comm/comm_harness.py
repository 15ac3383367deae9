"""Domains of ranks for the communicator tests: threads over shared memory, or pure Python ones."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from dynamictp import native
from dynamictp.worker.comm import control as control_module
from dynamictp.worker.comm.base import Communicator
from dynamictp.worker.comm.control import ControlBlock, ControlState
from dynamictp.worker.comm.local import ThreadGroup
from dynamictp.worker.comm.shm import ShmCommunicator, create_shared, map_shared, region_bytes

EPOCH = 7
SLOT = 1
REGION_OFFSET = 4096


@dataclass
class Domain:
    """The ends of one domain's ranks, and its control block where there is one."""

    ranks: Sequence[Communicator]
    control: ControlBlock | None = None

    def run(self, body: Callable[[Communicator], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """Run `body` on a thread per rank; results, or raised exceptions, in rank order."""
        return [future.exception() or future.result() for future in self.start(body, ranks)]

    def start(
        self, body: Callable[[Communicator], Any], ranks: Sequence[int] | None = None
    ) -> list[Future[Any]]:
        chosen = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        return [_spawn(body, end) for end in chosen]


def _spawn(body: Callable[[Communicator], Any], end: Communicator) -> Future[Any]:
    future: Future[Any] = Future()

    def target() -> None:
        try:
            future.set_result(body(end))
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            future.set_exception(error)

    threading.Thread(target=target, daemon=True).start()
    return future


@contextmanager
def open_domain(
    kind: str, world: int, *, payload_bytes: int = 4096, deadline_s: float = 30.0, spin: int = 0
) -> Iterator[Domain]:
    if kind == "threads":
        yield Domain(ThreadGroup(world, deadline_s=deadline_s, epoch=EPOCH).ranks)
        return
    size = region_bytes(world, payload_bytes)
    memory = shared_memory(REGION_OFFSET + size)
    control = control_module.open_control(memory, SLOT + 1, world)
    control.set_control(SLOT, EPOCH, ControlState.LIVE)
    ranks = [
        ShmCommunicator(
            memory,
            REGION_OFFSET,
            size,
            rank,
            world,
            control=control,
            slot=SLOT,
            epoch=EPOCH,
            progress_worker=rank,
            deadline_s=deadline_s,
            spin=spin,
        )
        for rank in range(world)
    ]
    yield Domain(ranks, control)
    for end in ranks:
        end.close()


KINDS = [
    pytest.param(
        "shm", marks=pytest.mark.skipif(native.load() is None, reason="built without the extension")
    ),
    "threads",
]
needs_native = pytest.mark.skipif(native.load() is None, reason="built without the native extension")


def shared_memory(size_bytes: int) -> mmap.mmap:
    fd = create_shared("test-domain", size_bytes)
    try:
        return map_shared(fd)
    finally:
        os.close(fd)


def poll(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Yield to other threads until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0)
