"""An outside job for leased devices: `python -m dynamictp.bench.dynamic.job FILE`.

It computes until it is told to leave, and appends what it did since the last line to FILE twice a second.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec

EVERY_S = 0.5
_ROUNDS = 20_000


class Progress(msgspec.Struct, frozen=True):
    """Work done within half a second. `at_s` is Unix time; `rounds` are of a fixed piece of arithmetic."""

    at_s: float
    rounds: int
    cpu_s: float
    cores: tuple[int, ...]


def read_progress(path: Path) -> list[Progress]:
    """Every whole line of the file; none when it does not exist."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Progress) for line in lines]


def work(path: Path) -> None:
    """Until SIGTERM."""
    leaving: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        leaving.append(number)

    signal.signal(signal.SIGTERM, leave)
    value, rounds, due, cpu_s = 1, 0, time.monotonic() + EVERY_S, time.process_time()
    with path.open("ab") as out:
        while not leaving:
            for _ in range(_ROUNDS):
                value = (value * 48_271) % 2_147_483_647  # Lehmer's generator: nothing to leave out
            rounds += 1
            if time.monotonic() >= due:
                now_s = time.process_time()
                done = Progress(time.time(), rounds, now_s - cpu_s, tuple(sorted(os.sched_getaffinity(0))))
                out.write(msgspec.json.encode(done) + b"\n")
                out.flush()
                rounds, due, cpu_s = 0, time.monotonic() + EVERY_S, now_s


if __name__ == "__main__":
    work(Path(sys.argv[1]))
