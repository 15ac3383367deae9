"""The stack of `server_stack` on a port, in an event loop of its own thread: for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.server.server_stack import Stack, on_port, running_stack


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

        asyncio.run_coroutine_threadsafe(poll(), self.loop).result(60)


@contextmanager
def threaded_stack(**engine: Any) -> Iterator[Threaded]:
    """Arguments are those of the fake engine."""
    up, done = threading.Event(), asyncio.Event()
    running: list[Threaded] = []

    async def serve() -> None:
        async with running_stack(**engine) as stack, on_port(stack) as url:
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
