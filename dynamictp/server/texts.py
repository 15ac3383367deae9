"""Threads for work on texts that the event loop can't wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dynamictp.process import release_unused_memory

T = TypeVar("T")

INLINE_CHARS = 4096
"""Longer texts are worked on in a thread: about 2 ms is what the event loop's other streams may wait."""
LONG_CHARS = 256 << 10
"""Longer ones one after the other: a megabyte is tokenized in a second or more, and takes 90 MB meanwhile."""
THREADS = 4


class TextThreads:
    """Owner of the threads. Whatever comes, long texts neither pile up in memory nor keep shorter ones, or
    other users of threads, waiting.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(THREADS, "text")
        self._long = ThreadPoolExecutor(1, "long-text")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on texts of `size` characters (or tokens) together."""
        if size <= INLINE_CHARS:
            return work()
        loop = asyncio.get_running_loop()
        if size <= LONG_CHARS:
            return await loop.run_in_executor(self._short, work)
        return await loop.run_in_executor(self._long, _and_give_memory_back, work)


def _and_give_memory_back(work: Callable[[], T]) -> T:
    """The allocator would keep what one long text took."""
    try:
        return work()
    finally:
        release_unused_memory()
