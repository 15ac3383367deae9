"""What every kind of communicator promises."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamictp.errors import CommunicatorBroken
from dynamictp.worker.comm.base import Communicator
from tests.worker.comm.comm_harness import EPOCH, KINDS, open_domain, poll

worlds = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


def contribution(seed: int, rank: int, count: int, dtype: Any) -> np.ndarray:
    values = np.random.default_rng([seed, rank]).standard_normal(count) * 10.0 ** (rank % 3)
    return values.astype(dtype)


def expected_sum(seed: int, world: int, count: int, dtype: Any) -> np.ndarray:
    total = contribution(seed, 0, count, dtype).astype(np.float32)
    for rank in range(1, world):
        total += contribution(seed, rank, count, dtype).astype(np.float32)
    return total.astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@settings(max_examples=20)
@given(world=worlds, count=st.integers(0, 300), payload_bytes=st.sampled_from([64, 320, 4096]), seed=seeds)
def test_all_reduce_sums_in_rank_order(
    kind: str, dtype: Any, *, world: int, count: int, payload_bytes: int, seed: int
) -> None:
    """Equal bits on every rank, larger than the region or not."""

    def body(end: Communicator) -> bytes:
        own = contribution(seed, end.rank, count, dtype)
        end.all_reduce(own)
        return own.tobytes()

    with open_domain(kind, world, payload_bytes=payload_bytes) as domain:
        expected = expected_sum(seed, world, count, dtype).tobytes()
        assert domain.run(body) == [expected] * world


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    world=worlds,
    operations=st.lists(st.sampled_from(["barrier", "gather", "reduce", "broadcast"]), max_size=30),
)
def test_any_sequence_of_operations(kind: str, world: int, operations: list[str]) -> None:
    """One barrier per operation is enough: no rank sees a slot that was overwritten for a later operation."""

    def body(end: Communicator) -> None:
        for step, name in enumerate(operations):
            own = np.full(33, step * 16 + end.rank, np.float32)
            if name == "barrier":
                end.barrier()
            elif name == "gather":
                parts = end.all_gather(own)
                assert parts.shape == (world, own.nbytes)
                for rank in range(world):
                    assert np.all(np.frombuffer(parts[rank].tobytes(), np.float32) == step * 16 + rank)
            elif name == "reduce":
                end.all_reduce(own)
                assert np.all(own == sum(step * 16 + rank for rank in range(world)))
            else:
                end.broadcast(own, step % world)
                assert np.all(own == step * 16 + step % world)

    with open_domain(kind, world) as domain:
        assert domain.run(body) == [None] * world


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "rounds"), [(2, 4000), (5, 1500)])
def test_barrier_orders_plain_memory_under_skew(kind: str, world: int, rounds: int) -> None:
    """More ranks than cores, random delays: nobody leaves a barrier before everybody wrote."""
    written = np.zeros(world, np.int64)

    def body(end: Communicator) -> None:
        random = np.random.default_rng(end.rank)
        for step in range(1, rounds + 1):
            if random.random() < 0.01:
                time.sleep(random.random() * 2e-3)
            written[end.rank] = step
            end.barrier()
            seen = written.copy()
            assert np.all(seen >= step)
            assert np.all(seen <= step + 1)

    with open_domain(kind, world) as domain:
        assert domain.run(body) == [None] * world


@pytest.mark.parametrize("kind", KINDS)
def test_abort_releases_every_waiter_at_once(kind: str) -> None:
    delays = []
    for _ in range(3):
        with open_domain(kind, 4) as domain:
            waiting = domain.start(lambda end: end.barrier(), ranks=[0, 1, 2])
            # Long enough that the waiters sleep: being early would only make the test easier.
            asleep_at = time.monotonic() + 0.02
            poll(lambda at=asleep_at: time.monotonic() > at)
            assert not any(future.done() for future in waiting)
            start = time.monotonic()
            domain.ranks[3].abort()
            errors = [future.exception(timeout=10) for future in waiting]
            delays.append(time.monotonic() - start)
            assert all(isinstance(error, CommunicatorBroken) for error in errors)
            assert all("aborted" in str(error) and "missing ranks: 3" in str(error) for error in errors)
            assert [end.state for end in domain.ranks[:3]] == ["broken"] * 3
            with pytest.raises(CommunicatorBroken):
                domain.ranks[3].barrier()
            assert domain.ranks[3].state == "broken"
    assert min(delays) < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_deadline_names_the_missing_ranks(kind: str) -> None:
    with open_domain(kind, 5, deadline_s=0.1) as domain:
        start = time.monotonic()
        errors = domain.run(lambda end: end.all_reduce(np.zeros(4, np.float32)), ranks=[0, 2, 4])
        assert time.monotonic() - start >= 0.1
        for error in errors:
            assert isinstance(error, CommunicatorBroken)
            assert "missing ranks: 1, 3" in str(error)
            assert "all_reduce" in str(error)
        assert "deadline of 0.1" in " ".join(map(str, errors))
        with pytest.raises(CommunicatorBroken):  # the late rank learns at once
            domain.ranks[1].barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_disagree_break_by_name(kind: str) -> None:
    def body(end: Communicator) -> None:
        if end.rank == 1:
            end.broadcast(np.zeros(4, np.float32), 0)
        else:
            end.all_reduce(np.zeros(4, np.float32))

    with open_domain(kind, 2) as domain:
        errors = domain.run(body)
        assert all(isinstance(error, CommunicatorBroken) for error in errors)
        named = [str(error) for error in errors if "while" in str(error)]
        assert named
        assert all("broadcast" in text and "all_reduce" in text for text in named)


@pytest.mark.parametrize("kind", KINDS)
def test_states(kind: str) -> None:
    with open_domain(kind, 2) as domain:
        assert [end.state for end in domain.ranks] == ["new", "new"]
        domain.run(lambda end: end.barrier())
        assert [end.state for end in domain.ranks] == ["ready", "ready"]
        domain.ranks[0].close()
        domain.ranks[0].close()
        assert domain.ranks[0].state == "closed"
        with pytest.raises(CommunicatorBroken, match="closed"):
            domain.ranks[0].barrier()
        with pytest.raises(CommunicatorBroken):
            domain.ranks[0].reset(EPOCH + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_parked_communicator_is_reused_in_a_new_epoch(kind: str) -> None:
    with open_domain(kind, 3) as domain:

        def serve(end: Communicator) -> float:
            own = np.full(8, end.rank + 1, np.float32)
            for _ in range(5):
                end.barrier()
            end.all_reduce(own)
            return float(own[0])

        for epoch in range(EPOCH + 1, EPOCH + 5):
            assert domain.run(serve) == [6.0] * 3
            for end in domain.ranks:
                end.reset(epoch)
                assert end.state == "new"
            if domain.control is not None:
                domain.control.set_control(1, epoch, 1)
        assert domain.run(serve) == [6.0] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_reset_is_refused_inside_an_operation_and_after_an_abort(kind: str) -> None:
    with open_domain(kind, 2) as domain:
        (waiting,) = domain.start(lambda end: end.barrier(), ranks=[0])

        def refused() -> bool:
            try:
                domain.ranks[0].reset(EPOCH)
            except RuntimeError:
                return True
            return False

        poll(refused)
        with pytest.raises(RuntimeError, match="another operation"):
            domain.ranks[0].barrier()
        domain.ranks[1].abort()
        assert isinstance(waiting.exception(timeout=10), CommunicatorBroken)
        with pytest.raises(CommunicatorBroken):
            domain.ranks[0].reset(EPOCH + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_close_aborts_an_operation_that_still_runs(kind: str) -> None:
    with open_domain(kind, 2, deadline_s=20) as domain:
        waiting = domain.start(lambda end: end.barrier(), ranks=[0])

        def close_when_inside() -> bool:
            try:
                domain.ranks[0].reset(EPOCH)
            except RuntimeError:
                domain.ranks[0].close()
                return True
            return False

        poll(close_when_inside)
        assert isinstance(waiting[0].exception(timeout=10), CommunicatorBroken)
        assert domain.ranks[0].state == "closed"


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_checked_before_anyone_waits(kind: str) -> None:
    with open_domain(kind, 2) as domain:
        end = domain.ranks[0]
        with pytest.raises(ValueError, match="contiguous"):
            end.all_reduce(np.zeros((4, 4), np.float32)[:, :2])
        with pytest.raises(ValueError, match="float32 and bfloat16"):
            end.all_reduce(np.zeros(4, np.float64))
        with pytest.raises(ValueError, match="root"):
            end.broadcast(np.zeros(4, np.float32), 2)
        frozen = np.zeros(4, np.float32)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            end.broadcast(frozen, 0)
        with pytest.raises(TypeError, match="list"):
            end.all_gather([1.0])  # type: ignore[arg-type]
        assert end.state == "new"


@pytest.mark.parametrize("kind", KINDS)
def test_every_bf16_value_is_rounded_as_ml_dtypes_does(kind: str) -> None:
    """Every bf16 pattern plus one value: infinities, NaNs and subnormals too."""
    patterns = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    offset = np.full(2**16, 1.0039, ml_dtypes.bfloat16)

    def body(end: Communicator) -> np.ndarray:
        own = patterns.copy() if end.rank == 0 else offset.copy()
        end.all_reduce(own)
        return own

    with np.errstate(all="ignore"):
        expected = (patterns.astype(np.float32) + offset.astype(np.float32)).astype(ml_dtypes.bfloat16)
        with open_domain(kind, 2, payload_bytes=1 << 14) as domain:
            for result in domain.run(body):
                numbers = ~np.isnan(expected.astype(np.float32))
                assert np.array_equal(result.view(np.uint16)[numbers], expected.view(np.uint16)[numbers])
                assert np.all(np.isnan(result.astype(np.float32)[~numbers]))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors(kind: str) -> None:
    torch = pytest.importorskip("torch")

    def body(end: Communicator) -> Any:
        own = torch.full((3, 5), 0.5 + end.rank, dtype=torch.bfloat16)
        end.all_reduce(own)
        parts = torch.from_numpy(end.all_gather(own)).clone()
        assert parts.view(torch.bfloat16).reshape(2, 3, 5).eq(2.0).all()
        with pytest.raises(ValueError, match="contiguous"):
            end.all_reduce(own.t())
        return own

    with open_domain(kind, 2) as domain:
        for result in domain.run(body):
            assert torch.equal(result, torch.full((3, 5), 2.0, dtype=torch.bfloat16))
