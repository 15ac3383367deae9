"""How fast a recorded server was: step times by degree and size, time between steps, and drift.

All of it comes from the record itself, the drift of a shared machine too: what a replay predicts is what the
server made of that speed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

import msgspec

from dynamictp.bench.record import Run
from dynamictp.control.calibrate import expected_s
from dynamictp.control.facts import PoolFacts
from dynamictp.control.journal import Entry
from dynamictp.control.values import StepSample
from dynamictp.cost.calibration import Calibration, CalibrationPoint
from dynamictp.cost.steps import StepModel
from dynamictp.errors import ConfigError
from dynamictp.sim.values import Drift

_LEAST_SAMPLES = 3
_WINDOW_S = 10.0
_PREFILL_SIZE = 64
"""Tokens of a step from which on it counts as one of prefill."""
_STEP_SECONDS = re.compile(
    r"dtp_step_seconds_total\{part=(?P<part>\w+)\}\{phase=(?P<phase>\w+)\}\{tp=(?P<tp>\d+)\}"
)
"""As the benchmark keeps the metric's name and labels."""
_TAIL = 8.0
"""A step that took so many times its median was interrupted from outside: it says nothing of the server."""


def calibrated(facts: PoolFacts, steps: Sequence[StepSample]) -> Calibration:
    """Measured ÷ expected times of steps by degree and size, means within powers of two.

    Raises `ConfigError` when there are no steps to learn from.
    """
    plain = msgspec.structs.replace(facts, calibration=None)
    models: dict[tuple[int, int], StepModel] = {}
    ratios: dict[tuple[int, bool, int], list[tuple[int, float]]] = {}
    for sample in steps:
        size = sample.rows + sample.prefill_tokens
        if sample.seconds <= 0 or not size:
            continue
        key = sample.tp, max(sample.active_devices, sample.tp)
        if key not in models:
            models[key] = StepModel(plain.domain(*key, None))
        ratio = sample.seconds / expected_s(sample, models[key])
        bucket = sample.tp, sample.prefill_tokens > 0, size.bit_length()
        ratios.setdefault(bucket, []).append((size, ratio))
    points: list[CalibrationPoint] = []
    for (tp, prefill, _), found in sorted(ratios.items()):
        if len(found) < _LEAST_SAMPLES:
            continue
        size = round(math.exp(fmean(math.log(size) for size, _ in found)))
        ratio = _mean_without_stalls([ratio for _, ratio in found])
        points.append(CalibrationPoint("base", tp, size, ratio))
        points.append(CalibrationPoint("prompt_attention" if prefill else "attention", tp, size, ratio))
    if not points:
        raise ConfigError("the journal holds too few measured steps to calibrate with")
    return Calibration(facts.shape.name, facts.device.name, "steps of a recorded run", _merged(points))


def _mean_without_stalls(ratios: Sequence[float]) -> float:
    limit = _TAIL * median(ratios)
    return fmean(ratio for ratio in ratios if ratio <= limit)


def _merged(points: Iterable[CalibrationPoint]) -> tuple[CalibrationPoint, ...]:
    """One point for each operation, degree and size: decode and prefill steps of one size are averaged."""
    by_key: dict[tuple[str, int, int], list[CalibrationPoint]] = {}
    for point in points:
        by_key.setdefault((point.op, point.tp, point.size), []).append(point)
    return tuple(
        msgspec.structs.replace(same[0], ratio=fmean(point.ratio for point in same))
        for _, same in sorted(by_key.items())
    )


def with_host(calibration: Calibration, run: Run) -> Calibration:
    """With the time between steps, by degree and phase, as the server's metrics count it."""
    spent: dict[tuple[int, str], list[float]] = {}
    for name, after in run.server.metrics_after.items():
        found = _STEP_SECONDS.fullmatch(name)
        if found is None:
            continue
        seconds = after - (run.server.metrics_before.get(name) or 0.0)
        key = int(found["tp"]), found["phase"]
        spent.setdefault(key, [0.0, 0.0])[found["part"] == "host"] += seconds
    host = {key: 1 + between / steps for key, (steps, between) in spent.items() if steps > 0}
    points = []
    for point in calibration.points:
        phase = "decode" if point.op == "attention" or point.size < _PREFILL_SIZE else "prefill"
        factor = host.get((point.tp, phase), 1.0)
        points.append(msgspec.structs.replace(point, ratio=point.ratio * factor))
    return msgspec.structs.replace(calibration, points=tuple(points))


def drift_of(facts: PoolFacts, entries: Sequence[Entry]) -> tuple[Drift, float]:
    """(speed of the machine over time, scatter of a step around it): means and the standard deviation of the
    logarithm of measured ÷ expected, stalls left out."""
    models: dict[tuple[int, int], StepModel] = {}
    windows: dict[int, list[float]] = {}
    for entry in entries:
        for sample in entry.snapshot.steps:
            if not sample.exclusive or sample.seconds <= 0 or not sample.rows + sample.prefill_tokens:
                continue
            key = sample.tp, max(sample.active_devices, sample.tp)
            if key not in models:
                models[key] = StepModel(facts.domain(*key, facts.calibration))
            value = math.log(sample.seconds / expected_s(sample, models[key]))
            if abs(value) <= math.log(_TAIL):
                windows.setdefault(int(entry.snapshot.time_s // _WINDOW_S), []).append(value)
    drift: list[tuple[float, float]] = []
    rest: list[float] = []
    for number, values in sorted(windows.items()):
        if len(values) < _LEAST_SAMPLES:
            continue
        centre = fmean(values)
        rest += [value - centre for value in values]
        # The mean of the times, not of their logarithms, decides how long a batch takes.
        drift.append((number * _WINDOW_S, fmean(math.exp(value) for value in values)))
    return tuple(drift), stdev(rest) if len(rest) > 1 else 0.0
