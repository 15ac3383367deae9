"""This computer as a machine of the advisor: cores as devices, bandwidth and arithmetic measured shortly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from dynamictp.advisor.machine import Machine
from dynamictp.advisor.topology import Link, LinkKind, uniform
from dynamictp.advisor.topology_file import NodeSet
from dynamictp.bench.machine import describe_machine
from dynamictp.cost.calibration import Calibration
from dynamictp.cost.figures import Figure
from dynamictp.cost.hardware import GIB, Assumptions, DeviceFacts, EngineLimits
from dynamictp.errors import ResourceError

_SECONDS = 0.4
_MOST_READERS = 8
_KV_FRACTION, _KV_LIMIT = 0.25, 8 * GIB

LIMITS = EngineLimits(
    max_batched_tokens=512, max_num_seqs=64, max_step_s=0.1, page_tokens=64, communicators=1
)
"""The server's defaults on CPU devices."""

ASSUMPTIONS = Assumptions(
    compute_efficiency=Figure(0.85, "assumed", "of the measured matrix product", 0.97, 0.6, 1.0),
    memory_efficiency=Figure(0.85, "assumed", "of the measured read", 0.97, 0.65, 1.0),
    link_efficiency=Figure(0.5, "assumed", "of memory bandwidth, for exchanges through it", 0.8, 0.3, 1.0),
    overlap=Figure(0.5, "assumed", "a core computes while its prefetchers read", 0.9, 0.0, 1.0),
    collective_base_s=Figure(0.0, "assumed", "no kernel to start"),
    step_overhead_s=Figure(3e-3, "assumed", "Python and messages of one step", 1e-3, 8e-3, 0.0),
    request_overhead_s=Figure(
        10e-3, "assumed", "HTTP, tokenizer and messages on cores that also compute", 4e-3, 25e-3, 0.0
    ),
)


class Measured(msgspec.Struct, frozen=True):
    """What was measured. Bytes per second and FLOP per second."""

    one_core_bandwidth: float
    all_cores_bandwidth: float
    core_flops: float
    flops_note: str


def measured_by(calibration: Calibration) -> Measured | None:
    """What a calibration's ratios refer to, None when it was made for a device of the table."""
    if not (calibration.bandwidth and calibration.shared_bandwidth and calibration.flops):
        return None
    return Measured(
        calibration.bandwidth, calibration.shared_bandwidth, calibration.flops, "as when it was calibrated"
    )


def measure(cores: int) -> Measured:
    """About two seconds: one reader, then one per core, then float32 products on one core.

    Raises `ResourceError` when there is not enough memory to measure.
    """
    one, together = read_bandwidth(1), read_bandwidth(min(cores, _MOST_READERS))
    flops, note = core_flops()
    return Measured(one, max(one, together), flops, note)


def read_bandwidth(readers: int, seconds: float = _SECONDS) -> float:
    """Bytes per second that so many processes read together, each from its own memory."""
    command = [sys.executable, "-m", "dynamictp.bench.memread", str(seconds)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(readers)
    ]
    try:
        for process in running:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise ResourceError("the memory measurement did not start; it needs 0.5 GB a core")
        for process in running:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return sum(float(process.communicate()[0]) for process in running) * 1e9
    finally:
        for process in running:
            process.kill()
            process.communicate()


def core_flops(seconds: float = _SECONDS) -> tuple[float, str]:
    """(FLOP/s of 16-bit products on one core, how it was found)."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dynamictp.advisor.local_gemm", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        return 2 * float(
            done.stdout
        ), "twice the measured float32 product: the processor has bf16 dot products"
    return float(done.stdout), "measured float32 product: the processor has no bf16 dot products"


def local_machine(devices: int = 0, measured: Measured | None = None) -> tuple[Machine, EngineLimits]:
    """This computer, one device a core (`devices` 0: all usable cores), and the server's limits on it."""
    facts = describe_machine()
    count = devices or facts.usable_cores
    found = measured or measure(facts.usable_cores)
    available = _available_bytes()
    device = DeviceFacts(
        name=f"one core of {facts.cpu}",
        memory_bytes=available / count,
        bandwidth=Figure(found.one_core_bandwidth, "measured", "one process reading memory"),
        shared_bandwidth=Figure(found.all_cores_bandwidth, "measured", "all cores reading together"),
        bf16_flops=Figure(found.core_flops, "measured", found.flops_note),
        shared_memory=True,
        node_devices=count,
    )
    nodes = NodeSet(uniform(count, Link(LinkKind.PIX), source="one memory"))
    limits = msgspec.structs.replace(LIMITS, kv_bytes=min(available * _KV_FRACTION, float(_KV_LIMIT)))
    return Machine(device, nodes), limits


def _available_bytes() -> float:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
