"""The native extension, built from csrc/. Use `dynamictp.worker.comm`, which checks arrays; this takes
addresses.

Buffers are writable, contiguous and start on a 64-byte boundary (a shared mmap); an object keeps its buffer
exported, so the mmap can't be closed under it. Errors of arguments are ValueError, of indices IndexError.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    def progress_address(self, worker: int) -> int:
        """Address of the progress word, for a `Step` that publishes its progress itself."""

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
    @property
    def core_address(self) -> int:
        """Address of the C++ communicator, for a `Step` that meets the peers itself."""

# ---------------------------------------------------------------- kernels, see `dynamictp.kernels`

def kernel_level() -> str:
    """The best CPU-feature level of this processor: portable, avx2, avx512 or avx512_bf16."""

def map_aligned(descriptor: int, size: int, writable: bool) -> NDArray[np.uint8]:
    """uint8 [size] over a shared mapping at a multiple of 2 MiB, unmapped with the array.

    Raises `OSError`.
    """

def collapse_pages(address: int, size: int) -> int:
    """Put the memory into huge pages now, best effort; the bytes that are in them."""

def divide_attention(
    spans: list[tuple[int, int]], kv_heads: int, group: int, rank: int, world: int
) -> list[tuple[int, int, int, int]]:
    """A rank's share of a step's attention: (sequence, KV head, first row, last row). Row j is token
    j // group of the span (start, count), query head j % group of the KV head.
    """

class ModelShape:
    """Sizes of a model; `dtype` is bf16 or fp32, `weights` int8 or empty."""

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate: int,
        vocab: int,
        epsilon: float,
        dtype: str,
        weights: str = "",
    ) -> None: ...
    def exchange_bytes(self, max_tokens: int, max_rows: int, world: int) -> int: ...

class Team:
    """Threads that compute together: the caller and `threads` - 1 helpers. See `kernels.native.open_team`."""

    def __init__(self, threads: int, cores: list[int], spin: int) -> None: ...
    @property
    def size(self) -> int: ...

class Step:
    """One rank's forward pass. See `dynamictp.kernels.native.NativeForward`, which checks memory; this takes
    addresses. `weights` maps canonical names to addresses; `qkv` counts head units, `hidden`, `mlp` and
    `vocab` panels; `communicator` is `ShmCommunicator.core_address`, 0 for one rank; `progress` is
    `ControlBlock.progress_address`, 0 for none. `keep` stays alive with the step.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: dict[str, int],
        *,
        qkv: tuple[int, int],
        hidden: tuple[int, int],
        mlp: tuple[int, int],
        vocab: tuple[int, int],
        arena: int,
        pages: int,
        page_tokens: int,
        exchange: int,
        max_tokens: int,
        max_rows: int,
        communicator: int,
        progress: int,
        team: Team | None,
        level: str,
        keep: object,
    ) -> None: ...
    def set_rotation(self, cosine: int, sine: int, positions: int, keep: object) -> None: ...
    def run(self, tokens: int, starts: list[int], counts: list[int], tables: list[int]) -> None:
        """`tokens` int64, one after another for all spans; `tables` int32 [blocks, KV heads] each."""

    def logits(self, tokens: int, count: int, arg_max: int) -> None:
        """Of batch rows int64 [count] of the last run, into the exchange; their arg-max int64 [count]."""

    def take_wait_ns(self) -> int:
        """Time spent at barriers since the last call."""

    def take_weights_ns(self) -> int:
        """Time spent in matrices since the last call."""

    def take_attention_ns(self) -> int:
        """Time spent in attention since the last call."""

    @property
    def logits_address(self) -> int: ...
    @property
    def logits_stride(self) -> int: ...
    @property
    def tokens_address(self) -> int:
        """int64 [max_rows] of the exchange that the step itself leaves alone."""

class KernelTable:
    """The kernels of one level and dtype by themselves, for tests and benchmarks. Strides in elements."""

    def __init__(self, level: str, dtype: str) -> None: ...
    def linear(
        self,
        weights: int,
        panels: int,
        columns: int,
        bias: int,
        x: int,
        stride: int,
        rows: int,
        y: int,
        y_stride: int,
    ) -> None:
        """fp32 y = x·Wᵀ + bias (address 0 for none)."""

    def gated(
        self,
        gate: int,
        up: int,
        panels: int,
        columns: int,
        x: int,
        stride: int,
        rows: int,
        y: int,
        y_stride: int,
    ) -> None:
        """y = silu(x·Gᵀ)·(x·Uᵀ), rounded to the dtype."""

    def linear_int8(
        self,
        weights: int,
        panels: int,
        columns: int,
        bias: int,
        x: int,
        stride: int,
        rows: int,
        y: int,
        y_stride: int,
    ) -> None:
        """`linear` with int8 panels; the activations are rounded to integers first."""

    def gated_int8(
        self,
        gate: int,
        up: int,
        panels: int,
        columns: int,
        x: int,
        stride: int,
        rows: int,
        y: int,
        y_stride: int,
    ) -> None:
        """`gated` with int8 panels."""

    def arg_max(self, values: int, size: int) -> int: ...
