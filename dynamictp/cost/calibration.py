"""Measured step times as corrections of the cost model. Pure.

A point says how much longer (or shorter) a step of a given degree and size took than the uncalibrated model
expected. The model's form stays, so sizes between points are interpolated and other loads extrapolated.
Untried degrees inherit the ratio of the nearest measured one, with that provenance (design 10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from dynamictp.cost.figures import Figure
from dynamictp.errors import ConfigError

Op = Literal["base", "attention", "prompt_attention"]
"""`base` is all of a step but attention; `attention` reads the cache for decoding rows, `prompt_attention`
is that of prompts."""

CLAMP = 30.0
"""Ratios beyond this either way are kept at it: the device is described wrongly, and a pegged ratio shows."""
MEASURED_SPREAD = 0.15
INHERITED_SPREAD = 0.35


class CalibrationPoint(msgspec.Struct, frozen=True):
    """One measured operation: `size` in tokens of the step (rows for decode)."""

    op: Op
    tp: int
    size: int
    ratio: float
    """Measured ÷ expected time."""


class RequestPoint(msgspec.Struct, frozen=True):
    """Time of a request outside of steps while so many devices computed: client to engine, and the first
    token back. Seconds; `low_s` and `high_s` are the quartiles over the requests measured.
    """

    busy_devices: int
    seconds: float
    low_s: float
    high_s: float
    added_s: float = 0.0
    """What a request adds to the steps of those that run beside it, beyond what its tokens do: the host works
    for it on the cores that compute, or beside them on their memory."""


class CrowdedPoint(msgspec.Struct, frozen=True):
    """How many times slower the memory of a domain of `tp` is than its bandwidths say, while so many devices
    of the node compute: what they do to each other, and the host's work to all of them.
    """

    tp: int
    busy_devices: int
    slowdown: float


class Correction(msgspec.Struct, frozen=True):
    """What to multiply a time by, and how far the truth may lie from it as a fraction."""

    ratio: float
    spread: float
    inherited: bool
    pegged: bool


class Curve(msgspec.Struct, frozen=True):
    """Corrections of one operation and degree: (size, ratio), by rising size."""

    points: tuple[tuple[int, float], ...]
    inherited: bool

    def at(self, size: float) -> Correction:
        """Interpolated in the logarithm of the size, clamped."""
        ratio = _interpolated(self.points, max(size, 1.0))
        clamped = min(max(ratio, 1 / CLAMP), CLAMP)
        spread = INHERITED_SPREAD if self.inherited else MEASURED_SPREAD
        return Correction(clamped, spread, self.inherited, clamped != ratio)


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Corrections for one model on one kind of device. `source` says when and how they were measured."""

    model: str
    device: str
    source: str
    points: tuple[CalibrationPoint, ...]
    bandwidth: float = 0.0
    """Bytes/s of one device that the ratios refer to; 0: the device's data sheet. So, too, the next two."""
    shared_bandwidth: float = 0.0
    flops: float = 0.0
    requests: tuple[RequestPoint, ...] = ()
    """By rising number of busy devices; empty: not measured."""
    crowded: tuple[CrowdedPoint, ...] = ()
    """Measured beside other domains; a domain alone has its ratios."""
    version: int = 1

    def curve(self, op: Op, tp: int) -> Curve | None:
        """Ratios of the nearest measured degree over sizes; None without points of that kind."""
        known = [point for point in self.points if point.op == op]
        if not known:
            return None
        degree = min({point.tp for point in known}, key=lambda other: abs(math.log(other / tp)))
        points = sorted((point.size, point.ratio) for point in known if point.tp == degree)
        return Curve(tuple(points), inherited=degree != tp)

    def correction(self, op: Op, tp: int, size: float) -> Correction | None:
        """Ratio for a step, interpolated in the logarithm of the size; None without points of that kind."""
        curve = self.curve(op, tp)
        return None if curve is None else curve.at(size)

    def request_s(self, busy_devices: float) -> Figure | None:
        """Time of a request outside of steps, linear between the measured points and held at the ends."""
        if not self.requests:
            return None
        left, right, share = _around(self.requests, busy_devices)
        return Figure(
            left.seconds + share * (right.seconds - left.seconds),
            "measured",
            f"{self.source}, beside {busy_devices:g} busy devices; range: quartiles of the requests",
            better=left.low_s + share * (right.low_s - left.low_s),
            worse=left.high_s + share * (right.high_s - left.high_s),
            ideal=0.0,
        )

    def request_added_s(self, busy_devices: float) -> float:
        """What a request adds to the steps beside it, beyond its tokens; 0 where that was not measured."""
        if not self.requests:
            return 0.0
        left, right, share = _around(self.requests, busy_devices)
        return left.added_s + share * (right.added_s - left.added_s)

    def slowdown(self, tp: int, busy_devices: int) -> float:
        """Of memory beside other domains; 1 where just that was not measured."""
        found = (p for p in self.crowded if (p.tp, p.busy_devices) == (tp, busy_devices))
        return next((point.slowdown for point in found), 1.0)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Measured degrees; others inherit."""
        return tuple(sorted({point.tp for point in self.points}))

    @property
    def pegged(self) -> bool:
        """A ratio is beyond the clamp: an alarm, not a correction."""
        return any(not 1 / CLAMP <= point.ratio <= CLAMP for point in self.points)

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Raises `ConfigError` when the file is missing or no calibration of this version."""
        try:
            calibration = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"{path}: no calibration file ({reason}); make one with `dynamictp calibrate URL`"
            ) from error
        busy = [point.busy_devices for point in calibration.requests]
        positive = [p.ratio for p in calibration.points] + [p.slowdown for p in calibration.crowded]
        times = [s for p in calibration.requests for s in (p.seconds, p.low_s, p.high_s, p.added_s)]
        usable = (
            all(value > 0 for value in positive)
            and all(seconds >= 0 for seconds in times)
            and busy == sorted(set(busy))
        )
        if calibration.version != 1 or not usable:
            raise ConfigError(f"{path}: version {calibration.version} or a figure is unusable; make it again")
        return calibration


def _around(points: Sequence[RequestPoint], busy: float) -> tuple[RequestPoint, RequestPoint, float]:
    """The two points to interpolate between, twice the same beyond the ends, and the right one's share."""
    right = next((point for point in points if point.busy_devices >= busy), points[-1])
    left = next((point for point in reversed(points) if point.busy_devices <= busy), points[0])
    gap = right.busy_devices - left.busy_devices
    return left, right, min(max((busy - left.busy_devices) / gap, 0.0), 1.0) if gap else 0.0


def _interpolated(curve: Sequence[tuple[int, float]], size: float) -> float:
    """Log-log interpolation; the nearest end beyond the measured sizes."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if size <= right:
            share = math.log(size / left) / math.log(right / left)
            return math.exp(math.log(low) * (1 - share) + math.log(high) * share)
    return curve[-1][1]
