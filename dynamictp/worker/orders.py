"""What the supervisor tells a worker over its life: lines of JSON on a pipe. No torch here.

A worker that has no orders yet is a spare: its modules are imported, and it becomes a device's worker when
`Begin` comes.
"""

from __future__ import annotations

import os
import select
from collections import deque

import msgspec


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Be the worker that the file describes (`WorkerStart` as JSON); the engine listens at `engine`."""

    start_file: str
    engine: str


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Another engine listens at `engine`: drop every domain of the one before and say hello."""

    engine: str


class Go(msgspec.Struct, frozen=True, tag=True):
    """The weights are in the shared memory: say hello and serve."""


Order = Begin | Connect | Go

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Order)
_READ_BYTES = 4096


def encode_order(order: Order) -> bytes:
    return _encoder.encode(order) + b"\n"


class Orders:
    """The worker's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # Not select(): it refuses descriptors from 1024 on, and a server with many clients has no lower ones.
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)
        self._partial = b""
        self._lines: deque[bytes] = deque()
        self._closed = False

    def next(self, timeout_s: float | None = None) -> Order | None:
        """The next order; None when none comes in time. Raises EOFError when the supervisor is gone."""
        while not self._lines:
            if self._closed:
                raise EOFError("the supervisor has closed the pipe of orders")
            if not self._poller.poll(None if timeout_s is None else timeout_s * 1e3):
                return None
            self._read()
        return _decoder.decode(self._lines.popleft())

    def _read(self) -> None:
        data = os.read(self.descriptor, _READ_BYTES)
        self._closed = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(lines)
