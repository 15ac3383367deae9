"""Who sent a request, and when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

MAX_PRIORITY = 100
"""Priorities go from minus this to this: the queue has a lane for each."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Times are the server's clock."""

    arrival_s: float
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    """When the request is to be given up; None for never."""
    patience_s: float | None = None
    """How long the client said that it is ready to wait."""

    def asking(self, priority: int | None, timeout_s: float | None) -> Self:
        """With what the client asks for, None for nothing: a lower priority, an earlier deadline."""
        if priority is not None and priority < self.priority:
            return replace(self, priority=max(priority, -MAX_PRIORITY)).asking(None, timeout_s)
        if timeout_s is None:
            return self
        until_s = self.arrival_s + timeout_s
        if self.deadline_s is not None:
            until_s = min(until_s, self.deadline_s)
        return replace(self, deadline_s=until_s, patience_s=until_s - self.arrival_s)
