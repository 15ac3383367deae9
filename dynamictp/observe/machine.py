"""What the operating system says of processes, cores and memory, read when `/metrics` is.

Accelerators of NVIDIA have their own exporter (DCGM, `DCGM_FI_*`); on a CPU node a device is a set of cores.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
from prometheus_client.core import GaugeMetricFamily, Metric

from dynamictp.observe.families import counter, counters, gauges

CRASHING = ("worker", "engine")


@dataclass(frozen=True)
class Placed:
    """A device as the system sees it: its worker's process id, None while there is none, and its cores."""

    pid: int | None = None
    cores: Sequence[int] = ()


@dataclass(frozen=True)
class MachineSources:
    """Whom to look at. Asked at every scrape: processes come and go."""

    processes: Callable[[], Mapping[str, int | None]] = dict
    """Name (server, engine) → process id."""
    devices: Callable[[], Mapping[int, Placed]] = dict


@dataclass
class ProcessMetrics:
    """What the processes use, and owner of their crashes. A process may end between two looks."""

    sources: MachineSources = field(default_factory=MachineSources)
    wall: Callable[[], float] = time.time
    crashes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CRASHING, 0)))
    last_crash: float | None = None
    """Unix time."""

    def on_crash(self, process: str) -> None:
        """A process of that kind (`CRASHING`) ended without being asked to, and is replaced."""
        self.crashes[process] += 1
        self.last_crash = self.wall()

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_processes(self.sources.devices())
        if self.crashes:
            yield counters(
                "dtp_process_crashes",
                "Processes that ended or hung and were replaced. Does something crash?",
                ["process"],
                (((process,), count) for process, count in self.crashes.items()),
            )

    def _collect_processes(self, devices: Mapping[int, Placed]) -> Iterator[Metric]:
        known = {(name, ""): pid for name, pid in self.sources.processes().items()}
        known |= {("worker", str(device)): placed.pid for device, placed in devices.items()}
        used = {key: _look(pid) for key, pid in known.items()}
        cpu = [(key, found[0]) for key, found in used.items() if found is not None]
        memory = [(key, found[1]) for key, found in used.items() if found is not None]
        yield counters(
            "dtp_process_cpu_seconds",
            "Processor time of the server's processes. Is the server or the engine out of breath (near 1 per "
            "second)?",
            ["process", "device"],
            cpu,
        )
        text = "Resident memory, shared pages included. Does something grow?"
        family = GaugeMetricFamily("dtp_process_resident_bytes", text, labels=["process", "device"])
        for key, value in memory:
            family.add_metric(list(key), value)
        yield family


@dataclass
class MachineMetrics(ProcessMetrics):
    """Processes, cores and memory of the machine."""

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        yield from _collect_cores(self.sources.devices())
        memory = psutil.virtual_memory()
        yield gauges(
            "dtp_node_memory_bytes",
            "Memory of the machine. Will something be killed for memory?",
            "kind",
            {"total": float(memory.total), "available": float(memory.available)},
        )


def _look(pid: int | None) -> tuple[float, float] | None:
    """Processor seconds and resident bytes; None when the process is gone."""
    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return times.user + times.system, float(process.memory_info().rss)
    except psutil.Error:
        return None


def _collect_cores(devices: Mapping[int, Placed]) -> Iterator[Metric]:
    cores = psutil.cpu_times(percpu=True)
    busy = [times.user + times.nice + times.system + times.irq + times.softirq for times in cores]
    yield counters(
        "dtp_device_cores_busy_seconds",
        "Time a device's cores worked, for whomever; compare with its worker's processor time. Does a "
        "neighbour use our cores?",
        ["device"],
        (
            ((str(device),), sum(busy[core] for core in placed.cores if core < len(busy)))
            for device, placed in devices.items()
        ),
    )
    pool = {core for placed in devices.values() for core in placed.cores if core < len(busy)}
    yield counter(
        "dtp_pool_cores_busy_seconds",
        "The same over all devices' cores, each counted once. How much is left of the machine?",
        sum(busy[core] for core in pool),
    )
    yield counter(
        "dtp_node_cpu_steal_seconds",
        "Time the hypervisor gave our cores to others. Is the machine what it says it is?",
        sum(times.steal for times in cores),
    )
