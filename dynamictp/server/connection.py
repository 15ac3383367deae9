"""A connection of a client: HTTP/1.1 with limits on those that do not go on."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0
"""A connection whose first request has not begun by then is closed."""
STALL_S = 30.0
"""A client that takes nothing of what waits for it for so long is cut off."""


class GuardedConnection(H11Protocol):
    """Owner of two timers of one connection: for its first request, and for what can't be written.

    Beyond the transport's buffer (64 KiB) a response waits; so a client that does not read holds that much,
    and what its choices keep (`generation.MAX_UNREAD`), and both only for `STALL_S`.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_S, self._no_request)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _no_request(self) -> None:
        if self.cycle is None:
            self.transport.abort()
