"""How often a process may crash before the server gives up, and how long it stays away after each crash."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
QUICK_S = 2.0
"""A life shorter than this makes the next pause longer."""
PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0


class CrashBudget:
    """Crashes of one process, over all its lives. At most `limit` within `WINDOW_S`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._crashes: deque[float] = deque()
        self._quick = 0

    def crashed(self, now: float, lived_s: float) -> float | None:
        """Seconds until the next life may begin; None when the budget is spent."""
        self._crashes.append(now)
        while self._crashes[0] < now - WINDOW_S:
            self._crashes.popleft()
        if len(self._crashes) > self.limit:
            return None
        if lived_s >= QUICK_S:
            self._quick = 0
            return 0.0
        self._quick += 1
        return float(min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(self._quick - 1, 16)))
