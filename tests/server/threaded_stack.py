"""The stack of `server_stack` on a port, in an event loop of its own thread: for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.server.planned_stack import planned
from tests.server.server_stack import Stack, on_port, running_stack

_T = TypeVar("_T")


@dataclass
class Threaded:
    url: str
    stack: Stack
    loop: asyncio.AbstractEventLoop

    def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition, looked at in the server's loop, holds."""

        async def poll() -> None:
            async with asyncio.timeout(30):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

        self.do(poll())

    def do(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Have the server's loop do it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


@asynccontextmanager
async def _planned(**engine: Any) -> AsyncIterator[Stack]:
    async with planned(**engine) as (stack, _):
        yield stack


@contextmanager
def threaded_stack(*, planner: bool = False, **engine: Any) -> Iterator[Threaded]:
    """With a planner: in dynamic mode. The other arguments are those of the fake engine."""
    up, done = threading.Event(), asyncio.Event()
    running: list[Threaded] = []

    async def serve() -> None:
        running_in = _planned(**engine) if planner else running_stack(**engine)
        async with running_in as stack, on_port(stack) as url:
            running.append(Threaded(url, stack, asyncio.get_running_loop()))
            up.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="stack")
    thread.start()
    assert up.wait(30)
    try:
        yield running[0]
    finally:
        running[0].loop.call_soon_threadsafe(done.set)
        thread.join(30)
    assert not thread.is_alive()
