"""What a process asks of the system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamictp.process import core_wait_s


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count it")
def test_the_wait_for_a_core_is_that_of_the_kernel_and_only_grows() -> None:
    def of_first_thread() -> float:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9

    before = of_first_thread()
    waited = core_wait_s(os.getpid())
    assert waited >= before > 0.0
    assert core_wait_s(os.getpid()) >= waited


def test_a_process_that_is_gone_waits_no_more() -> None:
    assert core_wait_s(0) == 0.0
