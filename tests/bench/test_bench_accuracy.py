from __future__ import annotations

from dataclasses import replace

import pytest

from dynamictp.bench.accuracy import Accuracy, ClientFigures, accuracy
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.errors import FatalError


def stream(due_s: float, errors_s: tuple[float, ...], late_s: float = 0.0) -> Result:
    left_s = [due_s + 1.0 + i for i in range(len(errors_s))]
    chunk_s = tuple(stamp + error for stamp, error in zip(left_s, errors_s, strict=True))
    text = "".join(f" {stamp:.6f}" for stamp in left_s)
    return Result(Request(0.0, "x", 5), due_s, due_s + late_s, 9.0, chunk_s, (1,) * len(chunk_s), text)


def test_errors_are_arrival_minus_departure() -> None:
    seen = accuracy([stream(0.0, (0.001, 0.003)), stream(1.0, (0.002, 0.002), late_s=0.5)], 0.25)
    assert seen.ttft_error.mean == pytest.approx(0.0015)
    assert seen.token_error.max == pytest.approx(0.003)
    assert seen.gap_error is not None
    assert seen.gap_error.max == pytest.approx(0.002)
    assert seen.dispatch.max == 0.5
    assert seen.delivered == pytest.approx(1 / 1.5)
    assert seen.cpu_share == 0.25


def test_a_failed_request_is_no_accuracy() -> None:
    failed = replace(stream(0.0, (0.001,)), failure=Failure(FailureKind.TIMEOUT, "late"))
    with pytest.raises(FatalError, match="failed"):
        accuracy([failed], 0.1)


def test_the_verdict_takes_all_of_stamps_rate_and_stall() -> None:
    good: Accuracy = accuracy([stream(i * 0.01, (0.001,) * 5) for i in range(100)], 0.1)
    figures = ClientFigures(good, good, 500.0, 100, 0.51, 0.5)
    assert figures.held
    slow = accuracy([stream(i * 0.01, (0.003,) * 5) for i in range(100)], 0.1)
    assert not replace(figures, streams=slow).held
    assert not replace(figures, rate=replace(good, delivered=0.98)).held
    assert not replace(figures, stall_ttft_mean_s=0.1).held  # omitted
