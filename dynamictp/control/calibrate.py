"""Online calibration: measured ÷ predicted step times per (degree, phase), as a value. Pure.

Only exclusive steps of warmed-up domains count. The ratio in force is a robust median, clamped; it moves in
steps, so that the tables made with it last. A degree that was never tried inherits from the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from statistics import median

import msgspec

from dynamictp.control.values import Phase, StepSample
from dynamictp.cost.calibration import Calibration, CalibrationPoint, Op
from dynamictp.cost.steps import StepModel

_KEPT = 31
_FIRST = 8
"""Samples of a kind before its ratio is used."""
_STEP = 0.05
"""Ratios in force are powers of e^0.05, and change when the median is more than 2 steps away."""
_DECODE_SIZE, _PREFILL_SIZE = 16, 128
"""Tokens of a step up to which the decode ratio holds, and from which the prefill ratio does."""

Ratios = tuple[tuple[int, Phase, float], ...]
"""(degree, phase, ratio in force), sorted."""


class Track(msgspec.Struct, frozen=True):
    """What was learnt of one (degree, phase)."""

    tp: int
    phase: Phase
    recent: tuple[float, ...] = ()
    """Logarithms of measured ÷ predicted, the newest last."""
    steps: int | None = None
    """Ratio in force as a power of e^0.05; None before there are enough samples."""
    pegged: bool = False
    """The median of a full window is beyond the clamp. Fewer samples come from a second or two, in which a
    busy machine may do anything."""

    @property
    def ratio(self) -> float:
        return 1.0 if self.steps is None else math.exp(self.steps * _STEP)


class Online(msgspec.Struct, frozen=True):
    """All that was learnt since the server started."""

    tracks: tuple[Track, ...] = ()

    @property
    def ratios(self) -> Ratios:
        return tuple((track.tp, track.phase, track.ratio) for track in self.tracks if track.steps is not None)

    def pegged(self, degrees: Container[int]) -> bool:
        """A correction of one of these degrees is at its clamp: the device or the model is described wrongly.
        Of degrees that do not run there is no news."""
        return any(track.pegged for track in self.tracks if track.tp in degrees)


def learn(
    online: Online, samples: Sequence[StepSample], steps: Callable[[int, int], StepModel], clamp: float
) -> Online:
    """Add measured steps. `steps(tp, active devices)` predicts without the online correction."""
    tracks = {(track.tp, track.phase): track for track in online.tracks}
    fresh: dict[tuple[int, Phase], list[float]] = {}
    for sample in samples:
        if not sample.exclusive or sample.seconds <= 0 or not (sample.rows or sample.prefill_tokens):
            continue
        expected = expected_s(sample, steps(sample.tp, sample.active_devices))
        phase: Phase = "prefill" if sample.prefill_tokens else "decode"
        fresh.setdefault((sample.tp, phase), []).append(math.log(sample.seconds / expected))
    if not fresh:
        return online
    for key, logs in fresh.items():
        tracks[key] = _updated(tracks.get(key) or Track(*key), logs, math.log(clamp))
    return Online(tuple(tracks[key] for key in sorted(tracks)))


def expected_s(sample: StepSample, model: StepModel) -> float:
    """Predicted seconds of a step like the sample."""
    sampled = sample.rows + (1 if sample.prefill_tokens else 0)
    seconds = model.base(sample.rows + sample.prefill_tokens, sampled).total_s
    if sample.rows:
        seconds += model.decode_attention_s(sample.rows, sample.context)
    if sample.prefill_tokens:
        seconds += model.prompt_attention_s(sample.prefill_tokens, sample.past_tokens)
    return seconds


def _updated(track: Track, logs: Sequence[float], limit: float) -> Track:
    recent = (*track.recent, *logs)[-_KEPT:]
    if len(recent) < _FIRST:
        return msgspec.structs.replace(track, recent=recent)
    middle = median(recent)
    clamped = min(max(middle, -limit), limit)
    steps = track.steps
    if steps is None or abs(clamped - steps * _STEP) > 2 * _STEP:
        steps = round(clamped / _STEP)
    return Track(track.tp, track.phase, recent, steps, pegged=len(recent) == _KEPT and clamped != middle)


def corrected(base: Calibration | None, ratios: Ratios, most_tokens: int) -> Calibration | None:
    """The calibration that the cost model should use: the one made before, times what was learnt since.

    A step's time depends on its size, so the decode ratio holds for few tokens, the prefill ratio for many;
    `most_tokens` is the largest step. Without a ratio of one phase the other one holds for both.
    """
    if not ratios:
        return base
    by_degree: dict[int, dict[Phase, float]] = {}
    for tp, phase, ratio in ratios:
        by_degree.setdefault(tp, {})[phase] = ratio
    points: list[CalibrationPoint] = []
    sizes = {1, _DECODE_SIZE, _PREFILL_SIZE, max(most_tokens, 2 * _PREFILL_SIZE)}
    if base is not None:
        sizes |= {point.size for point in base.points if point.op == "base"}
    for tp in sorted(set(by_degree) | set(base.degrees if base is not None else ())):
        known = by_degree[min(by_degree, key=lambda other: abs(math.log(other / tp)))]
        decode = known.get("decode", known.get("prefill", 1.0))
        prefill = known.get("prefill", decode)
        wanted: list[tuple[Op, int]] = [("base", size) for size in sorted(sizes)]
        wanted += [("attention", 1), ("prompt_attention", _PREFILL_SIZE)]
        for op, size in wanted:
            share = min(max(math.log(size / _DECODE_SIZE) / math.log(_PREFILL_SIZE / _DECODE_SIZE), 0.0), 1.0)
            ratio = decode ** (1 - share) * prefill**share
            before = base.correction(op, tp, size) if base is not None else None
            points.append(CalibrationPoint(op, tp, size, ratio * (before.ratio if before else 1.0)))
    if base is None:
        return Calibration(model="", device="", source="online", points=tuple(points))
    source = f"{base.source}, corrected online"
    return msgspec.structs.replace(base, source=source, points=tuple(points))


def provenance(ratios: Ratios, base: Calibration | None, tp: int, phase: Phase) -> str:
    """Where the correction of a degree comes from, in words."""
    tried = sorted({degree for degree, known, _ in ratios if known == phase})
    if tp in tried:
        return "measured online"
    if tried:
        return f"inherited from tp{min(tried, key=lambda other: abs(math.log(other / tp)))}"
    return "as calibrated before" if base is not None else "data sheet and assumptions"
