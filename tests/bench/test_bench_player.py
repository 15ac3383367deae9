"""Who is sent when: open loop, conversations, closed loop. On a clock turned by hand."""

from __future__ import annotations

import asyncio

from dynamictp.bench.player import run_closed, run_schedule
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.clock import ManualClock


class World:
    """Virtual time: sleeping moves it once every task that could run has run. Owns clock and sleepers."""

    def __init__(self, service_s: float = 0.0) -> None:
        self.clock = ManualClock()
        self.sent: list[tuple[str, float, float]] = []
        self.failing: set[str] = set()
        self.running = 0
        self.most = 0
        self._service_s = service_s
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self.clock.now() + seconds, woken))
        while not woken.is_set():
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            first_s, first = min(self._sleepers, key=lambda sleeper: sleeper[0])
            if first is woken:
                for _ in range(20):
                    await asyncio.sleep(0)
                if min(self._sleepers, key=lambda sleeper: sleeper[0])[1] is not woken:
                    continue
                self.clock.advance(max(first_s - self.clock.now(), 0.0))
                self._sleepers.remove((first_s, first))
                woken.set()

    async def send(self, request: Request, intended_s: float) -> Result:
        sent_s = self.clock.now()
        self.sent.append((request.name, intended_s, sent_s))
        self.running += 1
        self.most = max(self.most, self.running)
        if self._service_s:
            await self.sleep(self._service_s)
        self.running -= 1
        failure = Failure(FailureKind.TIMEOUT, "late") if request.name in self.failing else None
        return Result(request, intended_s, sent_s, self.clock.now(), failure=failure)


def conversation(name: str, at_s: float, turns: int, think_s: float = 1.0) -> list[Request]:
    names = [f"{name}{i}" for i in range(turns)]
    return [
        Request(at_s, "x", 1, name=own, follows=names[i - 1] if i else "", think_s=think_s if i else 0.0)
        for i, own in enumerate(names)
    ]


async def test_later_turns_are_due_after_their_think_time_and_hold_nobody_up() -> None:
    world = World(service_s=2.0)
    schedule = [*conversation("a", 0.0, 3), *conversation("b", 1.0, 1)]
    results = await run_schedule(schedule, world, world.clock, sleep=world.sleep)
    assert world.sent == [("a0", 0.0, 0.0), ("b0", 1.0, 1.0), ("a1", 3.0, 3.0), ("a2", 6.0, 6.0)]
    assert [r.intended_s for r in results] == [0.0, 1.0, 3.0, 6.0]


async def test_a_failed_turn_ends_its_conversation() -> None:
    world = World()
    world.failing = {"a1"}
    await run_schedule(conversation("a", 0.0, 4), world, world.clock, sleep=world.sleep)
    assert [name for name, *_ in world.sent] == ["a0", "a1"]


async def test_nothing_is_sent_after_the_stop() -> None:
    world = World(service_s=2.0)
    schedule = [*conversation("a", 0.0, 3), *conversation("late", 5.0, 1)]
    await run_schedule(schedule, world, world.clock, origin_s=0.0, stop_s=4.0, sleep=world.sleep)
    assert [name for name, *_ in world.sent] == ["a0", "a1"]


async def test_users_of_a_closed_loop_wait_for_answers_and_think() -> None:
    world = World(service_s=1.0)
    schedule = [Request(0.0, "x", 1, name=f"r{i}") for i in range(6)]
    await run_closed(schedule, world, world.clock, users=2, think_s=0.5, sleep=world.sleep)
    assert world.most == 2
    assert [due for _, due, _ in world.sent] == [0.0, 0.0, 1.5, 1.5, 3.0, 3.0]
    assert [name for name, *_ in world.sent] == [f"r{i}" for i in range(6)]


async def test_a_closed_loop_ends_with_the_load() -> None:
    world = World(service_s=1.0)
    schedule = [Request(0.0, "x", 1, name=f"r{i}") for i in range(100)]
    results = await run_closed(
        schedule, world, world.clock, users=3, think_s=0.0, stop_s=2.5, sleep=world.sleep
    )
    assert len(results) == 9
