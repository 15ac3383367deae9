"""The lock-step harness: all ranks of one or many domains as threads of one process, on a random model.

The workers are the real ones (`WorkerCore`), the communicators are threads', the memory is this process's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import cast

import ml_dtypes
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from dynamictp.errors import DomainError
from dynamictp.facts import DType, ModelFacts, RopeFacts, WeightType
from dynamictp.kv import KVSpec
from dynamictp.messages import (
    ArenaFacts,
    Body,
    CloseDomain,
    CommHandle,
    DomainBroken,
    NewRow,
    OpenDomain,
    ProveDomain,
    RowStep,
    StepPlan,
    StepResult,
    WorkerHello,
)
from dynamictp.model.weights import WeightIndex, plan_weights, view_weight
from dynamictp.testing.native_domain import pack_weights
from dynamictp.worker.comm.base import Communicator
from dynamictp.worker.comm.control import (
    ControlBlock,
    ControlState,
    PlainControlBlock,
    bytes_needed,
    open_control,
)
from dynamictp.worker.comm.local import ThreadGroup
from dynamictp.worker.communicators import SharedMemoryFactory
from dynamictp.worker.core import WorkerCore
from dynamictp.worker.start import WorkerStart, communicator_bytes, exchange_slot_bytes

TINY = ModelFacts(
    family="llama",
    layers=2,
    hidden=144,
    query_heads=9,
    kv_heads=3,
    head_dim=16,
    intermediate=288,
    vocab=523,
    max_context=4096,
    norm_eps=1e-5,
    rope=RopeFacts(theta=10000.0),
)
"""Cut unevenly by every degree from 2 to 9; the vocabulary ends inside a panel."""

_SLOTS = 16


def random_weights(facts: ModelFacts, seed: int, dtype: DType) -> tuple[WeightIndex, NDArray[np.uint8]]:
    """Weights of a random model in canonical form: the index, and the buffer it describes.

    Matrices have the variance that keeps activations near one; embedding and head differ, so that logits have
    a clear order.
    """
    index = plan_weights(facts, dtype)
    buffer = np.frombuffer(mmap.mmap(-1, index.total_bytes), np.uint8)
    generator = np.random.default_rng(seed)
    for name, entry in index.entries.items():
        values = generator.standard_normal(entry.shape, np.float32)
        if name.endswith("norm"):
            values = np.float32(1) + values / np.float32(8)
        elif name.endswith("bias"):
            values /= 8
        else:
            values *= 0.2 if name in ("embed", "head") else entry.shape[1] ** -0.5
        view_weight(index, buffer, name)[: entry.shape[0]] = values
    return index, buffer


def view_fp32(index: WeightIndex, buffer: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """One weight without its padding, widened to fp32 (exact): for references of another implementation."""
    stored = view_weight(index, buffer, name)[: index.entries[name].shape[0]]
    if stored.dtype == np.dtype(ml_dtypes.bfloat16):
        return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return cast(NDArray[np.float32], stored)


class ThreadCommunicators:
    """The communicators of one process, by id: every rank that asks for one joins the same group."""

    def __init__(self, deadline_s: float = 30.0) -> None:
        self._deadline_s = deadline_s
        self._groups: dict[int, ThreadGroup] = {}
        self._lock = Lock()

    def __call__(self, opened: OpenDomain) -> Communicator:
        with self._lock:
            group = self._groups.get(opened.comm.id)
            if group is None:
                group = ThreadGroup(opened.tp, deadline_s=self._deadline_s, epoch=opened.epoch)
                self._groups[opened.comm.id] = group
        return group.ranks[opened.rank]


class LockstepNode:
    """`devices` workers as threads that share weights, KV arena and exchange memory. A context manager.

    `weights` are row-major (index, buffer), random by default; `arena` is uint8, for tests that look into it.
    With a `kernel_level` the workers run the native kernels on the same weights, packed and `quantised`, each
    with `threads` threads.
    """

    def __init__(
        self,
        facts: ModelFacts = TINY,
        *,
        devices: int = 9,
        dtype: DType = "fp32",
        blocks: int = 64,
        page_tokens: int = 16,
        max_tokens: int = 64,
        max_rows: int = 64,
        weights: tuple[WeightIndex, NDArray[np.uint8]] | None = None,
        kernel_level: str = "",
        quantised: WeightType = "",
        threads: int = 1,
    ) -> None:
        self.facts = facts
        self.dtype: DType = dtype
        self.index, self.weights = weights or random_weights(facts, 0, dtype)
        if kernel_level:
            self.index, self.weights = pack_weights(facts, self.index, self.weights, quantised)
        self.spec = KVSpec.of(facts, page_tokens, dtype)
        pages = blocks * facts.kv_heads
        self.arena = torch.zeros(pages * self.spec.page_bytes, dtype=torch.uint8)
        self.arena_facts = ArenaFacts(pages, page_tokens, dtype)
        packed = bool(kernel_level)
        self._slot_bytes = exchange_slot_bytes(facts, dtype, max_tokens, max_rows, devices, packed=packed)
        self._exchange = mmap.mmap(-1, _SLOTS * self._slot_bytes)
        words = mmap.mmap(-1, bytes_needed(_SLOTS, devices))
        # The native kernels meet through the real communicator; torch's ranks need no native extension.
        self.control: ControlBlock = (open_control if packed else PlainControlBlock)(words, _SLOTS, devices)
        self._communicators = ThreadCommunicators()
        self._opened = 0
        start = WorkerStart(
            facts=facts,
            dtype=dtype,
            index=self.index,
            arena=self.arena_facts,
            device=0,
            devices=devices,
            incarnation=1,
            cores=(),
            max_tokens=max_tokens,
            max_rows=max_rows,
            comm_slots=_SLOTS,
            deadline_s=30.0,
            spin=0,
            kernel_level=kernel_level,
            threads=threads,
        )
        self.workers = [self._worker(msgspec.structs.replace(start, device=d)) for d in range(devices)]
        self.threads = [
            ThreadPoolExecutor(1, f"device-{device}", initializer=torch.set_num_threads, initargs=(1,))
            for device in range(devices)
        ]

    def open(self, tp: int, devices: Sequence[int] | None = None) -> LockstepDomain:
        """A proven domain on `devices` (by default the first ones)."""
        members = tuple(devices if devices is not None else range(tp))
        self._opened += 1
        return LockstepDomain(self, self._opened, tp, members)

    def handle(self, bodies: Mapping[int, Body]) -> dict[int, list[Body]]:
        """Give each device its message, at once; the answers when all are done."""
        futures = {
            device: self.threads[device].submit(self.workers[device].handle, body)
            for device, body in bodies.items()
        }
        return {device: future.result() for device, future in futures.items()}

    def hello(self, device: int) -> WorkerHello:
        """What a worker's process would say first."""
        return WorkerHello(device, 1, os.getpid())

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()

    def __enter__(self) -> LockstepNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _worker(self, start: WorkerStart) -> WorkerCore:
        size, region = self._slot_bytes, communicator_bytes(start.devices)
        exchange = torch.from_numpy(np.frombuffer(self._exchange, np.uint8))
        shared = SharedMemoryFactory(start, self._exchange, size, self.control)
        return WorkerCore(
            start,
            torch.from_numpy(self.weights),
            self.arena,
            payload=lambda slot: exchange[slot * size + region : (slot + 1) * size],
            communicator=shared if start.kernel_level else self._communicators,
            control=self.control,
        )


class LockstepDomain:
    """One domain of a `LockstepNode`; every step runs on all ranks before it returns.

    The epoch, and the id of its communicator, is the node's count of domains.
    """

    def __init__(self, node: LockstepNode, epoch: int, tp: int, members: tuple[int, ...]) -> None:
        self.node, self.epoch, self.tp, self.members = node, epoch, tp, members
        self._step = 0
        handle = CommHandle(epoch, epoch % _SLOTS)
        node.control.set_control(epoch % _SLOTS, epoch, ControlState.LIVE)
        self.opened = self.send(
            *(
                OpenDomain(epoch, "", tp, rank, members, handle, control_slot=epoch % _SLOTS)
                for rank in range(tp)
            )
        )
        self.send(*(ProveDomain(epoch, 0) for _ in members))

    def step(
        self, rows: Sequence[RowStep] = (), new: Sequence[NewRow] = (), gone: Sequence[int] = ()
    ) -> StepResult:
        """Run one plan on every rank; rank 0's result. Raises `DomainError` when a rank left the domain."""
        self._step += 1
        plan = StepPlan(self.epoch, self._step, tuple(rows), tuple(new), tuple(gone))
        return cast(StepResult, self.send(*(plan for _ in self.members))[0])

    def close(self) -> None:
        self.send(*(CloseDomain(self.epoch) for _ in self.members))

    def send(self, *bodies: Body) -> list[Body]:
        """One message to each rank; the answers in rank order. Raises `DomainError` for a `DomainBroken`."""
        answers = self.node.handle(dict(zip(self.members, bodies, strict=True)))
        flat = [answer for device in self.members for answer in answers[device]]
        broken = [answer for answer in flat if isinstance(answer, DomainBroken)]
        if broken:
            raise DomainError("; ".join(f"rank {b.rank}: {b.error}" for b in broken))
        return flat
