"""`python -m dynamictp.bench.paced`: streams tokens at a set pace, and each token's text is when it left.

The other end of the client's accuracy check: both processes read the same monotonic clock, so the
difference of the stamps is the client's error (and the loopback's). Bodies may hold `gap_ms` between tokens
and `stall_s`, for which the whole server stands still before it answers. `dynamictp bench` can be pointed
at it, too.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec

from dynamictp.bench.server import READY_PREFIX

_MODELS = b'{"object":"list","data":[{"id":"paced","object":"model","owned_by":"dynamictp-bench"}]}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request on its own connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models "):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(_MODELS))
            writer.write(_MODELS)
        elif not head.startswith(b"POST /v1/"):
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            await _stream(writer, msgspec.json.decode(await reader.readexactly(length)))
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the client left
    finally:
        writer.close()


async def _stream(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    tokens, gap_s = int(body["max_tokens"]), float(body.get("gap_ms", 0.0)) / 1e3
    if stall_s := float(body.get("stall_s", 0.0)):
        time.sleep(stall_s)  # noqa: ASYNC251 - standing still is the point
    writer.write(_HEAD)
    start_s = time.monotonic()
    for i in range(tokens):
        await asyncio.sleep(max(start_s + i * gap_s - time.monotonic(), 0.0))
        finish = '"length"' if i == tokens - 1 else "null"
        stamp = f" {time.monotonic():.6f}"
        _event(writer, f'{{"choices":[{{"index":0,"text":"{stamp}","finish_reason":{finish}}}]}}')
    usage = f'{{"prompt_tokens":1,"completion_tokens":{tokens},"total_tokens":{tokens + 1}}}'
    _event(writer, f'{{"choices":[],"usage":{usage}}}')
    _event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


async def main() -> None:
    """Serves until the process is ended."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    sys.stdout.write(f"{READY_PREFIX}http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
