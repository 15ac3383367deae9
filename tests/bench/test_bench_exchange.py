"""One request on its own connection."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

from dynamictp.bench.exchange import Origin, exchange
from dynamictp.bench.wire import Head
from dynamictp.clock import SystemClock


class Ignoring:
    def on_head(self, head: Head) -> None:
        pass

    def on_body(self, piece: bytes, at_s: float) -> None:
        pass


async def test_a_caller_that_leaves_while_it_connects_leaves_no_unseen_error() -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        gone.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        origin = Origin("127.0.0.1", port)
        for turns in range(1, 8):
            gone.clear()
            sending = asyncio.create_task(exchange(origin, origin.get("/", {}), Ignoring(), SystemClock()))
            for _ in range(turns):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        # What is still on its way arrives, and what is garbage complains now.
        for _ in range(20):
            await asyncio.sleep(0.001)
        gc.collect()
    assert not complaints
