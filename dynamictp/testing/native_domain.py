"""All ranks of a domain on the native kernel path, as threads of one process: for tests and benchmarks.

The communicator is the real one in shared memory; the interpreter lock is released inside a step, so ranks
run at the same time.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dynamictp.facts import ModelFacts
from dynamictp.kernels.native import (
    Bytes,
    NativeExchange,
    NativeForward,
    NativeModel,
    map_aligned,
    native_exchange_bytes,
)
from dynamictp.model.panels import pack
from dynamictp.model.weights import WeightIndex, plan_weights, view_weight
from dynamictp.ranges import shard_ranges
from dynamictp.worker.comm.control import ControlState, bytes_needed, open_control
from dynamictp.worker.comm.shm import ShmCommunicator, create_shared, region_bytes

T = TypeVar("T")


class Part(NamedTuple):
    """One sequence's part of a step: `tokens` from index `start`, and its page table [blocks, KV heads]."""

    tokens: NDArray[np.int64]
    start: int
    table: NDArray[np.int32]


def shared_bytes(size: int) -> Bytes:
    """`size` zero bytes of shared memory that can lie in huge pages."""
    descriptor = create_shared("native-domain", size)
    try:
        return map_aligned(descriptor, size)
    finally:
        os.close(descriptor)


def pack_weights(
    facts: ModelFacts, rows: WeightIndex, buffer: Bytes
) -> tuple[WeightIndex, NDArray[np.uint8]]:
    """Row-major weights as packed ones: the index, and a buffer of its own."""
    index = plan_weights(facts, rows.dtype, "panels")
    packed = shared_bytes(index.total_bytes)
    for name, entry in index.entries.items():
        source, target = view_weight(rows, buffer, name), view_weight(index, packed, name)
        if len(entry.shape) == 2:
            pack(source, target)
        else:
            target[...] = source
    return index, packed


class NativeDomain:
    """`tp` ranks over one copy of weights and one arena. A context manager.

    With `cores`, rank r's thread is bound to the r-th of them.
    """

    def __init__(
        self,
        model: NativeModel,
        tp: int,
        *,
        max_tokens: int = 512,
        max_rows: int = 64,
        cores: Sequence[int] = (),
    ) -> None:
        self.tp = tp
        facts, dtype = model.facts, model.index.dtype
        size = native_exchange_bytes(facts, dtype, max_tokens=max_tokens, max_rows=max_rows, world=tp)
        payload = shared_bytes(size)
        self.comms = _communicators(tp) if tp > 1 else []
        self.ranks = [
            NativeForward(
                model,
                shard_ranges(facts, tp, rank),
                NativeExchange(
                    payload, max_tokens, max_rows, tp, self.comms[rank].core_address if tp > 1 else 0
                ),
            )
            for rank in range(tp)
        ]
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(tp)]
        for rank, core in enumerate(cores[:tp]):
            self._threads[rank].submit(os.sched_setaffinity, 0, {core}).result()

    def step(self, parts: Sequence[Part], rows: Sequence[int]) -> tuple[NDArray[np.float32], list[int]]:
        """Run all ranks; a copy of the logits [len(rows), V] of batch rows `rows`, and their arg-max.

        Raises what any rank raised, `AssertionError` when the ranks' arg-max differ.
        """
        logits, best = self.compute(parts, rows)
        return logits.copy(), best

    def compute(self, parts: Sequence[Part], rows: Sequence[int]) -> tuple[NDArray[np.float32], list[int]]:
        """`step` without the copy: the logits are valid until the next call."""
        tokens = np.concatenate([part.tokens for part in parts])
        spans = [(part.start, len(part.tokens)) for part in parts]
        tables = [part.table for part in parts]

        def on_rank(forward: NativeForward) -> tuple[NDArray[np.float32], list[int]]:
            forward.run(tokens, spans, tables)
            logits, best = forward.logits(rows)
            return logits, best.tolist()

        results = self.on_all(on_rank)
        if any(best != results[0][1] for _, best in results):
            raise AssertionError("ranks chose different tokens")
        return results[0]

    def on_all(self, call: Callable[[NativeForward], T]) -> list[T]:
        """Call with every rank's forward in that rank's thread, at once."""
        futures = [
            thread.submit(call, forward) for thread, forward in zip(self._threads, self.ranks, strict=True)
        ]
        return [future.result() for future in futures]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for comm in self.comms:
            comm.close()

    def __enter__(self) -> NativeDomain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _communicators(tp: int) -> list[ShmCommunicator]:
    control = open_control(mmap.mmap(-1, bytes_needed(1, tp)), 1, tp)
    control.set_control(0, 1, ControlState.LIVE)
    size = region_bytes(tp, 64)
    region = mmap.mmap(-1, size)
    return [
        ShmCommunicator(
            region, 0, size, rank, tp, control=control, slot=0, epoch=1, progress_worker=rank, deadline_s=30.0
        )
        for rank in range(tp)
    ]
