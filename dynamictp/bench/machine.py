"""What the machine gives right now: no figure is worth anything without it.

The project's machines have two memory states: two cores together read about 36 GB/s (A) or about
60 (B), and flip between them within minutes. A benchmark prints the state beside each block and
compares only what was measured in the same one.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from dynamictp.errors import FatalError

# Halfway between the two states' typical readings.
STATE_BOUNDARY_GBPS = 48.0


@dataclass(frozen=True, slots=True)
class MemoryState:
    """GB/s read by one process alone, and by two together from disjoint ranges.

    `busy_cores`: what others kept busy while the benchmark did nothing; figures taken beside a busy
    neighbour say little.
    """

    one_gbps: float
    two_gbps: float
    busy_cores: float = 0.0

    @property
    def name(self) -> str:
        """`A` or `B` as described above."""
        return "A" if self.two_gbps < STATE_BOUNDARY_GBPS else "B"

    def __str__(self) -> str:
        rates = f"{self.one_gbps:.0f} GB/s one core, {self.two_gbps:.0f} GB/s two"
        return f"state {self.name}: {rates}, {self.busy_cores:.1f} cores busy"


@dataclass(frozen=True, slots=True)
class Build:
    """What was measured and when: the day (UTC), the version, and the commit where there is one."""

    date: str
    version: str
    commit: str = ""

    def __str__(self) -> str:
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.date}, version {self.version}{commit}"


@dataclass(frozen=True, slots=True)
class Machine:
    """The processor and what of it this process may use."""

    cpu: str
    usable_cores: int
    memory_gb: float
    kernel: str

    def __str__(self) -> str:
        return f"{self.cpu}, {self.usable_cores} usable cores, {self.memory_gb:.0f} GB, Linux {self.kernel}"


def describe_machine() -> Machine:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_name(Path("/proc/cpuinfo").read_text()),
        usable_cores=len(os.sched_getaffinity(0)),
        memory_gb=pages * page_bytes / 1e9,
        kernel=platform.release(),
    )


def describe_build() -> Build:
    """A commit with changes on top of it ends in `+`; an installed package has none."""
    return Build(datetime.now(UTC).date().isoformat(), metadata.version("dynamictp"), _commit())


def _commit() -> str:
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*here, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
        )
        changes = subprocess.run(
            [*here, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


def probe_memory(seconds: float = 1.0) -> MemoryState:
    """Watches for half of `seconds`, then reads for `seconds` with one process and with two.

    The server under measurement should be idle.
    """
    before, start = busy_ticks(Path("/proc/stat").read_text()), time.monotonic()
    time.sleep(seconds / 2)
    after, elapsed = busy_ticks(Path("/proc/stat").read_text()), time.monotonic() - start
    return MemoryState(
        one_gbps=_read_together(1, seconds),
        two_gbps=_read_together(2, seconds),
        busy_cores=(after - before) / os.sysconf("SC_CLK_TCK") / elapsed,
    )


def busy_ticks(proc_stat: str) -> int:
    """Clock ticks all cores together spent on work, from the text of /proc/stat; steal counts too."""
    # user nice system idle iowait irq softirq steal guest guest_nice; guest is inside user already
    user, nice, system, _idle, _iowait, *others = (int(n) for n in proc_stat.split("\n", 1)[0].split()[1:9])
    return user + nice + system + sum(others)


def _read_together(processes: int, seconds: float) -> float:
    command = [sys.executable, "-m", "dynamictp.bench.memread", str(seconds)]
    readers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            if reader.stdout.readline() != "ready\n":
                raise FatalError("the memory probe could not start; is there 1 GB of free memory?")
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write("\n")
            reader.stdin.flush()
        return sum(float(reader.communicate()[0]) for reader in readers)
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()


def _cpu_name(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
