"""The stack of `server_stack` with a planner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dynamictp.advisor.local import ASSUMPTIONS
from dynamictp.control.config import ControlConfig, SloTable
from dynamictp.control.facts import PoolFacts
from dynamictp.control.values import Mode
from dynamictp.cost.figures import Figure
from dynamictp.cost.hardware import DeviceFacts, EngineLimits, LinkFacts
from dynamictp.cost.shape import ModelShape
from dynamictp.server.control_plane import ControlPlane
from tests.server.server_stack import Stack, facts, running_stack

CONFIG = ControlConfig(slo=SloTable(ttft_p99_s=2.0), ramp_observe_s=0.25)


def pool_facts() -> PoolFacts:
    device = DeviceFacts(
        name="core",
        memory_bytes=1e9,
        bandwidth=Figure(10e9, "assumed", "test"),
        shared_bandwidth=Figure(20e9, "assumed", "test"),
        bf16_flops=Figure(100e9, "assumed", "test"),
        shared_memory=True,
        node_devices=2,
    )
    limits = EngineLimits(max_batched_tokens=64, max_num_seqs=8, max_step_s=0.1, kv_cap=0.7)
    link = LinkFacts("memory", Figure(20e9, "assumed", "test"), Figure(1e-6, "assumed", "test"))
    return PoolFacts(
        ModelShape.of(facts()), device, limits, 1000.0, links=((2, link),), assumptions=ASSUMPTIONS
    )


@asynccontextmanager
async def planned(
    mode: Mode = "dynamic", config: ControlConfig = CONFIG, **engine: Any
) -> AsyncIterator[tuple[Stack, ControlPlane]]:
    """The loop is not run: tests make the ticks."""
    async with running_stack(mode=mode, **engine) as stack:
        yield stack, stack.service.plan_with(pool_facts(), config)
