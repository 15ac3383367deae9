"""The communicator of a tp1 domain: one rank, nobody to wait for, no native extension needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynamictp.errors import CommunicatorBroken
from dynamictp.worker.comm.arrays import Array, bytes_of, flatten, reducible
from dynamictp.worker.comm.base import CommState
from dynamictp.worker.comm.control import ControlBlock, ControlState


class SoloCommunicator:
    """`Communicator` of world 1. Operations move nothing but are refused once the epoch was aborted.

    With a `control` block it obeys the word in `slot`, as ranks with peers do.
    """

    rank = 0
    world = 1

    def __init__(self, *, control: ControlBlock | None = None, slot: int = 0, epoch: int = 0) -> None:
        self._control = control
        self._slot = slot
        self._epoch = epoch
        self._state: CommState = "new"

    @property
    def state(self) -> CommState:
        return self._state

    @property
    def epoch(self) -> int:
        return self._epoch

    def barrier(self) -> None:
        if self._state in ("broken", "closed"):
            raise CommunicatorBroken(f"the communicator is {self._state}")
        if self._control is not None and self._control.control(self._slot) != (
            self._epoch,
            ControlState.LIVE,
        ):
            self._state = "broken"
            raise CommunicatorBroken(f"epoch {self._epoch} was aborted or is not live")
        self._state = "ready"

    def all_gather(self, source: Array) -> NDArray[np.uint8]:
        own = bytes_of(flatten(source)).copy()
        self.barrier()
        return own.reshape(1, -1)

    def all_reduce(self, array: Array) -> None:
        reducible(array)
        self.barrier()

    def broadcast(self, array: Array, root: int) -> None:
        if root != 0:
            raise ValueError(f"broadcast: root must be 0 in a communicator of one rank, not {root}")
        flatten(array, write=True)
        self.barrier()

    def abort(self) -> None:
        if self._state != "closed":
            self._state = "broken"
        if self._control is not None and self._control.control(self._slot) == (
            self._epoch,
            ControlState.LIVE,
        ):
            self._control.set_control(self._slot, self._epoch, ControlState.ABORTED)

    def reset(self, epoch: int) -> None:
        if self._state in ("broken", "closed"):
            raise CommunicatorBroken("a broken or closed communicator can't be reused")
        self._epoch = epoch
        self._state = "new"

    def close(self) -> None:
        self._state = "closed"
