"""Connections whose clients do not go on: every one of them ends, whatever it sends or does not read."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from dynamictp.server import connection
from dynamictp.server.connection import GuardedConnection
from dynamictp.server.run import ServerRunner
from tests.server.server_stack import Stack
from tests.server.test_streaming import until

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
DRIP_S = 0.01
END = b"\r\n\r\n"


@dataclass
class Client:
    """One raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> bytes:
        """Status line and headers of the next answer, its body left aside."""
        head = await asyncio.wait_for(self.reader.readuntil(END), 20)
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        await self.reader.readexactly(length)
        return head

    async def drip(self, pieces: itertools.chain[bytes]) -> bytes:
        """Send a piece at a time for as long as the server takes it; what it sent meanwhile, if it closed in
        order."""
        ended = asyncio.create_task(self.reader.read())
        async with asyncio.timeout(20):
            for piece in pieces:
                self.writer.write(piece)
                done, _ = await asyncio.wait({ended}, timeout=DRIP_S)
                if done:
                    break
        return await _or_reset(ended)


async def _or_reset(reading: asyncio.Task[bytes]) -> bytes:
    try:
        return await reading
    except ConnectionError:
        return b""


@asynccontextmanager
async def serving(stack: Stack, **limits: int) -> AsyncIterator[tuple[ServerRunner, Callable[[], Any]]]:
    """The stack on a port, and a function that opens a connection."""
    runner = ServerRunner(stack.app, port=0, **limits)
    port = await runner.start()
    opened: list[Client] = []

    async def connect() -> Client:
        opened.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
        return opened[-1]

    try:
        yield runner, connect
    finally:
        for client in opened:
            client.writer.close()
        await runner.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.5)
    monkeypatch.setattr(connection, "STALL_S", 0.5)


def endless_head() -> itertools.chain[bytes]:
    return itertools.chain((b"GET /health HTTP/1.1\r\nhost: x\r\n",), itertools.repeat(b"x: y\r\n"))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("before", [0, 1, 3])
async def test_a_head_that_drips_ends_the_connection_the_first_one_or_a_later_one(
    stack: Stack, before: int
) -> None:
    async with serving(stack) as (runner, connect):
        client = await connect()
        for _ in range(before):
            client.writer.write(HEALTH)
            assert b" 200 " in await client.answer()
        assert await client.drip(endless_head()) == b""
        await until(lambda: runner.connections == 0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        (b"POST", b"/no/such/thing", b" 404 "),
        (b"GET", b"/health", b" 200 "),
        (b"DELETE", b"/v1/completions", b" 405 "),
    ],
)
async def test_a_body_that_nobody_wants_and_that_drips_ends_the_connection(
    stack: Stack, method: bytes, path: bytes, status: bytes
) -> None:
    async with serving(stack) as (runner, connect):
        client = await connect()
        client.writer.write(b"%b %b HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" % (method, path))
        assert status in await client.answer()
        await client.drip(itertools.chain(itertools.repeat(b"{")))
        await until(lambda: runner.connections == 0)


@pytest.mark.usefixtures("impatient")
async def test_a_connection_that_sends_nothing_ends(stack: Stack) -> None:
    async with serving(stack) as (runner, connect):
        for first in (b"", HEALTH):
            client = await connect()
            client.writer.write(first)
            if first:
                await client.answer()
            assert await client.drip(itertools.chain()) == b""
        await until(lambda: runner.connections == 0)


async def test_a_body_that_comes_late_but_whole_leaves_the_connection_in_use(stack: Stack) -> None:
    async with serving(stack) as (_, connect):
        client = await connect()
        client.writer.write(b"POST /no/such/thing HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
        assert b" 404 " in await client.answer()
        client.writer.write(b"late" + HEALTH)
        assert b" 200 " in await client.answer()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
async def test_an_answer_that_is_never_read_ends_the_connection(stack: Stack, close: bytes) -> None:
    """Answers of all sizes: those that fit into the kernel's buffers, that fill the server's, and larger."""
    async with serving(stack) as (runner, connect):
        address = (await connect()).writer.get_extra_info("peername")
        clients, loop = [], asyncio.get_running_loop()
        for size in range(1000, 400_000, 20_000):
            body = json.dumps({"tokens": [65] * size}).encode()
            head = b"POST /detokenize HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, head % (close, len(body)) + body)
            clients.append(client)
        await until(lambda: runner.connections == 0)
        for client in clients:
            client.close()


async def test_beyond_the_limit_a_connection_is_told_to_come_back(stack: Stack) -> None:
    async with serving(stack, connections=2) as (runner, connect):
        clients = [await connect() for _ in range(2)]
        for client in clients:
            client.writer.write(HEALTH)
            assert b" 200 " in await client.answer()
        refused = await (await connect()).answer()
        assert b" 503 " in refused
        assert b"retry-after: 1\r\n" in refused
        clients[0].writer.close()
        await until(lambda: runner.connections == 1)
        client = await connect()
        client.writer.write(HEALTH)
        assert b" 200 " in await client.answer()


class Timers:
    """A loop's timers, fired by hand; and a transport whose buffer has the size it is told."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        self.buffered = 0
        self.aborted = False

    def call_later(self, _delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.due.append(callback)
        return cast(asyncio.TimerHandle, self)

    def cancel(self) -> None:
        self.due.clear()

    def fire(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()

    def get_extra_info(self, _name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def abort(self) -> None:
        self.aborted = True


def connected(timers: Timers) -> GuardedConnection:
    loop, transport = cast(asyncio.AbstractEventLoop, timers), cast(asyncio.Transport, timers)
    config = uvicorn.Config(app=lambda: None)  # type: ignore[arg-type, return-value]
    made = GuardedConnection(config=config, server_state=ServerState(), app_state={}, _loop=loop, most=9)
    made.connection_made(transport)
    return made


async def test_a_client_that_goes_on_reading_is_not_cut_off() -> None:
    timers = Timers()
    connected(timers)
    for timers.buffered in (60_000, 40_000, 1):
        timers.fire()
        assert not timers.aborted
    timers.fire()
    assert timers.aborted


async def test_nor_is_one_in_the_middle_of_a_large_answer() -> None:
    timers = Timers()
    made = connected(timers)
    timers.due.clear()  # the first request is there
    timers.buffered = 8_000_000
    made.pause_writing()
    for timers.buffered in (6_000_000, 3_000_000, 100_000):
        timers.fire()
        assert not timers.aborted
    made.resume_writing()
    assert not timers.due
    timers.buffered = 8_000_000  # larger than what waited last
    made.pause_writing()
    timers.buffered = 7_000_000
    timers.fire()
    assert not timers.aborted
    timers.fire()
    assert timers.aborted
