"""Control words of domains and progress words of workers, in memory shared by server, engine and workers.

The engine revokes a domain by writing its control word: (epoch, state). Workers read it at dequeue and in
every wait. Each worker publishes its progress: (plan, layer, state) and when that last changed.
"""

from __future__ import annotations

import enum
import time
from typing import Any, NamedTuple, Protocol, cast

from dynamictp import native

_LINE_BYTES = 64
_LINE_WORDS = 8
_READ_TRIES = 100


class ControlState(enum.IntEnum):
    """State of a domain's control word."""

    FREE = 0
    LIVE = 1
    ABORTED = 2


class WorkerState(enum.IntEnum):
    """What a worker's thread does: nothing, compute, or wait for its peers inside a collective."""

    IDLE = 0
    COMPUTING = 1
    WAITING = 2


class Progress(NamedTuple):
    """A worker's progress word, as `ControlBlock.progress` returns it (a plain tuple there)."""

    plan: int
    layer: int
    state: int
    age_s: float


class ControlBlock(Protocol):
    """`slots` control words and `workers` progress words. Indices out of range raise `IndexError`.

    A control word has any number of writers; a progress word has one: the thread that executes the worker's
    plans.
    """

    def set_control(self, slot: int, epoch: int, state: int) -> None:
        """Publish (epoch, `ControlState`) and wake the domain's sleeping waiters."""

    def control(self, slot: int) -> tuple[int, int]:
        """(epoch, `ControlState`)."""

    def set_progress(self, worker: int, plan: int, layer: int, state: int) -> None:
        """Publish (plan, layer, `WorkerState`) and the time of the change."""

    def progress(self, worker: int) -> tuple[int, int, int, float]:
        """(plan, layer, `WorkerState`, seconds since the last change; 0.0 before the first)."""

    def progress_address(self, worker: int) -> int:
        """Address of the progress word, for a native step that writes it for every layer; valid while this
        object lives. 0 where there is no native code.
        """


def bytes_needed(slots: int, workers: int) -> int:
    """Size of a control block: a cache line for each word."""
    return (slots + workers) * _LINE_BYTES


def open_control(buffer: Any, slots: int, workers: int) -> ControlBlock:
    """The control block at the start of `buffer` (a writable shared mapping, zeros when new).

    Native when the extension is there, else `PlainControlBlock`, which lies in memory in the same way.
    """
    module = native.load()
    if module is None:
        return PlainControlBlock(buffer, slots, workers)
    return cast(ControlBlock, module.ControlBlock(buffer, slots, workers))


class PlainControlBlock:
    """The control block in pure Python, for tp1 without the native extension: it wakes nobody.

    Aligned 64-bit words are written and read whole by the interpreter's memoryview; a progress word is
    three of them under a sequence lock, as in the native one.
    """

    def __init__(self, buffer: Any, slots: int, workers: int) -> None:
        size = bytes_needed(slots, workers)
        view = memoryview(buffer)
        if view.readonly or view.nbytes < size:
            raise ValueError(f"expected a writable buffer of at least {size} bytes")
        self._words = view.cast("B")[:size].cast("Q")
        self._slots = slots
        self._workers = workers

    def set_control(self, slot: int, epoch: int, state: int) -> None:
        self._words[self._slot(slot)] = epoch << 8 | ControlState(state)

    def control(self, slot: int) -> tuple[int, int]:
        word = self._words[self._slot(slot)]
        return word >> 8, word & 0xFF

    def set_progress(self, worker: int, plan: int, layer: int, state: int) -> None:
        at = self._worker(worker)
        inside = self._words[at] | 1
        self._words[at] = inside
        self._words[at + 1] = plan
        self._words[at + 2] = layer << 8 | WorkerState(state)
        self._words[at + 3] = time.monotonic_ns()
        self._words[at] = inside + 1

    def progress(self, worker: int) -> tuple[int, int, int, float]:
        at = self._worker(worker)
        for _ in range(_READ_TRIES):
            version, plan, packed, changed_ns, after = (*self._words[at : at + 4], self._words[at])
            if version % 2 == 0 and version == after:
                break
            time.sleep(0)  # a writer that lost its turn inside needs one to get out
        age_s = (time.monotonic_ns() - changed_ns) * 1e-9 if changed_ns else 0.0
        return plan, packed >> 8, packed & 0xFF, age_s

    def progress_address(self, worker: int) -> int:
        self._worker(worker)
        return 0

    def _slot(self, index: int) -> int:
        if not 0 <= index < self._slots:
            raise IndexError(
                f"the control block has {self._slots} domain slots, index {index} does not exist"
            )
        return index * _LINE_WORDS

    def _worker(self, index: int) -> int:
        if not 0 <= index < self._workers:
            raise IndexError(
                f"the control block has {self._workers} worker slots, index {index} does not exist"
            )
        return (self._slots + index) * _LINE_WORDS
