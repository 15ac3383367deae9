"""A link to the engine in an event loop: messages in, messages out, never blocking."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from dynamictp.errors import DomainError
from dynamictp.messages import Body
from dynamictp.transport import Link, ZmqLink

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 64
"""Messages handled before other tasks of the event loop get their turn."""


class EngineLink:
    """Owner of the reading side of a link. `attach` gives it one; `wake` tells it that a message is there
    (only for links without a socket). Everything but `wake` runs in the event loop's thread.
    """

    def __init__(self, on_message: Callable[[Body], None], on_lost: Callable[[str], None]) -> None:
        """`on_lost` is told why the link broke; by then it is detached."""
        self._on_message = on_message
        self._on_lost = on_lost
        self._link: Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: int | None = None
        self._woken = False

    def attach(self, link: Link) -> None:
        """Take messages from `link` from now on. Called in the event loop; replaces an earlier link."""
        self.detach()
        self._loop = asyncio.get_running_loop()
        self._link = link
        if isinstance(link, ZmqLink):
            # A link waits for a peer that is still starting; the event loop can't: fail the send instead.
            link.socket.setsockopt(zmq.SNDTIMEO, 0)
            descriptor = link.socket.getsockopt(zmq.FD)
            assert isinstance(descriptor, int)
            self._reader = descriptor
            self._loop.add_reader(self._reader, self._drain)
        self._loop.call_soon(self._drain)

    def detach(self) -> None:
        """Stop using the link; the caller closes it."""
        if self._reader is not None and self._loop is not None:
            self._loop.remove_reader(self._reader)
        self._reader, self._link = None, None

    def wake(self) -> None:
        """A message has arrived on a link without a socket. Callable from any thread."""
        if self._loop is not None and not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._drain)

    def send(self, body: Body) -> bool:
        """Hand a message to the engine. False when there is none, or it does not take messages."""
        if self._link is None:
            return False
        try:
            self._link.send(body)
        except (DomainError, zmq.ZMQError) as error:
            self._lose(f"the engine does not take messages: {error}")
            return False
        self._recheck()
        return True

    def _recheck(self) -> None:
        """ZeroMQ's descriptor signals edges, and any call on the socket may swallow one: look again."""
        if isinstance(self._link, ZmqLink) and self._loop is not None:
            events = self._link.socket.getsockopt(zmq.EVENTS)
            if isinstance(events, int) and events & zmq.POLLIN:
                self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._woken = False
        for _ in range(MESSAGES_PER_TURN):
            if self._link is None:
                return
            try:
                body = self._link.receive()
            except (DomainError, zmq.ZMQError) as error:
                self._lose(f"the link to the engine broke: {error}")
                return
            if body is None:
                return
            try:
                self._on_message(body)
            except Exception:
                # The messages behind it must not wait for the socket's next edge.
                log.exception("a message of the engine could not be handled: %s", type(body).__name__)
        if self._loop is not None:
            self._loop.call_soon(self._drain)

    def _lose(self, reason: str) -> None:
        log.error("%s", reason)
        self.detach()
        self._on_lost(reason)
