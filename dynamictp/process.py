"""What processes do and ask of the system: die with the parent, leave Ctrl-C to it, wait for a core."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
from pathlib import Path

PARENT_ENV = "DYNAMICTP_PARENT"
"""Id of the process that started this one. Without it a parent that died early can't be told from the
process that adopted its children, nor a supervisor that is process 1 of a container from init.
"""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that started it ends, however it ends."""
    given = os.environ.get(PARENT_ENV)
    parent = int(given) if given else os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    orphan = parent == 1 and not given
    if orphan or os.getppid() != parent:
        os._exit(1)


def ignore_interrupt() -> None:
    """Ctrl-C reaches the whole process group; only the supervisor acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def core_wait_s(pid: int) -> float:
    """Seconds that the threads of a process were ready to run and had no core, together, since they began.

    0.0 for a process that is gone, and where the kernel does not count it. Source: the second figure of
    `/proc/PID/task/TID/schedstat`, in ns.
    """
    waited_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            waited_ns += int(thread.read_text(encoding="ascii").split()[1])
    return waited_ns * 1e-9


def settle_heap() -> None:
    """What was loaded until here lives for ever: keep the collector from walking it amid a step or a request
    (a full collection of the server's modules took 45 ms on warm caches)."""
    gc.collect()
    gc.freeze()


def release_unused_memory() -> None:
    """Collect garbage and give the allocator's free memory back to the system (a few ms)."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)
