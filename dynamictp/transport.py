"""Links between two processes (or threads): ordered messages with version and sequence checks.

`Link` is one end. `zmq_link` makes an end over a ZeroMQ DEALER socket, `memory_link_pair` makes both ends
within one process, over the same encoded bytes. A missing message or another protocol version raises
`ProtocolError`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Protocol

import msgspec
import zmq

from dynamictp.errors import DomainError, ProtocolError
from dynamictp.messages import PROTOCOL_VERSION, Body, Envelope

FIRST_CONTACT_S = 60.0
"""How long a bound end waits with its first messages for a peer that is still starting."""

RECONNECT_MS = 20
"""How often a connecting end tries again while nobody listens yet."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class Codec:
    """One direction pair of sequence numbers: encodes what is sent, checks what arrives."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._sent = 0
        self._received = 0
        self._peer: int | None = None

    def encode(self, body: Body) -> bytes:
        data = _encoder.encode(Envelope(PROTOCOL_VERSION, self._incarnation, self._sent, body))
        self._sent += 1
        return data

    def decode(self, data: bytes) -> Body:
        try:
            envelope = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message of protocol {PROTOCOL_VERSION}: {error}") from error
        if envelope.version != PROTOCOL_VERSION:
            raise ProtocolError(f"peer speaks protocol {envelope.version}, this is {PROTOCOL_VERSION}")
        if envelope.incarnation != self._peer:
            if self._peer is not None and envelope.incarnation < self._peer:
                raise ProtocolError(f"message of incarnation {envelope.incarnation} after {self._peer}")
            self._peer, self._received = envelope.incarnation, 0
        if envelope.sequence != self._received:
            raise ProtocolError(f"expected message {self._received}, got {envelope.sequence}")
        self._received += 1
        return envelope.body


class Link(Protocol):
    """One end of an ordered, reliable connection."""

    def encode(self, body: Body) -> bytes: ...
    def send_encoded(self, data: bytes) -> None:
        """Hand over bytes of this link's `encode`. Raises `DomainError` when the peer is known to be gone."""
        ...

    def send(self, body: Body) -> None: ...
    def receive(self) -> Body | None:
        """The next message, or None when none has arrived. Raises `ProtocolError`."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Block until a message is there (True) or the time is up (False)."""
        ...

    def close(self) -> None: ...


class ZmqLink:
    """A link over a DEALER socket. Used by one thread.

    A bound socket has nowhere to put a message while no peer is connected, and its `send` would block. So
    once the peer was heard, sending to none raises `DomainError` at once; before that it waits up to
    `FIRST_CONTACT_S`. A connecting socket keeps the messages for the peer and never waits.
    """

    def __init__(self, socket: zmq.Socket[bytes], incarnation: int, file: Path | None = None) -> None:
        """`file`: what the socket was bound to, removed with it; ZeroMQ leaves it there."""
        self.socket = socket
        self._codec = Codec(incarnation)
        self._file = file
        self._met = False

    def encode(self, body: Body) -> bytes:
        return self._codec.encode(body)

    def send_encoded(self, data: bytes) -> None:
        try:
            self.socket.send(data, zmq.NOBLOCK if self._met else 0)
        except zmq.Again:
            raise DomainError("no peer is connected to this link: it ended or never came up") from None

    def send(self, body: Body) -> None:
        self.send_encoded(self._codec.encode(body))

    def receive(self) -> Body | None:
        try:
            data = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self._met = True
        return self._codec.decode(data)

    def wait(self, timeout_s: float | None) -> bool:
        # Rounded up: rounded down, the last millisecond before a deadline would be spent spinning.
        return bool(self.socket.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))))

    def close(self) -> None:
        self.socket.close(linger=200)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def engine_address(folder: Path, incarnation: int) -> str:
    """Where an engine listens for the server. A link serves one pair of lives, so each has its own socket."""
    return f"ipc://{folder}/engine-{incarnation}.sock"


def worker_address(folder: Path, device: int, incarnation: int, engine: int) -> str:
    """Where the engine of incarnation `engine` listens for one life of a device's worker."""
    return f"ipc://{folder}/worker-{device}.{incarnation}-{engine}.sock"


def zmq_link(
    context: zmq.Context[zmq.Socket[bytes]], address: str, *, bind: bool, incarnation: int
) -> ZmqLink:
    """A DEALER end at `address` (`ipc://…` in an owner-only directory); no message is ever dropped."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SNDTIMEO, int(FIRST_CONTACT_S * 1000))
    # The other end may bind later: every life of a process has sockets of its own.
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    (socket.bind if bind else socket.connect)(address)
    return ZmqLink(socket, incarnation, Path(address.removeprefix("ipc://")) if bind else None)


class MemoryLink:
    """One end of a pair within a process: same bytes, no socket. Each end is used by one thread."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes], incarnation: int) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._codec = Codec(incarnation)
        self._arrived = Event()
        self._notify: Callable[[], None] = lambda: None

    def encode(self, body: Body) -> bytes:
        return self._codec.encode(body)

    def send_encoded(self, data: bytes) -> None:
        self._outbox.append(data)
        self._notify()

    def send(self, body: Body) -> None:
        self.send_encoded(self._codec.encode(body))

    def receive(self) -> Body | None:
        if not self._inbox:
            return None
        return self._codec.decode(self._inbox.popleft())

    def wait(self, timeout_s: float | None) -> bool:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._inbox:
            self._arrived.clear()
            if self._inbox:  # arrived between the look and the clear: its wake-up may be gone
                break
            # The event may also be a late one, of a message that was received before it was set.
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not self._arrived.wait(left_s):
                return bool(self._inbox)
        return True

    def close(self) -> None:
        """Nothing to release."""

    def joined_to(self, other: MemoryLink, on_arrival: Callable[[], None] | None = None) -> None:
        """Wake `other`'s waiter when this end sends; `on_arrival` is called as well, in this thread."""

        def notify() -> None:
            other._arrived.set()
            if on_arrival is not None:
                on_arrival()

        self._notify = notify


def memory_link_pair(
    on_left: Callable[[], None] | None = None, on_right: Callable[[], None] | None = None
) -> tuple[MemoryLink, MemoryLink]:
    """Both ends; `on_left` is called whenever something arrived for the left end."""
    to_left: deque[bytes] = deque()
    to_right: deque[bytes] = deque()
    left, right = MemoryLink(to_left, to_right, 1), MemoryLink(to_right, to_left, 1)
    left.joined_to(right, on_right)
    right.joined_to(left, on_left)
    return left, right
