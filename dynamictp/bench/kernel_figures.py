"""The kernels by themselves, as `python -m dynamictp.kernels.bench` prints them: no server, one process.

In a process of its own: it needs torch for its tables, which the rest of the bench does without.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from dynamictp.errors import FatalError

# Decode at a short context and a prefill; then 16 streams with long contexts.
RUNS = ((), ("--context", "1000", "--batch", "16", "--prefill", "0"))
QUICK_RUNS = (("--steps", "5", "--batch", "1", "--batch", "16", "--prefill", "0"),)


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """Lines of text as they were printed: machine and level first, then a line per degree and batch."""

    lines: tuple[str, ...]


def measure_kernels(runs: tuple[tuple[str, ...], ...] = RUNS) -> KernelFigures:
    """About half a minute. Raises FatalError when the kernels' benchmark fails."""
    lines: list[str] = []
    for flags in runs:
        command = [sys.executable, "-m", "dynamictp.kernels.bench", "--no-probe", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise FatalError(f"the kernels' benchmark failed\n{ended.stderr[-2000:]}")
        lines += [line for line in ended.stdout.splitlines() if line not in lines]
    return KernelFigures(tuple(lines))
