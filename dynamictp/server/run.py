"""An HTTP application on a port, started and stopped by the program that owns the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from dynamictp.errors import ResourceError
from dynamictp.server.connection import GuardedConnection

BACKLOG = 1024
KEEP_ALIVE_S = 30
DRAIN_S = 5
SEND_BUFFER_BYTES = 64 << 10
HEAD_LIMIT_BYTES = 32 << 10
"""Request line and headers together."""
CONNECTIONS = 16_384
"""Of a port, where the limit of descriptors allows it."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor decides when to stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class ServerRunner:
    """Owner of the listening socket and of uvicorn's task."""

    def __init__(
        self, app: ASGIApp, host: str = "127.0.0.1", port: int = 8000, *, connections: int = CONNECTIONS
    ) -> None:
        """`port` 0 takes a free one. Beyond `connections` at a time others are answered with a 503."""
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            lifespan="off",
            ws="none",
            http=functools.partial(GuardedConnection, most=connections),  # type: ignore[arg-type]
            h11_max_incomplete_event_size=HEAD_LIMIT_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
            server_header=False,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen; returns the bound port. Raises `ResourceError` when the address is not to be had."""
        listener = _listen(self._host, self._port)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            listening.cancel()
            listener.close()
            await self._task
        port: int = listener.getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._server.server_state.connections)

    async def stop(self) -> None:
        """Stop listening, let answers end for a few seconds, then cut them. May be called twice."""
        if self._task is None:
            return
        self._server.should_exit = True
        task, self._task = self._task, None
        await task


async def serve_app(app: ASGIApp, host: str, port: int) -> None:
    """Serve until cancelled. Raises `ResourceError` when the address is not to be had."""
    runner = ServerRunner(app, host, port)
    await runner.start()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await runner.stop()


def _listen(host: str, port: int) -> socket.socket:
    """A bound TCP socket. SO_REUSEADDR only skips TIME_WAIT on Linux: a port in use is still refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name
        raise ResourceError(
            f"can't listen on {host!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Its connections inherit it: without it a client that does not read is given megabytes by the kernel.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"can't listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener
