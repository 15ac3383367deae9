"""The native extension, built from csrc/. Use `dynamictp.worker.comm`, which checks arrays; this takes
addresses.

Buffers are writable, contiguous and start on a 64-byte boundary (a shared mmap); an object keeps its buffer
exported, so the mmap can't be closed under it. Errors of arguments are ValueError, of indices IndexError.
"""

from typing import Any

class ControlBlock:
    """Control words of domains and progress words of workers in shared memory; zeros are a valid block."""

    def __init__(self, buffer: Any, slot_count: int, workers: int) -> None: ...
    @staticmethod
    def bytes_needed(slots: int, workers: int) -> int: ...
    def set_control(self, slot: int, epoch: int, state: int) -> None:
        """Publish (epoch, state: 0 free, 1 live, 2 aborted) and wake the domain's sleeping waiters."""

    def control(self, slot: int) -> tuple[int, int]:
        """(epoch, state)."""

    def set_progress(self, worker: int, plan: int, layer: int, state: int) -> None:
        """Publish (plan, layer, state: 0 idle, 1 computing, 2 waiting) and the time; one writer each."""

    def progress(self, worker: int) -> tuple[int, int, int, float]:
        """(plan, layer, state, seconds since the last change; 0.0 before the first)."""

class ShmCommunicator:
    """One rank's end of a shared-memory communicator. See `dynamictp.worker.comm.shm`."""

    def __init__(
        self,
        buffer: Any,
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
        spin: int,
    ) -> None: ...
    @staticmethod
    def bytes_needed(world_max: int, payload_bytes: int) -> int: ...
    @staticmethod
    def payload_offset(world: int) -> int: ...
    def barrier(self) -> None: ...
    def all_gather(self, address: int, nbytes: int) -> int:
        """Address of rank 0's part; rank r's is `r * payload_bytes` further, until this rank's next
        operation.
        """

    def all_reduce(self, address: int, count: int, dtype: int) -> None:
        """In place; dtype 0 is fp32, 1 bf16."""

    def broadcast(self, address: int, nbytes: int, root: int) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def reset(self, epoch: int) -> None: ...
    @property
    def state(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
