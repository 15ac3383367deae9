"""A hundred random faults under sixteen streams (`scripts/test --fault`)."""

from __future__ import annotations

import os
import random

import pytest

from dynamictp.testing.faults import run_faults

pytestmark = pytest.mark.fault


@pytest.mark.timeout(3600)
async def test_a_hundred_faults_change_no_bit() -> None:
    seed = int(os.environ.get("DYNAMICTP_SEED", random.SystemRandom().randrange(1 << 20)))
    print(f"seed {seed}")
    report = await run_faults(seed, 100, progress=print)
    print("\n".join(report.lines()))
    assert not report.gate.faults
    assert report.faults >= 100
    assert report.gate.crossed > 0
