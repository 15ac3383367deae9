"""What every child process does first: die with its parent, and leave Ctrl-C to the supervisor."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that started it ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent == 1 or os.getppid() != parent:
        os._exit(1)


def ignore_interrupt() -> None:
    """Ctrl-C reaches the whole process group; only the supervisor acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
