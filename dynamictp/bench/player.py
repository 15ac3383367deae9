"""Plays a schedule: open loop by due times, or closed loop by a number of users.

In an open loop every request leaves when due, whatever the earlier ones do, so that a stall of the
server is in the latencies of all requests due meanwhile. Later turns of a conversation are the exception:
nobody answers before having read, so they are due after the turn before them.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

from dynamictp.bench.client import Sender
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request
from dynamictp.clock import Clock
from dynamictp.process import settle_heap

Sleep = Callable[[float], Awaitable[None]]


class _Conversations:
    """Sends a request and, when it is answered, those that follow it. Owns the results."""

    def __init__(self, schedule: Iterable[Request], sender: Sender, clock: Clock, sleep: Sleep) -> None:
        self.results: list[Result] = []
        self.openings: list[Request] = []
        self._following: dict[str, list[Request]] = defaultdict(list)
        self._sender, self._clock, self._sleep = sender, clock, sleep
        for request in schedule:
            (self._following[request.follows] if request.follows else self.openings).append(request)
        self.openings.sort(key=lambda request: request.intended_s)

    async def play(self, request: Request, due_s: float, stop_s: float) -> float:
        """Returns the clock's time when the conversation was over. No turn is sent from `stop_s` on."""
        while True:
            result = await self._sender.send(request, due_s)
            self.results.append(result)
            following = self._following.get(request.name)
            if not following or result.failure is not None:
                return result.end_s
            request = following[0]
            due_s = result.end_s + request.think_s
            if due_s >= stop_s:
                return result.end_s
            await self.until(due_s)

    async def until(self, due_s: float) -> None:
        while (wait_s := due_s - self._clock.now()) > 0:
            await self._sleep(wait_s)


async def run_schedule(
    schedule: Iterable[Request],
    sender: Sender,
    clock: Clock,
    *,
    origin_s: float | None = None,
    stop_s: float = math.inf,
    sleep: Sleep = asyncio.sleep,
) -> list[Result]:
    """Plays open loop. `origin_s` is the clock's time of the schedule's 0 (default: now).

    Nothing is sent from `stop_s` of the clock on. Results come back in the order of their due times;
    what was never due (after a failed turn, after `stop_s`) has none. Cancelling it cancels every request.
    """
    origin_s = clock.now() if origin_s is None else origin_s
    conversations = _Conversations(schedule, sender, clock, sleep)
    async with asyncio.TaskGroup() as group:
        for request in conversations.openings:
            due_s = origin_s + request.intended_s
            if due_s >= stop_s:
                break
            await conversations.until(due_s)
            group.create_task(conversations.play(request, due_s, stop_s))
    return sorted(conversations.results, key=lambda result: result.intended_s)


async def run_closed(
    schedule: Iterable[Request],
    sender: Sender,
    clock: Clock,
    *,
    users: int,
    think_s: float,
    stop_s: float = math.inf,
    sleep: Sleep = asyncio.sleep,
) -> list[Result]:
    """`users` at a time each play one conversation after another, `think_s` between them.

    A request is due when its user is ready, so a slow server is asked less: good for a server's capacity,
    no measure of what users of an open service would see.
    """
    conversations = _Conversations(schedule, sender, clock, sleep)
    waiting = deque(conversations.openings)

    async def user() -> None:
        due_s = clock.now()
        while waiting and due_s < stop_s:
            request = waiting.popleft()
            await conversations.until(due_s)
            due_s = await conversations.play(request, due_s, stop_s) + think_s

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return sorted(conversations.results, key=lambda result: result.intended_s)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No pass over the schedule's objects in mid-run: a full collection stops the client for tens of ms."""
    settle_heap()
    try:
        yield
    finally:
        gc.unfreeze()
