"""Control and progress words, native and in pure Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp import native
from dynamictp.worker.comm.control import (
    ControlBlock,
    ControlState,
    PlainControlBlock,
    WorkerState,
    bytes_needed,
    open_control,
)
from tests.worker.comm.comm_harness import needs_native, poll, shared_memory

SLOTS, WORKERS = 3, 4
Opener = Callable[[Any, int, int], ControlBlock]


def open_native(buffer: Any, slots: int, workers: int) -> ControlBlock:
    block: ControlBlock = native.require().ControlBlock(buffer, slots, workers)
    return block


OPENERS = [
    pytest.param(open_native, marks=needs_native, id="native"),
    pytest.param(PlainControlBlock, id="plain"),
]


def fresh(opener: Opener) -> ControlBlock:
    return opener(shared_memory(bytes_needed(SLOTS, WORKERS)), SLOTS, WORKERS)


@pytest.mark.parametrize("opener", OPENERS)
@given(epoch=st.integers(0, 2**56 - 1), state=st.sampled_from(ControlState), slot=st.integers(0, SLOTS - 1))
def test_control_words_round_trip_and_stay_apart(
    opener: Opener, *, epoch: int, state: ControlState, slot: int
) -> None:
    block = fresh(opener)
    block.set_control(slot, epoch, state)
    for other in range(SLOTS):
        assert block.control(other) == ((epoch, state) if other == slot else (0, ControlState.FREE))


@pytest.mark.parametrize("opener", OPENERS)
def test_progress_carries_its_age(opener: Opener) -> None:
    block = fresh(opener)
    assert block.progress(2) == (0, 0, WorkerState.IDLE, 0.0)
    before = time.monotonic()
    block.set_progress(2, 2**63, 2**32 - 1, WorkerState.COMPUTING)
    plan, layer, state, age_s = block.progress(2)
    assert (plan, layer, state) == (2**63, 2**32 - 1, WorkerState.COMPUTING)
    assert 0 <= age_s <= time.monotonic() - before
    poll(lambda: block.progress(2)[3] > 0.01)
    block.set_progress(2, 2**63, 0, WorkerState.COMPUTING)
    assert block.progress(2)[3] < time.monotonic() - before
    assert block.progress(1) == (0, 0, WorkerState.IDLE, 0.0)


@pytest.mark.parametrize("opener", OPENERS)
def test_misuse_is_refused(opener: Opener) -> None:
    block = fresh(opener)
    with pytest.raises(IndexError, match="3 domain slots"):
        block.control(SLOTS)
    with pytest.raises(IndexError, match="4 worker slots"):
        block.set_progress(WORKERS, 0, 0, 0)
    with pytest.raises(ValueError, match=r"(?i)state"):
        block.set_control(0, 1, 3)
    with pytest.raises(ValueError, match="buffer"):
        opener(bytearray(8), SLOTS, WORKERS)
    with pytest.raises(ValueError, match="writable"):
        opener(bytes(4096), SLOTS, WORKERS)


@needs_native
def test_native_and_plain_lie_in_memory_in_the_same_way() -> None:
    memory = shared_memory(bytes_needed(SLOTS, WORKERS))
    assert native.require().ControlBlock.bytes_needed(SLOTS, WORKERS) == bytes_needed(SLOTS, WORKERS)
    ours, theirs = open_native(memory, SLOTS, WORKERS), PlainControlBlock(memory, SLOTS, WORKERS)
    ours.set_control(1, 5, ControlState.LIVE)
    assert theirs.control(1) == (5, ControlState.LIVE)
    theirs.set_control(2, 9, ControlState.ABORTED)
    assert ours.control(2) == (9, ControlState.ABORTED)
    ours.set_progress(3, 11, 4, WorkerState.WAITING)
    assert theirs.progress(3)[:3] == (11, 4, WorkerState.WAITING)
    theirs.set_progress(0, 12, 6, WorkerState.COMPUTING)
    assert ours.progress(0)[:3] == (12, 6, WorkerState.COMPUTING)
    assert 0 <= ours.progress(0)[3] < 60


def test_open_control_works_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.NO_NATIVE_ENV, "1")
    block = open_control(shared_memory(bytes_needed(1, 1)), 1, 1)
    assert isinstance(block, PlainControlBlock)


@pytest.mark.parametrize("opener", OPENERS)
def test_a_reader_never_sees_half_a_progress(opener: Opener) -> None:
    block = fresh(opener)
    done = threading.Event()

    def write() -> None:
        for number in range(1, 20_000):
            block.set_progress(0, number, number, number % 3)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        plan, layer, state, _ = block.progress(0)
        assert plan == layer
        assert state == plan % 3
    writer.join()


@needs_native
def test_memory_stays_mapped_while_native_code_points_into_it() -> None:
    memory = shared_memory(bytes_needed(SLOTS, WORKERS))
    block = open_native(memory, SLOTS, WORKERS)
    with pytest.raises(BufferError):
        memory.close()
    del block
    memory.close()
