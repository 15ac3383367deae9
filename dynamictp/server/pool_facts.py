"""What the planner's cost model starts from: this machine and model. Online calibration corrects it."""

from __future__ import annotations

from pathlib import Path

from dynamictp.advisor.graph import SHARED_MEMORY_HOP
from dynamictp.advisor.local import ASSUMPTIONS, Measured, local_machine, measured_by
from dynamictp.config import ServeConfig
from dynamictp.control.facts import PoolFacts
from dynamictp.cost.calibration import Calibration
from dynamictp.cost.hardware import EngineLimits, LinkFacts
from dynamictp.cost.shape import ModelShape
from dynamictp.kv import switching_cap
from dynamictp.server.plan import NodePlan

TYPICAL = Measured(
    one_core_bandwidth=25e9,
    all_cores_bandwidth=40e9,
    core_flops=200e9,
    flops_note="a server core with 16-bit dot products",
)
"""Assumed until steps are measured: the first requests do that, and a wrong guess is corrected by them."""


def pool_facts(config: ServeConfig, plan: NodePlan) -> PoolFacts:
    """Model, devices and limits. Raises `ConfigError` for a calibration file that can't be used."""
    calibration = Calibration.load(Path(config.calibration)) if config.calibration else None
    measured = (measured_by(calibration) if calibration is not None else None) or TYPICAL
    machine, _ = local_machine(plan.devices, measured)
    cap = switching_cap(plan.devices)
    memory = machine.device.shared_bandwidth or machine.device.bandwidth
    return PoolFacts(
        shape=ModelShape.of(plan.facts, config.model_name, config.dtype),
        device=machine.device,
        limits=EngineLimits(
            max_batched_tokens=config.max_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_step_s=config.max_step_ms * 1e-3,
            page_tokens=config.page_tokens,
            kv_cap=cap,
            kv_bytes=plan.arena_bytes,
            communicators=1,
        ),
        kv_tokens_per_device=plan.kv_tokens * cap / plan.most_devices,
        links=((2, LinkFacts("shared memory", memory, SHARED_MEMORY_HOP)),),
        assumptions=ASSUMPTIONS,
        calibration=calibration,
    )
