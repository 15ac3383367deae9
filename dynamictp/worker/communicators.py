"""The communicators of one worker: opened on command, parked between domains, closed when their slot is
given to another."""

from __future__ import annotations

import mmap
from typing import Protocol

from dynamictp import native
from dynamictp.messages import OpenDomain
from dynamictp.worker.comm.base import Communicator
from dynamictp.worker.comm.control import ControlBlock
from dynamictp.worker.comm.shm import ShmCommunicator, region_bytes
from dynamictp.worker.comm.solo import SoloCommunicator
from dynamictp.worker.start import PROOF_BYTES, WorkerStart


class CommunicatorFactory(Protocol):
    """Makes this rank's end of a new communicator."""

    def __call__(self, opened: OpenDomain) -> Communicator: ...


class Communicators:
    """This worker's ends by communicator id. One slot of the exchange memory holds at most one."""

    def __init__(self, make: CommunicatorFactory) -> None:
        self._make = make
        self._by_id: dict[int, Communicator] = {}
        self._id_of_slot: dict[int, int] = {}

    def open(self, opened: OpenDomain) -> Communicator:
        """The parked communicator of that id, ready for the new epoch, or a new one."""
        handle = opened.comm
        parked = self._by_id.get(handle.id)
        if parked is not None:
            parked.reset(opened.epoch)
            return parked
        self._drop(self._id_of_slot.get(handle.slot))
        comm = self._make(opened)
        self._by_id[handle.id] = comm
        self._id_of_slot[handle.slot] = handle.id
        return comm

    def park(self, opened: OpenDomain) -> None:
        """Keep a quiesced communicator; a broken one is closed."""
        comm = self._by_id.get(opened.comm.id)
        if comm is not None and comm.state not in ("new", "ready"):
            self._drop(opened.comm.id)

    def close(self) -> None:
        for comm_id in list(self._by_id):
            self._drop(comm_id)

    def _drop(self, comm_id: int | None) -> None:
        comm = None if comm_id is None else self._by_id.pop(comm_id, None)
        if comm is not None:
            comm.close()


class SharedMemoryFactory:
    """Communicators in the slots of the exchange memory; of one rank, without any memory."""

    def __init__(
        self, start: WorkerStart, exchange: mmap.mmap, slot_bytes: int, control: ControlBlock
    ) -> None:
        self._start = start
        self._exchange = exchange
        self._slot_bytes = slot_bytes
        self._control = control

    def __call__(self, opened: OpenDomain) -> Communicator:
        start = self._start
        if opened.tp == 1:
            return SoloCommunicator(control=self._control, slot=opened.control_slot, epoch=opened.epoch)
        offset = opened.comm.slot * self._slot_bytes
        self._clear_own_line(offset, opened.rank)
        return ShmCommunicator(
            self._exchange,
            offset,
            region_bytes(start.devices, PROOF_BYTES),
            opened.rank,
            opened.tp,
            control=self._control,
            slot=opened.control_slot,
            epoch=opened.epoch,
            progress_worker=start.device,
            deadline_s=start.deadline_s,
            spin=start.spin,
        )

    def _clear_own_line(self, offset: int, rank: int) -> None:
        """Forget what an earlier communicator left in the slot: its shape, and this rank's arrivals.

        Nobody waits in the slot yet: its former members have ended their epoch before the engine gives it
        away, and the new ones run no operation before the engine has heard of each that it opened. So every
        rank clears its own line, and the shape, which all of them then set alike.
        """
        communicator = native.require().ShmCommunicator
        line = range(communicator.payload_offset(rank), communicator.payload_offset(rank + 1))
        self._exchange[offset : offset + 8] = bytes(8)
        self._exchange[offset + line.start : offset + line.stop] = bytes(len(line))
