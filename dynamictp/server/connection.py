"""A connection of a client: HTTP/1.1 with limits on those that do not go on."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0
"""From the connection's beginning, or the end of an answer, to the end of the next request's head: a
connection that has none by then is closed, whatever it has sent."""
STALL_S = 30.0
"""A client that takes nothing of what waits for it for so long is cut off."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class GuardedConnection(H11Protocol):
    """Owner of two timers of one connection: for its next request, and for what can't be written.

    Beyond the transport's buffer (64 KiB) a response waits; so a client that does not read holds that much,
    and what its choices keep (`generation.MAX_UNREAD`), and both only for `STALL_S`. Bodies have a limit of
    their own (`bodies`) while somebody reads them; the rest of one that nobody wants counts as the time to
    the next head.
    """

    def __init__(self, *arguments: Any, most: int, **more: Any) -> None:
        """`most`: connections of this port; one more is answered with a 503."""
        super().__init__(*arguments, **more)
        self._most = most
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unread = 0
        """Bytes that waited to be taken when the timer for the next request last came."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()
        if len(self.connections) > self._most:
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._watch_stall()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _watch_stall(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(STALL_S, partial(self._no_room, waiting))

    def _no_room(self, before: int) -> None:
        """Cut the client off, unless it took some of what waited before: a large answer may need long."""
        if self.transport.get_write_buffer_size() < before:
            self._watch_stall()
        else:
            self.transport.abort()

    def _watch_head(self) -> None:
        """The timer runs while no request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None:
            self._unread = 0
            self._head = self.loop.call_later(HEAD_S, self._no_request)

    def _no_request(self) -> None:
        """Close, unless the client is still taking the last answer."""
        unread = self.transport.get_write_buffer_size()
        if unread and (not self._unread or unread < self._unread):
            self._unread = unread
            self._head = self.loop.call_later(STALL_S, self._no_request)
        else:
            self.transport.abort()
