"""The engine as a process: one loop over the links to the server and to the workers."""

from __future__ import annotations

import logging
import math
import mmap
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Literal

import zmq

from dynamictp.clock import Clock, SystemClock
from dynamictp.engine.comms import ControlWords
from dynamictp.engine.core import EngineCore
from dynamictp.errors import DomainError, ProtocolError
from dynamictp.messages import EngineStart, SwitchStatus
from dynamictp.process import die_with_parent, ignore_interrupt
from dynamictp.transport import ZmqLink, zmq_link
from dynamictp.worker.comm.control import ControlBlock, open_control

log = logging.getLogger(__name__)

NICENESS = 5
"""Workers come first: a neighbour of equal priority doubles the time of lock-step ranks (measured)."""
CHECK_ENV = "DYNAMICTP_CHECK"
"""Set to 1 to check the engine's accounts whenever it is idle."""


class SharedControlWords:
    """Control words in shared memory, read by workers at dequeue and in every wait."""

    def __init__(self, block: ControlBlock) -> None:
        self._block = block

    def set(self, slot: int, epoch: int, state: Literal[0, 1, 2]) -> None:
        self._block.set_control(slot, epoch, state)


def map_control(descriptor: int, slots: int, devices: int) -> ControlWords:
    """Control words in the memory behind the descriptor. The block keeps the mapping alive."""
    return SharedControlWords(open_control(mmap.mmap(descriptor, 0), slots, devices))


class EngineLoop:
    """Owner of the engine's links. Blocks until a message is there or a deadline of the core has come."""

    def __init__(
        self, core: EngineCore, server: ZmqLink, workers: Sequence[ZmqLink], clock: Clock, *, check: bool
    ) -> None:
        self._core = core
        self._server = server
        self._workers = workers
        self._clock = clock
        self._check_always = check
        self._check_due = False
        self._poller = zmq.Poller()
        for link in (server, *workers):
            self._poller.register(link.socket, zmq.POLLIN)

    def run(self) -> None:
        """Until a `Shutdown` is carried out. Raises `FatalError` when the first layout does not open."""
        while not self._core.finished:
            # Rounded up: rounded down, the last millisecond before a deadline would be spent spinning.
            timeout_s = max(0.0, self._core.next_deadline() - self._clock.now())
            self._poller.poll(math.ceil(timeout_s * 1e3))
            self._receive()
            self._core.turn()
            self._send()
            if self._check_due and not self._core.book.live:
                self._core.check_integrity()
                self._check_due = False

    def _receive(self) -> None:
        while (body := self._server.receive()) is not None:
            self._core.on_server(body)
        for device, link in enumerate(self._workers):
            try:
                while (body := link.receive()) is not None:
                    self._core.on_worker(device, body)
            except ProtocolError as error:
                log.warning("link to the worker of device %d: %s", device, error)
                self._core.on_worker_gone(device, str(error))

    def _send(self) -> None:
        gone: dict[int, str] = {}
        for device, body in self._core.to_workers:
            if device in gone:
                continue
            try:
                self._workers[device].send(body)
            except DomainError as error:
                gone[device] = str(error)
        self._core.to_workers.clear()
        for body in self._core.to_server:
            self._server.send(body)
            if isinstance(body, SwitchStatus) and body.outcome in {"closed", "failed", "cancelled"}:
                self._check_due = True
        self._core.to_server.clear()
        self._check_due = self._check_due or self._check_always
        for device, reason in gone.items():
            log.warning("the worker of device %d is gone: %s", device, reason)
            self._core.on_worker_gone(device, reason)


def run_engine(start: EngineStart, sockets: Path, control: ControlWords, clock: Clock | None = None) -> None:
    """Serve until a `Shutdown`. Binds `worker-<device>.sock` in `sockets` and connects to `engine.sock`."""
    clock = clock or SystemClock()
    context = zmq.Context[zmq.Socket[bytes]](1)
    incarnation = start.incarnation
    links: list[ZmqLink] = []
    try:
        for device in range(start.devices):
            address = f"ipc://{sockets}/worker-{device}.sock"
            links.append(zmq_link(context, address, bind=True, incarnation=incarnation))
        server = zmq_link(context, f"ipc://{sockets}/engine.sock", bind=False, incarnation=incarnation)
        links.append(server)
        core = EngineCore(start, clock, control)
        check = os.environ.get(CHECK_ENV) == "1"
        EngineLoop(core, server, links[:-1], clock, check=check).run()
    finally:
        for link in links:
            link.close()
        context.term()


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def become_engine_process() -> None:
    """Die with the supervisor, leave Ctrl-C to it, end on SIGTERM, give way to the workers."""
    die_with_parent()
    ignore_interrupt()
    signal.signal(signal.SIGTERM, _stop)
    os.nice(NICENESS)
