"""Damaged model files: each loads or is refused; none crashes, hangs or takes memory beyond its size."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

SEED = int(os.environ.get("DYNAMICTP_FUZZ_SEED", "0"))

SABOTAGE = """
import os, sys
from tests.model.mutants import run

def use(path):
    number = next(numbers)
    if number == 1:
        os.abort()
    if number == 2:
        bytearray(1 << 30)
    if number == 3:
        while True:
            pass
    return "loaded"

class Counter:
    # Counts over children, which share nothing: by the size of a file.
    def __next__(self):
        with open(sys.argv[1], "ab") as file:
            file.write(b"x")
            return file.tell() - 1

numbers, run.use, run.CPU_S = Counter(), use, 0.2
for outcome in run.open_all(0, range(5), None):
    print(*outcome[:2], sep="|")
"""


def opened(seed: int, count: int) -> dict[str, Any]:
    """What became of the mutants of a run. The process forks, so it is not this one, and has no torch."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.mutants.run", "--seed", str(seed), "--count", str(count)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_any_mutant_loads_or_is_refused() -> None:
    result = opened(SEED, 500)
    assert result["faults"] == []
    assert result["sound"] == ["loaded"] * 4
    assert result["outcomes"]["loaded"] > 50
    assert result["outcomes"]["refused"] > 200


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_ten_thousand_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    seed = SEED or random.randrange(1 << 32)
    with capsys.disabled():
        print(f"\nDYNAMICTP_FUZZ_SEED={seed}", end=" ")
    result = opened(seed, 10_000)
    assert result["faults"] == []
    with capsys.disabled():
        print(result["outcomes"], end=" ")


def test_a_mutant_that_ends_its_process_is_named_and_the_next_ones_are_opened(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SABOTAGE, str(tmp_path / "count")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:-1] == [
        "0|loaded",
        "1|crash: SIGABRT",
        "2|MemoryError: ",
        "3|too much CPU time",
        "4|loaded",
    ]
