"""Settings of every test run: one thread per process, reproducible property tests in CI."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# Before a test module imports torch: exact numerics need one thread per worker. Children inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# Examples wait for threads and processes on a shared machine: their time says nothing.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests of interrupts would
# then depend on how the suite was started.
signal.signal(signal.SIGINT, signal.default_int_handler)
