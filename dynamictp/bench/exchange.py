"""One HTTP/1.1 request on its own connection, every arrival stamped as the event loop sees it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol
from urllib.parse import urlsplit

from dynamictp.bench.wire import Head, ResponseParser, WireError
from dynamictp.clock import Clock


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens. `base_path` comes before every path."""

    host: str
    port: int
    tls: bool = False
    base_path: str = ""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """`http://host:port[/base]` or https. Raises ValueError for anything else."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a server address; expected http://host:port")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    def post(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """The request's bytes. The connection closes after the response."""
        length = {"content-type": "application/json", "content-length": str(len(body))}
        return self._request("POST", path, {**length, **headers}) + body

    def get(self, path: str, headers: Mapping[str, str]) -> bytes:
        """The bytes of a request without a body."""
        return self._request("GET", path, headers)

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.base_path}{path} HTTP/1.1",
            f"host: {host}:{self.port}",
            "connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


class Receiver(Protocol):
    """Takes the response as it arrives; `at_s` is the injected clock's time."""

    def on_head(self, head: Head) -> None: ...

    def on_body(self, piece: bytes, at_s: float) -> None: ...


class _Connection(asyncio.Protocol):
    """Feeds one response to a receiver; `done` ends with it, or with what went wrong."""

    def __init__(self, payload: bytes, receiver: Receiver, now: Callable[[], float]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A caller cancelled while it connects never waits for this; the loop shall not complain then.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._payload = payload
        self._receiver = receiver
        self._now = now
        self._parser = ResponseParser()
        self._head_seen = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        at_s = self._now()
        if self.done.done():
            return
        try:
            pieces = self._parser.feed(data)
            if not self._head_seen and self._parser.head is not None:
                self._head_seen = True
                self._receiver.on_head(self._parser.head)
            for piece in pieces:
                self._receiver.on_body(piece, at_s)
        except Exception as error:  # noqa: BLE001 - the loop would only log it; the caller must see it
            self.done.set_exception(error)
            return
        if self._parser.complete:
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if exc is not None:
            self.done.set_exception(exc)
            return
        try:
            self._parser.finish()
        except WireError as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads the system's certificates: once, not per request


async def exchange(origin: Origin, payload: bytes, receiver: Receiver, clock: Clock) -> None:
    """Sends `payload` on a new connection and returns when the response is complete.

    Raises OSError when the connection fails, WireError when the response is cut short or
    malformed. Cancelling it drops the connection, which a server takes as the client leaving.
    """
    loop = asyncio.get_running_loop()
    transport, connection = await loop.create_connection(
        lambda: _Connection(payload, receiver, clock.now),
        origin.host,
        origin.port,
        ssl=_tls_context() if origin.tls else None,
    )
    try:
        await connection.done
    finally:
        transport.abort()
