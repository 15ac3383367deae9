"""All ranks of a domain on the native kernel path, as threads of one process: for tests and benchmarks.

The communicator is the real one in shared memory; the interpreter lock is released inside a step, so ranks
run at the same time.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dynamictp.facts import ModelFacts, WeightType
from dynamictp.kernels.native import (
    Bytes,
    NativeExchange,
    NativeForward,
    NativeModel,
    map_aligned,
    native_exchange_bytes,
    open_team,
)
from dynamictp.model.int8 import pack_int8, quantise
from dynamictp.model.panels import pack
from dynamictp.model.weights import WeightIndex, plan_weights, view_weight
from dynamictp.ranges import shard_ranges
from dynamictp.worker.comm.control import ControlBlock, ControlState, bytes_needed, open_control
from dynamictp.worker.comm.shm import ShmCommunicator, create_shared, default_spin, region_bytes

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
    facts: ModelFacts, rows: WeightIndex, buffer: Bytes, weights: WeightType = ""
) -> tuple[WeightIndex, NDArray[np.uint8]]:
    """Row-major weights as packed ones: the index, and a buffer of its own."""
    index = plan_weights(facts, rows.dtype, "panels", weights)
    packed = shared_bytes(index.total_bytes)
    for name, entry in index.entries.items():
        # A quantised head stands beside the embedding that it is tied to.
        source = view_weight(rows, buffer, name if name in rows.entries else "embed")
        target = view_weight(index, packed, name)
        if entry.dtype == "int8":
            pack_int8(quantise(source), target)
        elif len(entry.shape) == 2:
            pack(source, target)
        else:
            target[...] = source
    return index, packed


class NativeDomain:
    """`tp` ranks over one copy of weights and one arena, of `threads` threads each. A context manager.

    With `cores`, rank r's threads are bound to the r-th `threads` of them. `control` has a progress word for
    each rank, and slot 0 live at epoch 1.
    """

    def __init__(
        self,
        model: NativeModel,
        tp: int,
        *,
        max_tokens: int = 512,
        max_rows: int = 64,
        threads: int = 1,
        cores: Sequence[int] = (),
        control: ControlBlock | None = None,
    ) -> None:
        self.tp = tp
        facts, dtype = model.facts, model.index.dtype
        size = native_exchange_bytes(facts, dtype, max_tokens=max_tokens, max_rows=max_rows, world=tp)
        payload = shared_bytes(size)
        control = control or _live_control(tp)
        self.comms = _communicators(tp, control) if tp > 1 else []
        sets = [cores[rank * threads : (rank + 1) * threads] for rank in range(tp)]
        self.ranks = [
            NativeForward(
                replace(model, team=open_team(threads, sets[rank], spin=default_spin(tp * threads))),
                shard_ranges(facts, tp, rank),
                NativeExchange(
                    payload,
                    max_tokens,
                    max_rows,
                    tp,
                    self.comms[rank].core_address if tp > 1 else 0,
                    control.progress_address(rank),
                ),
            )
            for rank in range(tp)
        ]
        self._control = control  # the ranks hold an address inside
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(tp)]
        for thread, own in zip(self._threads, sets, strict=True):
            if own:
                thread.submit(os.sched_setaffinity, 0, own[:1]).result()

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
        futures = [self.on_rank(rank, call) for rank in range(self.tp)]
        return [future.result() for future in futures]

    def on_rank(self, rank: int, call: Callable[[NativeForward], T]) -> Future[T]:
        """Call with one rank's forward in that rank's thread."""
        return self._threads[rank].submit(call, self.ranks[rank])

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for comm in self.comms:
            comm.close()

    def __enter__(self) -> NativeDomain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _live_control(tp: int) -> ControlBlock:
    control = open_control(mmap.mmap(-1, bytes_needed(1, tp)), 1, tp)
    control.set_control(0, 1, ControlState.LIVE)
    return control


def _communicators(tp: int, control: ControlBlock) -> list[ShmCommunicator]:
    size = region_bytes(tp, 64)
    region = mmap.mmap(-1, size)
    return [
        ShmCommunicator(
            region, 0, size, rank, tp, control=control, slot=0, epoch=1, progress_worker=rank, deadline_s=30.0
        )
        for rank in range(tp)
    ]
