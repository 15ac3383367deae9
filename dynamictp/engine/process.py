"""The engine as a process: one loop over the links to the server and to the workers."""

from __future__ import annotations

import logging
import math
import mmap
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Literal

import zmq

from dynamictp.clock import Clock, SystemClock
from dynamictp.engine.comms import ControlWords
from dynamictp.engine.core import EngineCore
from dynamictp.engine.links import WorkerLinks
from dynamictp.errors import DomainError, ProtocolError
from dynamictp.messages import EngineStart, SwitchStatus, WorkerGone, WorkerStarted
from dynamictp.process import core_wait_s, die_with_parent, ignore_interrupt
from dynamictp.transport import ZmqLink, engine_address, zmq_link
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

    def progress(self, device: int) -> tuple[int, int, int, float]:
        return self._block.progress(device)


def map_control(descriptor: int, slots: int, devices: int) -> ControlWords:
    """Control words in the memory behind the descriptor. The block keeps the mapping alive."""
    return SharedControlWords(open_control(mmap.mmap(descriptor, 0), slots, devices))


class EngineLoop:
    """Joins the core to server and workers. Blocks until a message is there or a deadline of the core has
    come."""

    def __init__(
        self,
        core: EngineCore,
        server: ZmqLink,
        workers: WorkerLinks,
        poller: zmq.Poller,
        clock: Clock,
        *,
        check: bool,
    ) -> None:
        self._core = core
        self._server = server
        self._workers = workers
        self._clock = clock
        self._check_always = check
        self._check_due = False
        self._poller = poller

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
            match body:
                case WorkerStarted():
                    self._workers.open(body.device, body.incarnation)
                case WorkerGone():
                    # What it finished counts.
                    self._receive_from(body.device)
                    self._workers.close(body.device, body.incarnation)
            self._core.on_server(body)
        for device in self._workers:
            self._receive_from(device)

    def _receive_from(self, device: int) -> None:
        try:
            while (body := self._workers.receive(device)) is not None:
                self._core.on_worker(device, body)
        except ProtocolError as error:
            log.warning("link to the worker of device %d: %s", device, error)
            self._workers.close(device)
            self._core.lose_worker(device, str(error))

    def _send(self) -> None:
        gone: dict[int, str] = {}
        for device, body in self._core.to_workers:
            if device in gone:
                continue
            try:
                self._workers.send(device, body)
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
            self._core.lose_worker(device, reason)


def run_engine(start: EngineStart, sockets: Path, control: ControlWords, clock: Clock | None = None) -> None:
    """Serve until a `Shutdown`. Listens in `sockets` for the server and for each worker's life."""
    clock = clock or SystemClock()
    context = zmq.Context[zmq.Socket[bytes]](1)
    poller = zmq.Poller()
    incarnation = start.incarnation
    workers = WorkerLinks(context, poller, sockets, incarnation)
    server = zmq_link(context, engine_address(sockets, incarnation), bind=True, incarnation=incarnation)
    try:
        poller.register(server.socket, zmq.POLLIN)
        for device, worker in enumerate(start.workers or (1,) * start.devices):
            if worker:
                workers.open(device, worker)
        core = EngineCore(start, clock, control, core_wait_s)
        check = os.environ.get(CHECK_ENV) == "1"
        EngineLoop(core, server, workers, poller, clock, check=check).run()
    finally:
        workers.close_all()
        server.close()
        context.term()


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def become_engine_process() -> None:
    """Die with the supervisor, leave Ctrl-C to it, end on SIGTERM, give way to the workers."""
    die_with_parent()
    ignore_interrupt()
    signal.signal(signal.SIGTERM, _stop)
    os.nice(NICENESS)
