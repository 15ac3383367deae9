"""The shared-memory communicator and the memory it lives in. Needs the native extension.

The creator makes a `memfd` (no name to leak), passes the descriptor, and every process maps it. A region
holds one communicator at a time and is all zeros before its first rank opens it; a region whose
communicator broke may be cleared and used again only when every member has ended its epoch or is dead.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dynamictp import native
from dynamictp.worker.comm.arrays import Array, flatten, reducible
from dynamictp.worker.comm.base import CommState
from dynamictp.worker.comm.control import ControlBlock

DEFAULT_SPIN = 2000
_DTYPE = {"float32": (0, 4), "bfloat16": (1, 2)}  # the native code and the bytes of an element


def create_shared(name: str, size_bytes: int) -> int:
    """A descriptor of `size_bytes` of zeroed anonymous shared memory. `name` is for diagnosis only."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_shared(fd: int) -> mmap.mmap:
    """Map all of a descriptor's memory, writable and shared; the descriptor may be closed afterwards."""
    return mmap.mmap(fd, os.fstat(fd).st_size)


def default_spin(ranks: int) -> int:
    """Polls before the first yield: 0 when `ranks` (of all domains that run at once) outnumber usable cores.

    Spinning halves a barrier when every rank has a core, and starves the peer it waits for when not.
    """
    return DEFAULT_SPIN if ranks <= len(os.sched_getaffinity(0)) else 0


def region_bytes(world: int, payload_bytes: int) -> int:
    """Size of a region whose ranks contribute at most `payload_bytes` to one chunk of a collective."""
    return int(native.require().ShmCommunicator.bytes_needed(world, payload_bytes))


class ShmCommunicator:
    """`Communicator` over a region of shared memory, in processes or threads.

    `buffer[offset : offset + size]` is the region, the same bytes for every rank; `offset` a multiple of 64.
    Waits obey the word in `control` slot `slot`, which must say (epoch, live), and publish `waiting` in the
    progress word of `progress_worker`. A wait polls `spin` times, yields for about a millisecond, then
    sleeps.

    Raises `ResourceError` without the native extension, `ValueError` for a region that is too small or
    belongs to a communicator of another shape.
    """

    def __init__(
        self,
        buffer: mmap.mmap,
        offset: int,
        size: int,
        rank: int,
        world: int,
        *,
        control: ControlBlock,
        slot: int,
        epoch: int,
        progress_worker: int,
        deadline_s: float,
        spin: int | None = None,
    ) -> None:
        self._native = native.require().ShmCommunicator(
            buffer,
            offset,
            size,
            rank,
            world,
            control=control,
            slot=slot,
            epoch=epoch,
            progress_worker=progress_worker,
            deadline_s=deadline_s,
            spin=default_spin(world) if spin is None else spin,
        )
        self.rank = rank
        self.world = world
        self.payload_bytes: int = self._native.payload_bytes
        # The hot operation is the native method itself: no Python frame between model code and the barrier.
        self.barrier: Callable[[], None] = self._native.barrier
        self._region: NDArray[np.uint8] | None = np.frombuffer(buffer, np.uint8, size, offset)
        self._address: int = self._region.__array_interface__["data"][0]

    @property
    def state(self) -> CommState:
        state: CommState = self._native.state
        return state

    @property
    def epoch(self) -> int:
        return int(self._native.epoch)

    @property
    def core_address(self) -> int:
        """Address of the native communicator, for native code that meets the peers itself; valid while this
        object lives.
        """
        return int(self._native.core_address)

    def all_gather(self, source: Array) -> NDArray[np.uint8]:
        flat = flatten(source)
        region = self._region
        address = self._native.all_gather(flat.address, flat.nbytes)
        start = address - self._address
        # Rank r's part is r × payload_bytes further.
        return np.ndarray((self.world, flat.nbytes), np.uint8, region, start, (self.payload_bytes, 1))

    def all_reduce(self, array: Array) -> None:
        flat, kind = reducible(array)
        code, element_bytes = _DTYPE[kind]
        self._native.all_reduce(flat.address, flat.nbytes // element_bytes, code)

    def broadcast(self, array: Array, root: int) -> None:
        flat = flatten(array, write=True)
        self._native.broadcast(flat.address, flat.nbytes, root)

    def abort(self) -> None:
        self._native.abort()

    def reset(self, epoch: int) -> None:
        self._native.reset(epoch)

    def close(self) -> None:
        self._native.close()
        self._region = None
