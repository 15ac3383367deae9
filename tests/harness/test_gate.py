"""The gate in one process: 300 random switches, every stream equal to the undisturbed run, bit by bit."""

from __future__ import annotations

import random

import pytest

from dynamictp.testing.gate_threads import run_threaded_gate


@pytest.mark.timeout(300)
def test_three_hundred_switches_change_no_bit() -> None:
    seed = random.SystemRandom().randrange(1 << 20)
    print(f"seed {seed}")
    report = run_threaded_gate(seed, 300)
    print("\n".join(report.lines()))
    assert not report.faults
    assert report.handovers > 0
    assert report.recomputes > 0
    assert report.crossed > 0
    assert report.cancelled > 0
    assert report.ramped > 0
    assert report.cancelled_switches > 0
