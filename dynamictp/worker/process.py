"""The worker process: maps the shared memory, binds to its cores, and executes what the engine sends."""

from __future__ import annotations

import gc
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
from dynamictp.kernels.native import collapse, map_aligned
from dynamictp.messages import WorkerHello
from dynamictp.process import release_unused_memory
from dynamictp.transport import Link, zmq_link
from dynamictp.worker.comm.control import open_control
from dynamictp.worker.communicators import SharedMemoryFactory
from dynamictp.worker.core import WorkerCore
from dynamictp.worker.start import WorkerStart, communicator_bytes, exchange_slot_bytes

log = logging.getLogger(__name__)

KERNEL_CACHE = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Bounds of the matrix library's two caches of compiled kernels, 0.5 MB each, read at their first use. The
default of 1,024 let a worker grow by hundreds of MB (measured)."""


IDLE_S = 0.5
"""Seconds without a message after which unused memory is given back."""


@dataclass(frozen=True)
class Descriptors:
    """Inherited descriptors: the shared memories, and the pipe that says when the weights are there."""

    weights: int
    arena: int
    exchange: int
    control: int
    ready: int


def run_worker(start_file: Path, socket: str, descriptors: Descriptors) -> None:
    """Serve one device until the parent ends this process. Returns when the weights never come."""
    start = msgspec.json.decode(start_file.read_bytes(), type=WorkerStart)
    os.environ.update(KERNEL_CACHE)
    torch.set_num_threads(1)
    # The link's own thread is made before this thread is bound, so that it may run on any core.
    link = zmq_link(zmq.Context.instance(), socket, bind=False, incarnation=start.incarnation)
    if start.cores:
        # The core binds the helper threads to the others.
        os.sched_setaffinity(0, start.thread_cores[:1] or start.cores)
    weights = _shared(descriptors.weights, writable=False)
    core = _open_core(start, descriptors, weights)
    if not os.read(descriptors.ready, 1):
        return
    if start.kernel_level:
        share = collapse(weights.numpy())
        log.info("device %d: %.0f %% of the weights lie in huge pages", start.device, 100 * share)
    # What was loaded until here lives for ever: keep the collector from walking it in the middle of a step.
    gc.collect()
    gc.freeze()
    link.send(WorkerHello(start.device, start.incarnation, os.getpid()))
    serve(core, link)


def serve(core: WorkerCore, link: Link) -> None:
    """Execute messages strictly in arrival order; sleeps while there is none.

    When nothing came for a while, memory that the work has left behind goes back to the system, once: devices
    are shared with other jobs.
    """
    tidy = True
    while True:
        if not link.wait(None if tidy else IDLE_S):
            release_unused_memory()
            tidy = True
            continue
        tidy = False
        while (body := link.receive()) is not None:
            for answer in core.handle(body):
                link.send(answer)


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
