"""Finds child processes that are stopped (SIGSTOP), in whatever they were doing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

OVERSLEPT_S = 1.0
"""A look so late means that this process was stopped itself (Ctrl-Z stops all): the others get their time."""


class StoppedProcesses:
    """Owner of the times since when each process is seen stopped."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[int, float] = {}
        self._looked_at = 0.0

    def look(self, pids: Iterable[int], now: float) -> list[int]:
        """Those that have been stopped for longer than the patience. Call several times a second."""
        if now - self._looked_at > OVERSLEPT_S:
            self._since.clear()
        self._looked_at = now
        stopped = {pid for pid in pids if _is_stopped(pid)}
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        return [pid for pid, since in self._since.items() if now - since > self._patience_s]


def _is_stopped(pid: int) -> bool:
    """`T` is stopped by a signal; a process under a debugger shows `t`."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return False
    return text.rpartition(")")[2].split()[0] == "T"
