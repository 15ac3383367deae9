"""Virtual time: events in order, nothing waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Event:
    """Something that will happen at `time_s`, unless it is cancelled."""

    __slots__ = ("action", "time_s")

    def __init__(self, time_s: float, action: Action) -> None:
        self.time_s = time_s
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class EventLoop:
    """Owner of virtual time; a `Clock`. Events of one moment happen in the order in which they were set."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s
        self._order = count()
        self._heap: list[tuple[float, int, Event]] = []

    def now(self) -> float:
        return self._now

    def at(self, time_s: float, action: Action) -> Event:
        """Raises ValueError for a time that is over."""
        if time_s < self._now:
            raise ValueError(f"{time_s} s is over, it is {self._now} s")
        event = Event(time_s, action)
        heapq.heappush(self._heap, (time_s, next(self._order), event))
        return event

    def after(self, seconds: float, action: Action) -> Event:
        return self.at(self._now + seconds, action)

    def every(self, interval_s: float, action: Action) -> None:
        """From now + `interval_s` on, for ever."""

        def again() -> None:
            self.after(interval_s, again)
            action()

        self.after(interval_s, again)

    def run(self, until_s: float) -> None:
        """Let everything up to and including `until_s` happen."""
        while self._heap and self._heap[0][0] <= until_s:
            self._now, _, event = heapq.heappop(self._heap)
            if event.action is not None:
                event.action()
        self._now = until_s
