"""What the machine gives this process: cores and memory, with affinity and cgroup limits respected."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
DESCRIPTORS = 1 << 16
"""As many as are asked for. A shell's usual limit of 1,024 is for programs that use `select`."""


def usable_cores() -> tuple[int, ...]:
    """Core numbers this process may use, cut to the cgroup's quota (at least one)."""
    cores = sorted(os.sched_getaffinity(0))
    limit = len(cores)
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            limit = max(1, int(quota) // int(period))
    except (OSError, ValueError):
        pass
    return tuple(cores[:limit])


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, cut to what the cgroup leaves."""
    available = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available


def raise_descriptor_limit() -> int:
    """Let this process and its children have as many descriptors as they may; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS:
        return DESCRIPTORS
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def device_cores(device: int, cores: tuple[int, ...], per_device: int) -> tuple[int, ...]:
    """Core set of a device: consecutive cores, starting again from the first when there are too few."""
    sets = max(1, len(cores) // per_device)
    first = device % sets * per_device
    return cores[first : first + per_device]
