"""Clocks: the system's and the one that tests turn by hand."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.clock import Clock, ManualClock, SystemClock


def test_a_manual_clock_moves_only_when_told_to() -> None:
    clock: Clock = ManualClock(10.0)
    assert isinstance(clock, ManualClock)
    assert clock.now() == clock.now() == 10.0
    clock.advance(2.5)
    assert clock.now() == 12.5
    clock.advance(0)
    assert clock.now() == 12.5


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_a_manual_clock_never_goes_back(steps: list[float]) -> None:
    clock = ManualClock()
    for step in steps:
        before = clock.now()
        clock.advance(step)
        assert clock.now() >= before


def test_time_does_not_go_back() -> None:
    clock = ManualClock(1.0)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-0.1)
    assert clock.now() == 1.0


def test_the_system_clock_is_monotonic() -> None:
    clock: Clock = SystemClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)
    assert time.monotonic() >= times[-1]


def test_the_system_clock_is_comparable_between_processes() -> None:
    clock = SystemClock()
    before = clock.now()
    code = "from dynamictp.clock import SystemClock; print(repr(SystemClock().now()))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert before <= float(other.stdout) <= clock.now()
