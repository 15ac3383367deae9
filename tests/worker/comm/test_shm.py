"""What only the shared-memory communicator promises, with threads as ranks."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import numpy as np
import pytest

from dynamictp import native
from dynamictp.errors import CommunicatorBroken, ResourceError
from dynamictp.worker.comm.control import ControlState, WorkerState, bytes_needed, open_control
from dynamictp.worker.comm.shm import ShmCommunicator, default_spin, region_bytes
from tests.worker.comm.comm_harness import (
    EPOCH,
    REGION_OFFSET,
    SLOT,
    needs_native,
    open_domain,
    poll,
    shared_memory,
)

pytestmark = needs_native


def open_rank(memory: object, size: int, rank: int = 0, world: int = 2, **changes: object) -> ShmCommunicator:
    arguments = {"slot": 0, "epoch": 1, "progress_worker": 0, "deadline_s": 1.0, "spin": 0} | changes
    control = open_control(shared_memory(bytes_needed(1, 1)), 1, 1)
    control.set_control(0, 1, ControlState.LIVE)
    return ShmCommunicator(memory, 0, size, rank, world, control=control, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("spin", [0, 2**32 - 1])
def test_engine_revokes_a_domain_by_its_control_word(spin: int) -> None:
    """Whether waiters poll or sleep, and whether the epoch is aborted or replaced."""
    for epoch, state in [
        (EPOCH, ControlState.ABORTED),
        (EPOCH, ControlState.FREE),
        (EPOCH + 1, ControlState.LIVE),
    ]:
        with open_domain("shm", 3, spin=spin) as domain:
            waiting = domain.start(lambda end: end.barrier(), ranks=[0, 1])
            assert domain.control is not None
            domain.control.set_control(SLOT, epoch, state)
            for future in waiting:
                assert isinstance(future.exception(timeout=10), CommunicatorBroken)
            assert domain.control.control(SLOT) == (epoch, state)


def test_abort_by_a_rank_leaves_a_newer_epoch_alone() -> None:
    with open_domain("shm", 2) as domain:
        assert domain.control is not None
        domain.control.set_control(SLOT, EPOCH + 1, ControlState.LIVE)
        domain.ranks[0].abort()
        assert domain.control.control(SLOT) == (EPOCH + 1, ControlState.LIVE)


def test_a_waiter_publishes_that_it_waits() -> None:
    with open_domain("shm", 2) as domain:
        control = domain.control
        assert control is not None
        control.set_progress(0, 41, 3, WorkerState.COMPUTING)
        waiting = domain.start(lambda end: end.barrier(), ranks=[0])
        poll(lambda: control.progress(0)[:3] == (41, 3, WorkerState.WAITING))
        domain.run(lambda end: end.barrier(), ranks=[1])
        waiting[0].result(timeout=10)
        assert control.progress(0)[:3] == (41, 3, WorkerState.COMPUTING)


def test_a_sleeper_publishes_computing_after_an_abort() -> None:
    with open_domain("shm", 2) as domain:
        control = domain.control
        assert control is not None
        waiting = domain.start(lambda end: end.barrier(), ranks=[0])
        poll(lambda: control.progress(0)[2] == WorkerState.WAITING and control.progress(0)[3] > 0.005)
        domain.ranks[1].abort()
        assert waiting[0].exception(timeout=10) is not None
        assert control.progress(0)[2] == WorkerState.COMPUTING


def test_sleepers_are_woken_by_the_last_arrival() -> None:
    """Without a wake-up each round would take a slice of the sleep (10 ms)."""
    rounds = 30
    with open_domain("shm", 3) as domain:
        control = domain.control
        assert control is not None
        delays = []
        for _ in range(rounds):
            waiting = domain.start(lambda end: end.barrier(), ranks=[0, 1])
            poll(lambda: all(control.progress(w)[2] == 2 and control.progress(w)[3] > 0.002 for w in (0, 1)))
            start = time.monotonic()
            domain.ranks[2].barrier()
            for future in waiting:
                future.result(timeout=10)
            delays.append(time.monotonic() - start)
        assert sorted(delays)[rounds // 2] < 0.006


def test_a_signal_handler_that_raises_ends_the_wait() -> None:
    class Alarm(Exception):
        pass

    def ring(signum: int, frame: FrameType | None) -> None:
        raise Alarm

    assert threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGUSR1, ring)
    try:
        with open_domain("shm", 2) as domain:
            control = domain.control
            assert control is not None

            def kick() -> None:
                poll(lambda: control.progress(0)[2] == WorkerState.WAITING)
                signal.raise_signal(signal.SIGUSR1)

            kicker = threading.Thread(target=kick)
            kicker.start()
            with pytest.raises(Alarm):
                domain.ranks[0].barrier()
            kicker.join()
            assert domain.ranks[0].state == "broken"
            assert control.control(SLOT) == (EPOCH, ControlState.ABORTED)
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_all_gather_reads_the_region_without_a_copy() -> None:
    with open_domain("shm", 2, payload_bytes=256) as domain:
        parts = domain.run(lambda end: end.all_gather(np.full(8, end.rank, np.uint8)))
        assert all(np.array_equal(part, [[0] * 8, [1] * 8]) for part in parts)
        assert all(part.base is not None for part in parts)
        with pytest.raises(ValueError, match="256 per rank"):
            domain.ranks[0].all_gather(np.zeros(257, np.uint8))


def test_regions_of_another_shape_are_refused() -> None:
    size = region_bytes(3, 100)
    memory = shared_memory(size)
    assert open_rank(memory, size, world=3).payload_bytes == 128
    with pytest.raises(ValueError, match="of 3 ranks"):
        open_rank(memory, size, world=2)
    with pytest.raises(ValueError, match="bytes"):
        open_rank(memory, size - 64, world=3)
    with pytest.raises(ValueError, match="needed"):
        open_rank(shared_memory(64), 64)
    with pytest.raises(ValueError, match="needed"):
        open_rank(memory, size + 64)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rank": 2}, ValueError),
        ({"deadline_s": 0.0}, ValueError),
        ({"epoch": 1 << 56}, ValueError),
        ({"slot": 1}, IndexError),
        ({"progress_worker": 1}, IndexError),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, object], error: type[Exception]) -> None:
    size = region_bytes(2, 64)
    with pytest.raises(error):
        open_rank(shared_memory(size), size, **changes)  # type: ignore[arg-type]


def test_the_mapping_can_be_closed_after_close() -> None:
    size = region_bytes(2, 64)
    memory = shared_memory(size)
    end = open_rank(memory, size)
    with pytest.raises(BufferError):
        memory.close()
    end.close()
    memory.close()
    end.abort()
    with pytest.raises(CommunicatorBroken, match="closed"):
        end.barrier()
    with pytest.raises(CommunicatorBroken, match="closed"):
        end.all_gather(np.zeros(8, np.uint8))


def test_no_extension_no_shared_memory_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.NO_NATIVE_ENV, "1")
    assert native.load() is None
    with pytest.raises(ResourceError, match="only tp1"):
        open_rank(shared_memory(REGION_OFFSET), REGION_OFFSET)


def test_spin_only_when_every_rank_has_a_core() -> None:
    assert default_spin(1) > 0
    assert default_spin(1 << 20) == 0
