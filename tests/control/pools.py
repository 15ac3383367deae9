"""Pools for policy tests: the CPU node of two cores, and a node of eight GPUs. All figures are fixed."""

from __future__ import annotations

from typing import Any

from dynamictp.bench.workload.classes import TrafficClass, Workload
from dynamictp.bench.workload.lengths import Lengths
from dynamictp.bench.workload.plan import make_plan
from dynamictp.control.config import ControlConfig, build_control
from dynamictp.control.facts import PoolFacts
from dynamictp.cost.figures import Figure
from dynamictp.cost.hardware import Assumptions, DeviceFacts, EngineLimits, LinkFacts
from dynamictp.cost.shape import ModelShape
from dynamictp.layout import legal_specs
from dynamictp.sim.pool import PoolOutcome, Setup, SimPool
from dynamictp.sim.requests import SimRequest, requests_of
from dynamictp.sim.values import SwitchTimes


def figure(value: float) -> Figure:
    return Figure(value, "measured", "fixed for tests")


SMALL = ModelShape("135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True)
LARGE = ModelShape("70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192)


def cpu_facts(shared_gbps: float = 36.0, slower: float = 1.0) -> PoolFacts:
    """Two cores that share a memory of 36 GB/s (or 60, its other state); `slower` scales the device."""
    return PoolFacts(
        shape=SMALL,
        device=DeviceFacts(
            name="core",
            memory_bytes=8e9,
            bandwidth=figure(30e9 / slower),
            bf16_flops=figure(235e9 / slower),
            shared_bandwidth=figure(shared_gbps * 1e9 / slower),
            shared_memory=True,
            node_devices=2,
        ),
        limits=EngineLimits(max_batched_tokens=512, max_num_seqs=64, max_step_s=0.1, page_tokens=64),
        kv_tokens_per_device=40_000,
        links=((2, LinkFacts("memory", figure(15e9), figure(1e-6))),),
        assumptions=Assumptions(
            compute_efficiency=figure(0.85), memory_efficiency=figure(0.85), link_efficiency=figure(0.5),
            overlap=figure(0.5), collective_base_s=figure(0.0), step_overhead_s=figure(1e-3 * slower),
        ),
    )  # fmt: skip


def gpu_facts() -> PoolFacts:
    """A 70B model on 80 GB devices behind NVLink; one device does not hold it."""
    return PoolFacts(
        shape=LARGE,
        device=DeviceFacts("a100", 80e9, figure(2.039e12), figure(312e12)),
        limits=EngineLimits(max_batched_tokens=2048, max_num_seqs=256),
        kv_tokens_per_device=40_000,
        links=((2, LinkFacts("NV12", figure(300e9), figure(1.5e-6), direct=True)),),
    )


CPU_LEGAL = ("tp1", "tp2", "tp1+tp1")
GPU_LEGAL = tuple(map(str, legal_specs(range(2, 9), 8)))
CPU_SLO = {"ttft_p99_s": 2.0, "ttft_per_token_ms": 2.0, "tpot_p99_ms": 100.0}


def config(**values: Any) -> ControlConfig:
    return build_control({"slo": CPU_SLO, **values})


def cpu_setup(layout: str = "tp1", **values: Any) -> Setup:
    """Two cores under the planner. Steps vary by 5 %."""
    defaults: dict[str, Any] = {
        "facts": cpu_facts(), "devices": 2, "legal": CPU_LEGAL, "layout": layout, "config": config(),
        "noise": 0.05,
    }  # fmt: skip
    return Setup(**{**defaults, **values})


def gpu_setup(layout: str = "tp2", **values: Any) -> Setup:
    """Eight GPUs under the planner, with switches of seconds."""
    defaults: dict[str, Any] = {
        "facts": gpu_facts(), "devices": 8, "legal": GPU_LEGAL, "layout": layout,
        "config": build_control({"drain_deadline_s": 5.0}), "noise": 0.05,
        "times": SwitchTimes(prepare_s=0.8, commit_s=0.005),
    }  # fmt: skip
    return Setup(**{**defaults, **values})


def traffic(
    arrivals: str,
    duration_s: float,
    *,
    prompt: tuple[float, float] = (100, 200),
    output: tuple[float, float] = (60, 120),
    seed: int = 1,
    scale: float = 1.0,
) -> list[SimRequest]:
    """Requests of one class; lengths are (mean, P95)."""
    kind = TrafficClass("chat", Lengths(*prompt), Lengths(*output))
    workload = Workload((kind,), arrivals, duration_s, seed=seed, scale=scale, longest_tokens=8000)
    return requests_of(make_plan(workload))


def simulate(setup: Setup, requests: list[SimRequest], duration_s: float, **more: Any) -> PoolOutcome:
    return SimPool(setup).run(requests, duration_s, **more)
