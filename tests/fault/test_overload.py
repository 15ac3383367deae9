"""Twice as much as the server can do, and then normal service again (`scripts/test --fault`)."""

from __future__ import annotations

import os
import random

import pytest

from dynamictp.testing.overload import run_overload

pytestmark = pytest.mark.fault

SECONDS = 25.0


@pytest.mark.timeout(300)
async def test_twice_the_capacity() -> None:
    seed = int(os.environ.get("DYNAMICTP_SEED", random.SystemRandom().randrange(1 << 20)))
    report = await run_overload(seed, SECONDS)
    print("\n".join(report.lines()))
    assert not report.faults
