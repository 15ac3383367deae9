"""The gate with real processes: 30 switches in the suite, 1,000 by request (`scripts/test --soak`)."""

from __future__ import annotations

import random

import pytest

from dynamictp.testing.gate_http import run_gate


@pytest.mark.multi
@pytest.mark.timeout(240)
async def test_thirty_switches_change_no_bit() -> None:
    seed = random.SystemRandom().randrange(1 << 20)
    print(f"seed {seed}")
    report = await run_gate(seed, 30, distinct=24, longest_output=48)
    print("\n".join(report.lines()))
    assert not report.faults
    assert report.crossed > 0


@pytest.mark.soak
@pytest.mark.timeout(4000)
async def test_thousand_switches_change_no_bit() -> None:
    seed = random.SystemRandom().randrange(1 << 20)
    print(f"seed {seed}")
    report = await run_gate(seed, 1000, distinct=200, progress=print)
    print("\n".join(report.lines()))
    assert not report.faults
    assert report.recomputes > 0
    assert report.handovers > 0
