"""Waiting for something of this process's event loop to change."""

from __future__ import annotations

import asyncio


class Changes:
    """Wakes all that wait, and none that begins to wait afterwards. Lives in the event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """It changed: those who wait look again."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Returns at the next change; False when the time is up first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._next.wait()
        except TimeoutError:
            return False
        return True
