"""The worker process: maps the shared memory, binds to its cores, and executes what the engine sends."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from dynamictp import native
from dynamictp.errors import ProtocolError
from dynamictp.kernels.native import collapse, map_aligned
from dynamictp.messages import WorkerHello
from dynamictp.process import release_unused_memory, settle_heap
from dynamictp.transport import ZmqLink, zmq_link
from dynamictp.worker.comm.control import open_control
from dynamictp.worker.communicators import SharedMemoryFactory
from dynamictp.worker.core import WorkerCore
from dynamictp.worker.fault import fault_from_environment
from dynamictp.worker.orders import Begin, Connect, Go, Order, Orders
from dynamictp.worker.start import WorkerStart, communicator_bytes, exchange_slot_bytes

log = logging.getLogger(__name__)

KERNEL_CACHE = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Bounds of the matrix library's two caches of compiled kernels, 0.5 MB each, read at their first use. The
default of 1,024 let a worker grow by hundreds of MB (measured)."""


IDLE_S = 0.5
"""Seconds without a message after which unused memory is given back."""


@dataclass(frozen=True)
class Descriptors:
    """Inherited descriptors of the shared memories."""

    weights: int
    arena: int
    exchange: int
    control: int


def run_worker(orders_descriptor: int, descriptors: Descriptors) -> None:
    """Wait for orders, then serve one device until the supervisor ends this process or is gone itself."""
    os.environ.update(KERNEL_CACHE)
    torch.set_num_threads(1)
    orders = Orders(orders_descriptor)
    with contextlib.suppress(EOFError):
        begin = orders.next()
        if not isinstance(begin, Begin):
            raise ProtocolError(f"a worker begins with Begin, not {type(begin).__name__}")
        start = msgspec.json.decode(Path(begin.start_file).read_bytes(), type=WorkerStart)
        context = zmq.Context[zmq.Socket[bytes]](1)
        # The link's own thread is made before this thread is bound, so that it may run on any core.
        link = zmq_link(context, begin.engine, bind=False, incarnation=start.incarnation)
        if start.cores:
            # The core binds the helper threads to the others.
            os.sched_setaffinity(0, start.thread_cores[:1] or start.cores)
        weights = _shared(descriptors.weights, writable=False)
        core = _open_core(start, descriptors, weights)
        loop = WorkerLoop(start, core, orders, context, link)
        loop.wait_for_weights()
        if start.kernel_level:
            share = collapse(weights.numpy())
            log.info("device %d: %.0f %% of the weights lie in huge pages", start.device, 100 * share)
        settle_heap()
        loop.serve()


class WorkerLoop:
    """Joins the worker's core to the engine and to the supervisor. Owner of the link; a new engine means a
    new link and no domains.
    """

    def __init__(
        self,
        start: WorkerStart,
        core: WorkerCore,
        orders: Orders,
        context: zmq.Context[zmq.Socket[bytes]],
        link: ZmqLink,
    ) -> None:
        self._start = start
        self._core = core
        self._orders = orders
        self._context = context
        self._link = link
        self._poller = zmq.Poller()
        self._poller.register(orders.descriptor, zmq.POLLIN)
        self._poller.register(link.socket, zmq.POLLIN)

    def wait_for_weights(self) -> None:
        """Returns at `Go`. Raises EOFError when the supervisor is gone."""
        while not isinstance(order := self._orders.next(), Go):
            self._obey(order)

    def serve(self) -> None:
        """Say hello, then execute messages strictly in arrival order; sleeps while there is none.

        When nothing came for a while, memory that the work has left behind goes back to the system, once:
        devices are shared with other jobs. Raises EOFError when the supervisor is gone.
        """
        self._hello()
        self._obey_all()
        tidy = True
        while True:
            ready = dict(self._poller.poll(None if tidy else int(IDLE_S * 1e3)))
            if not ready:
                release_unused_memory()
                tidy = True
                continue
            tidy = False
            if self._orders.descriptor in ready:
                self._obey_all()
            while (body := self._link.receive()) is not None:
                for answer in self._core.handle(body):
                    self._link.send(answer)

    def _obey_all(self) -> None:
        """Carry out every order that is there, read from the pipe or not."""
        while (order := self._orders.next(0.0)) is not None:
            self._obey(order)
            self._hello()

    def _hello(self) -> None:
        self._link.send(WorkerHello(self._start.device, self._start.incarnation, os.getpid()))

    def _obey(self, order: Order | None) -> None:
        if not isinstance(order, Connect):
            raise ProtocolError(f"unexpected order {order}")
        self._poller.unregister(self._link.socket)
        self._link.close()
        self._core.reset()
        self._link = zmq_link(self._context, order.engine, bind=False, incarnation=self._start.incarnation)
        self._poller.register(self._link.socket, zmq.POLLIN)


def _open_core(start: WorkerStart, descriptors: Descriptors, weights: torch.Tensor) -> WorkerCore:
    slot_bytes = exchange_slot_bytes(
        start.facts,
        start.dtype,
        start.max_tokens,
        start.max_rows,
        start.devices,
        packed=bool(start.kernel_level),
    )
    region = communicator_bytes(start.devices)
    exchange = _map(descriptors.exchange)
    exchange_bytes = _tensor(np.frombuffer(exchange, np.uint8))
    control = open_control(_map(descriptors.control), start.comm_slots, start.devices)

    def payload(slot: int) -> torch.Tensor:
        return exchange_bytes[slot * slot_bytes + region : (slot + 1) * slot_bytes]

    return WorkerCore(
        start,
        weights,
        _shared(descriptors.arena, writable=True),
        payload=payload,
        communicator=SharedMemoryFactory(start, exchange, slot_bytes, control),
        control=control,
        before_step=fault_from_environment(),
    )


def _map(descriptor: int, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=access)


def _shared(descriptor: int, *, writable: bool) -> torch.Tensor:
    """uint8 view of a whole descriptor, where huge pages can lie if the native extension is there."""
    if native.load() is not None:
        return _tensor(map_aligned(descriptor, os.fstat(descriptor).st_size, writable=writable))
    mapping = _map(descriptor, mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    return _tensor(np.frombuffer(mapping, np.uint8))


def _tensor(array: NDArray[np.uint8]) -> torch.Tensor:
    """The same memory; that of the weights is read-only, which torch can't express and warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
