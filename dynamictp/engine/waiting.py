"""The waiting queue of a pool."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from dynamictp.engine.request import Request


class WaitingQueue:
    """Owner of the requests that no domain has: those that ran before first, then by priority (higher
    first), then by arrival."""

    def __init__(self) -> None:
        self._entries: list[tuple[bool, int, float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In order; a request may be removed while it is the current one."""
        for entry in tuple(self._entries):
            yield entry[-1]

    def add(self, request: Request) -> None:
        insort(self._entries, self._entry(request))

    def remove(self, request: Request) -> None:
        """Raises KeyError when it is not waiting."""
        entry = self._entry(request)
        index = bisect_left(self._entries, entry)
        if index == len(self._entries) or self._entries[index][-1] is not request:
            raise KeyError(request.id)
        del self._entries[index]

    @staticmethod
    def _entry(request: Request) -> tuple[bool, int, float, int, Request]:
        # `age` is unique, so requests themselves are never compared.
        return (not request.resumed, -request.priority, request.arrival_s, request.age, request)
