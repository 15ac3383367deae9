"""Half an hour of everything at once, after which nothing has grown (`scripts/test --soak`)."""

from __future__ import annotations

import os
import random

import pytest

from dynamictp.testing.soak.run import run_soak

pytestmark = pytest.mark.soak

MINUTES = float(os.environ.get("DYNAMICTP_SOAK_MINUTES", "30"))


@pytest.mark.timeout(MINUTES * 60 + 900)
async def test_nothing_grows_in_half_an_hour() -> None:
    seed = int(os.environ.get("DYNAMICTP_SEED", random.SystemRandom().randrange(1 << 20)))
    print(f"seed {seed}")
    report = await run_soak(seed, MINUTES, progress=print)
    print("\n".join(report.lines()))
    assert not report.faults
