"""The contract of every communicator."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dynamictp.worker.comm.arrays import Array

CommState = Literal["new", "ready", "broken", "closed"]
"""`new` until the first operation (the proof) completes, then `ready`; `broken` is final; `closed` ends
all.
"""


class Communicator(Protocol):
    """One rank's end of the domain's collectives.

    One thread runs operations; `abort`, `close` and `state` may be used from any. All ranks run the same
    operations in the same order with the same sizes; a rank that does not breaks the communicator by name.

    Every operation is a barrier: what any rank wrote to memory before it, every rank reads after it. Every
    operation raises `CommunicatorBroken` when the epoch was aborted, when a peer is missing past the deadline
    (which counts from the moment this rank began to wait, and then aborts the epoch for all), and ever after.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def state(self) -> CommState: ...

    def barrier(self) -> None:
        """Wait for every rank."""

    def all_gather(self, source: Array) -> NDArray[np.uint8]:
        """The bytes of every rank's `source`: [world, nbytes], valid until this rank's next operation.

        It may be a view of memory that the peers read too: copy it or read it, don't write it. Raises
        `ValueError` when `source` is larger than the communicator's payload.
        """

    def all_reduce(self, array: Array) -> None:
        """In-place sum over ranks of an fp32 or bf16 array of any size.

        Added in rank order in fp32 and rounded once, so every rank gets the same bits.
        """

    def broadcast(self, array: Array, root: int) -> None:
        """Overwrite `array` with the root's, of the same size."""

    def abort(self) -> None:
        """Break the epoch: every waiter of the domain is released with `CommunicatorBroken`."""

    def reset(self, epoch: int) -> None:
        """Reuse a parked communicator for a new epoch; it is `new` again until its proof.

        Legal when the domain is quiesced: no rank is inside an operation. Raises `CommunicatorBroken` on a
        broken or closed one, `RuntimeError` while an operation of this rank runs.
        """

    def close(self) -> None:
        """Let go of the memory. Aborts the epoch if an operation of this rank still runs."""
