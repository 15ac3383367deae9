"""A raw asyncio HTTP server that answers as its script says: the other end of the load client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

CLOSES = "connection: close"
"""Said because it is done: a client that believes the connection lives would send its next request there."""


@dataclass
class Peer:
    """One connection: the request it carried, and what to answer with."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, object]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def head(self, status: int = 200, **headers: str) -> None:
        lines = [
            f"HTTP/1.1 {status} X",
            CLOSES,
            "content-type: text/event-stream",
            "transfer-encoding: chunked",
        ]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\n{CLOSES}\r\ncontent-length: {len(body)}\r\n\r\n"
        await self.raw(head.encode() + body)

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def piece(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, value: object) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        await self.piece(f"data: {text}\n\n".encode())

    async def tokens(self, *ids: int, finish: str | None = None) -> None:
        choice = {
            "index": 0,
            "text": "".join(f" t{i}" for i in ids),
            "token_ids": list(ids),
            "finish_reason": finish,
        }
        await self.event({"choices": [choice], "usage": None})

    async def usage(self, completion: int, **extra: object) -> None:
        usage = {"prompt_tokens": 3, "completion_tokens": completion, "total_tokens": 3 + completion}
        await self.event({"choices": [], "usage": usage, **extra})

    async def end(self) -> None:
        await self.event("[DONE]")
        await self.raw(b"0\r\n\r\n")


Script = Callable[[Peer], Awaitable[None]]


@dataclass
class ScriptedServer:
    url: str
    requests: list[Peer] = field(default_factory=list)


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[ScriptedServer]:
    """Serves `script` on a free port; each connection carries one request and closes after it."""
    seen: list[Peer] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            peer = Peer(*request_line.split()[:2], headers, json.loads(body or b"{}"), reader, writer)
            seen.append(peer)
            await script(peer)
        except ConnectionError:
            pass  # the client left, as some tests want
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield ScriptedServer(f"http://127.0.0.1:{port}", seen)
