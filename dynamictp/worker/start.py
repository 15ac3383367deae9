"""What a worker process is told at its start, and the form of the exchange memory. No torch here.

The exchange memory holds `comm_slots` slots of `exchange_slot_bytes` each: the region of one communicator,
then one domain's exchange payload.
"""

from __future__ import annotations

import msgspec

from dynamictp import native
from dynamictp.facts import DType, ModelFacts
from dynamictp.kernels.native import native_exchange_bytes
from dynamictp.messages import ArenaFacts
from dynamictp.model.exchange_size import exchange_bytes
from dynamictp.model.weights import WeightIndex
from dynamictp.worker.comm.shm import region_bytes

PROOF_BYTES = 256
"""Bytes that each rank contributes to the proof collective; the largest that goes through a communicator."""

_PAGE = 4096


class WorkerStart(msgspec.Struct, frozen=True):
    """Everything a worker needs to begin; descriptors and the engine's socket come on the command line."""

    facts: ModelFacts
    dtype: DType
    index: WeightIndex
    arena: ArenaFacts
    device: int
    devices: int
    incarnation: int
    cores: tuple[int, ...]
    """Cores that the worker's computing threads are bound to, one each; empty leaves them free."""
    max_tokens: int
    """Most tokens of one step."""
    max_rows: int
    """Most rows of one step that sample a token."""
    comm_slots: int
    deadline_s: float
    """Longest wait for a peer inside a collective."""
    spin: int
    """Polls of a barrier before it yields."""
    kernel_level: str = ""
    """Level of the native kernels, which read packed weights; empty for torch."""
    threads: int = 1
    """Threads that compute together inside a native step."""

    @property
    def thread_cores(self) -> tuple[int, ...]:
        """A core for each of several threads; none when they are not that many, so that all share them."""
        return self.cores if 1 < self.threads <= len(self.cores) else ()


def communicator_bytes(devices: int) -> int:
    """Bytes of a slot's communicator region, for any degree up to `devices`. 0 without the extension."""
    if native.load() is None:
        return 0
    return -(-region_bytes(devices, PROOF_BYTES) // _PAGE) * _PAGE


def exchange_slot_bytes(
    facts: ModelFacts, dtype: DType, max_tokens: int, max_rows: int, devices: int, *, packed: bool = False
) -> int:
    """Bytes of one slot of the exchange memory, whole memory pages; `packed` for the native kernels."""
    if packed:
        payload = native_exchange_bytes(facts, dtype, max_tokens=max_tokens, max_rows=max_rows, world=devices)
    else:
        payload = exchange_bytes(facts, dtype, max_tokens, max_rows)
    return communicator_bytes(devices) + -(-payload // _PAGE) * _PAGE
