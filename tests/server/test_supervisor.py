"""Workers that can't be started: tried again, and no lease's end is lost over it. The processes are fakes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from dynamictp.clock import SystemClock
from dynamictp.config import build_config
from dynamictp.errors import ResourceError
from dynamictp.messages import Body, WorkerGone, WorkerStarted
from dynamictp.server import crash_budget, supervisor
from dynamictp.server.child import Spawner
from dynamictp.server.plan import plan_node
from dynamictp.server.supervisor import Supervisor
from dynamictp.server.worker_pool import WorkerPool
from tests.server.server_stack import facts


class Pool:
    """The worker pool of a machine that refuses the next `refuses` processes."""

    def __init__(self) -> None:
        self.lives = [1, 1]
        self.refuses = 0
        self.begun: list[int] = []
        self.reaps = True
        """What is killed is over at once."""
        self.spares = 0

    @property
    def incarnations(self) -> tuple[int, ...]:
        return tuple(self.lives)

    def begin(self, device: int, engine: int) -> int:
        if self.refuses:
            self.refuses -= 1
            raise ResourceError(f"can't start worker {device}: Resource temporarily unavailable")
        self.begun.append(device)
        self.lives[device] = 1 + len(self.begun)
        return self.lives[device]

    def go(self, device: int) -> None: ...

    def kill(self, device: int, incarnation: int) -> None:
        if self.reaps:
            self.lives[device] = 0

    def keep_spare(self) -> None:
        self.spares += 1


class User:
    layout = "tp1"

    def __init__(self) -> None:
        self.told: list[Body] = []

    def send(self, body: Body) -> bool:
        self.told.append(body)
        return True


@pytest.fixture
async def kept(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Supervisor, Pool, User]]:
    """A supervisor that keeps two workers alive, with short pauses."""
    monkeypatch.setattr(crash_budget, "PAUSE_S", 0.001)
    monkeypatch.setattr(supervisor, "SPARE_DELAY_S", 0.0)
    config = build_config({"crash_budget": 3, "devices": 2})
    plan = plan_node(config, facts(), 1 << 20, cores=(0, 1), available_bytes=1 << 34, communicators=True)
    made, pool, user = Supervisor(config, plan, cast(Any, None)), Pool(), User()
    made._pool, made._user = cast(Any, pool), cast(Any, user)
    yield made, pool, user
    made._pool = None
    await made.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_worker_that_can_t_be_woken_is_tried_again(kept: tuple[Supervisor, Pool, User]) -> None:
    made, pool, user = kept
    made.sleep(1)
    assert (pool.lives, list(made.asleep)) == ([1, 0], [1])
    pool.refuses = 2
    made.wake(1)
    assert (pool.begun, list(made.asleep)) == ([], [])
    await until(lambda: pool.begun)
    assert (pool.begun, user.told) == ([1], [WorkerStarted(1, 2)])
    await until(lambda: pool.spares)
    assert not made.failed.done()


async def test_one_that_can_never_be_woken_ends_the_server(kept: tuple[Supervisor, Pool, User]) -> None:
    made, pool, _ = kept
    made.sleep(1)
    pool.refuses = 1000
    made.wake(1)
    async with asyncio.timeout(10):
        error = await made.failed
    assert "can't start worker 1" in str(error)
    assert pool.refuses == 1000 - 4  # the budget of 3, and the one beyond it


async def test_a_lease_that_comes_and_goes_in_the_pause_leaves_one_worker(
    kept: tuple[Supervisor, Pool, User],
) -> None:
    made, pool, _ = kept
    made.sleep(1)
    pool.refuses = 1
    made.wake(1)
    made.sleep(1)
    await asyncio.sleep(0.01)
    assert pool.begun == []
    pool.refuses = 1
    made.wake(1)
    made.sleep(1)
    made.wake(1)
    await asyncio.sleep(0.01)
    assert pool.begun == [1]


async def test_a_worker_that_is_woken_before_it_is_gone_did_not_crash(
    kept: tuple[Supervisor, Pool, User],
) -> None:
    made, pool, user = kept
    pool.reaps = False
    crashes: list[str] = []
    made.on_crash = crashes.append
    for count in range(1, 6):  # the budget is 3
        life = pool.lives[1]
        made.sleep(1)
        made.wake(1)
        assert len(pool.begun) == count - 1
        pool.lives[1] = 0
        made._on_worker_ended(1, life, -9, 0.1)
        await asyncio.sleep(0)
        assert pool.begun == [1] * count
    assert [type(body) for body in user.told] == [WorkerGone, WorkerStarted] * 5
    assert crashes == []
    assert not made.failed.done()


async def test_a_worker_that_is_asleep_stays_away_when_it_is_gone(
    kept: tuple[Supervisor, Pool, User],
) -> None:
    made, pool, user = kept
    pool.reaps = False
    for again in (made.wake, made.sleep):
        made.sleep(1)
        again(1)
    pool.lives[1] = 0
    made._on_worker_ended(1, 1, -9, 60.0)
    await asyncio.sleep(0.01)
    assert (pool.begun, [type(body) for body in user.told]) == ([], [WorkerGone])
    made.wake(1)
    assert pool.begun == [1]
    # Its next life is one like any other.
    pool.lives[1] = 0
    made._on_worker_ended(1, 2, -9, 60.0)
    await until(lambda: len(pool.begun) == 2)


async def test_a_device_that_is_released_in_the_pause_after_a_crash_gets_no_worker(
    kept: tuple[Supervisor, Pool, User],
) -> None:
    made, pool, _ = kept
    pool.lives[1] = 0
    made._on_worker_ended(1, 1, -9, 0.1)
    made.sleep(1)
    await asyncio.sleep(0.01)
    assert pool.begun == []
    made.wake(1)
    assert pool.begun == [1]


async def test_a_crash_is_replaced_as_soon_as_the_machine_lets_it_start(
    kept: tuple[Supervisor, Pool, User],
) -> None:
    made, pool, _ = kept
    pool.lives[0], pool.refuses = 0, 1
    made._on_worker_ended(0, 1, -9, 60.0)
    await until(lambda: pool.begun)
    assert pool.begun == [0]
    assert not made.failed.done()


async def test_the_machine_has_no_descriptors_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawner = Spawner()
    pool = WorkerPool(
        cast(Any, None), devices=1, folder=tmp_path, descriptors={}, spawner=spawner, clock=SystemClock(),
        on_ended=lambda *_: None,
    )  # fmt: skip

    def pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(ResourceError, match="can't start worker 0: Too many open files"):
        pool.begin(0, 1)
    pool.keep_spare()  # goes without
    assert pool.children == []
    spawner.close()
