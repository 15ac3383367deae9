"""Bodies of requests: read within limits of size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from dynamictp.errors import CapacityError, RequestError

BODY_LIMIT_BYTES = 8 << 20
TOTAL_LIMIT_BYTES = 256 << 20
BODY_S = 60.0


class BodyTooLarge(RequestError):
    """The body is beyond the server's limit."""

    status = 413
    kind = "request_too_large"


class BodyTooSlow(RequestError):
    """The body did not arrive in time."""

    status = 408
    kind = "request_timeout"


class Bodies:
    """Owner of the memory that bodies take from their first byte until they are tokens."""

    def __init__(
        self,
        limit_bytes: int = BODY_LIMIT_BYTES,
        total_bytes: int = TOTAL_LIMIT_BYTES,
        read_s: float = BODY_S,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = total_bytes
        self.read_s = read_s
        self.held_bytes = 0

    @asynccontextmanager
    async def reading(self, request: Request) -> AsyncIterator[bytes]:
        """The request's body; it counts as held until the context is left.

        Raises `BodyTooLarge`, before reading it when its length is declared, `BodyTooSlow`, and
        `CapacityError` when bodies take too much memory together.
        """
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isascii() and declared.isdigit() else 0
        if size > self.limit_bytes:
            raise self._too_large()
        held = 0
        parts: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self.read_s):
                    async for part in request.stream():
                        held += len(part)
                        self.held_bytes += len(part)
                        self._check(held)
                        parts.append(part)
            except TimeoutError as error:
                message = f"the body did not arrive within {self.read_s:g} s"
                raise BodyTooSlow(message, code="body_too_slow") from error
            yield b"".join(parts)
        finally:
            self.held_bytes -= held

    def _check(self, held: int) -> None:
        if held > self.limit_bytes:
            raise self._too_large()
        if self.held_bytes > self.total_bytes:
            raise CapacityError("bodies of requests take too much memory; try again", code="server_full")

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is larger than {self.limit_bytes} bytes, the most this server reads",
            code="body_too_large",
        )
