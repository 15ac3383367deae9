"""The `fake` communicator: ranks are threads of one process, in pure Python.

For the lock-step harness and for tests that must not need the native extension; it keeps every promise of
`Communicator`, only slowly.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dynamictp.errors import CommunicatorBroken
from dynamictp.worker.comm.arrays import Array, bytes_of, flatten, reducible
from dynamictp.worker.comm.base import CommState

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class _Tag(NamedTuple):
    """What a rank does in one operation; every rank must do the same."""

    epoch: int
    op: str
    nbytes: int
    detail: str


class ThreadGroup:
    """What the ranks of one domain share; owns arrivals and contributions, under one condition.

    `deadline_s` bounds each wait, from when that rank began to wait.
    """

    def __init__(self, world: int, *, deadline_s: float = 30.0, epoch: int = 0) -> None:
        if world < 1:
            raise ValueError(f"a group has at least one rank, not {world}")
        self.world = world
        self.deadline_s = deadline_s
        self._changed = threading.Condition()
        self._arrived = [0] * world
        # What a rank does between arrivals n - 1 and n is at [n % 2]: nobody overwrites it before all have
        # read.
        self._tags: list[list[_Tag | None]] = [[None] * world, [None] * world]
        self._data: list[list[bytes]] = [[b""] * world, [b""] * world]
        self._aborted_epoch: int | None = None
        self.ranks = tuple(ThreadCommunicator(self, rank, epoch) for rank in range(world))

    def abort(self, epoch: int) -> None:
        with self._changed:
            self._aborted_epoch = epoch
            self._changed.notify_all()

    def exchange(self, rank: int, tag: _Tag, data: bytes) -> list[bytes]:
        """Contribute `data`, wait for every rank and return all contributions in rank order.

        Raises `CommunicatorBroken`, after which the epoch is aborted.
        """
        with self._changed:
            try:
                if self._aborted_epoch == tag.epoch:
                    raise CommunicatorBroken(f"epoch {tag.epoch} was aborted before {tag.op} of rank {rank}")
                count = self._arrived[rank] + 1
                self._tags[count % 2][rank] = tag
                self._data[count % 2][rank] = data
                self._arrived[rank] = count
                self._changed.notify_all()
                self._wait(rank, tag, count)
                self._check_tags(rank, tag, count)
            except BaseException:
                self._aborted_epoch = tag.epoch
                self._changed.notify_all()
                raise
            return list(self._data[count % 2])

    def _wait(self, rank: int, tag: _Tag, count: int) -> None:
        deadline = time.monotonic() + self.deadline_s
        while missing := [peer for peer in range(self.world) if self._arrived[peer] < count]:
            left_s = deadline - time.monotonic()
            if self._aborted_epoch == tag.epoch:
                reason = "was aborted"
            elif left_s <= 0:
                reason = f"missed the deadline of {self.deadline_s} s"
            else:
                self._changed.wait(left_s)
                continue
            raise CommunicatorBroken(
                f"epoch {tag.epoch} {reason} in {tag.op} of rank {rank} of {self.world}; "
                f"missing ranks: {', '.join(map(str, missing))}"
            )

    def _check_tags(self, rank: int, tag: _Tag, count: int) -> None:
        for peer, theirs in enumerate(self._tags[count % 2]):
            if theirs != tag:
                raise CommunicatorBroken(f"rank {peer} is in {theirs} while rank {rank} is in {tag}")


class ThreadCommunicator:
    """One thread's end of a `ThreadGroup`; made by the group."""

    def __init__(self, group: ThreadGroup, rank: int, epoch: int) -> None:
        self._group = group
        self.rank = rank
        self.world = group.world
        self._epoch = epoch
        self._state: CommState = "new"
        self._inside = False

    @property
    def state(self) -> CommState:
        return self._state

    @property
    def epoch(self) -> int:
        return self._epoch

    def barrier(self) -> None:
        self._exchange("barrier", b"", 0)

    def all_gather(self, source: Array) -> NDArray[np.uint8]:
        data = bytes_of(flatten(source)).tobytes()
        parts = self._exchange("all_gather", data, len(data))
        return np.frombuffer(bytearray().join(parts), np.uint8).reshape(self.world, len(data))

    def all_reduce(self, array: Array) -> None:
        flat, kind = reducible(array)
        dtype = _DTYPES[kind]
        out = bytes_of(flat)
        parts = self._exchange("all_reduce", out.tobytes(), flat.nbytes, kind)
        with np.errstate(all="ignore"):  # NaN and infinity travel on; whoever reads the result judges them
            total = np.frombuffer(parts[0], dtype).astype(np.float32)
            for part in parts[1:]:
                total += np.frombuffer(part, dtype).astype(np.float32)
            out[:] = total.astype(dtype).view(np.uint8)

    def broadcast(self, array: Array, root: int) -> None:
        if not 0 <= root < self.world:
            raise ValueError(f"broadcast: root {root} is no rank of this communicator")
        flat = flatten(array, write=True)
        out = bytes_of(flat)
        data = out.tobytes() if self.rank == root else b""
        out[:] = np.frombuffer(self._exchange("broadcast", data, flat.nbytes, str(root))[root], np.uint8)

    def abort(self) -> None:
        self._group.abort(self._epoch)

    def reset(self, epoch: int) -> None:
        if self._state in ("broken", "closed"):
            raise CommunicatorBroken("a broken or closed communicator can't be reused")
        if self._inside:
            raise RuntimeError("reset while an operation runs: quiesce the domain first")
        self._epoch = epoch
        self._state = "new"

    def close(self) -> None:
        self._state = "closed"
        if self._inside:
            self.abort()

    def _exchange(self, op: str, data: bytes, nbytes: int, detail: str = "") -> list[bytes]:
        if self._state in ("broken", "closed"):
            raise CommunicatorBroken(f"the communicator is {self._state}")
        if self._inside:
            raise RuntimeError("another operation runs on this communicator")
        self._inside = True
        try:
            parts = self._group.exchange(self.rank, _Tag(self._epoch, op, nbytes, detail), data)
        except BaseException:
            if self._state != "closed":
                self._state = "broken"
            raise
        finally:
            self._inside = False
        self._state = "ready"
        return parts
