"""Predicted time of a step, per degree, from measured ones. Times in ms."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from statistics import median

_SAMPLES = 15
_MIN_PREFILL_TOKENS = 16
# Assumptions until the first steps are measured; they only bound the first chunks beside running streams.
_DECODE_MS = 10.0
_PREFILL_MS_PER_TOKEN = 1.0


class _Median:
    """Median of the last few samples; robust against the stalls of a shared machine."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self.value = median(self._samples)


class StepTimes:
    """Owner of the measured step times. Decode by rows (in powers of two), prefill per token."""

    def __init__(self) -> None:
        self._decode: dict[int, dict[int, _Median]] = {}
        self._prefill: dict[int, _Median] = {}

    def decode_ms(self, tp: int, rows: int) -> float:
        """A step that decodes `rows` rows. Between and beyond measured sizes the nearest one counts, and the
        nearest degree for one that has not been measured."""
        if not rows:
            return 0.0
        if not self._decode:
            return _DECODE_MS
        measured = self._decode[_nearest(self._decode, tp)]
        size = rows.bit_length()
        return measured[min(measured, key=lambda known: abs(known - size))].value or _DECODE_MS

    def prefill_ms(self, tp: int, tokens: int) -> float:
        """What `tokens` tokens of prefill add to a step."""
        if not self._prefill:
            return tokens * _PREFILL_MS_PER_TOKEN / tp
        degree = _nearest(self._prefill, tp)
        per_token = self._prefill[degree].value
        return tokens * (_PREFILL_MS_PER_TOKEN if per_token is None else per_token * degree / tp)

    def step_ms(self, tp: int, rows: int, prefill_tokens: int) -> float:
        return self.decode_ms(tp, rows) + self.prefill_ms(tp, prefill_tokens)

    def prefill_tokens(self, tp: int, rows: int, limit_ms: float) -> int:
        """Tokens of prefill that fit a step of `limit_ms` beside `rows` decoding rows."""
        left = limit_ms - self.decode_ms(tp, rows)
        return max(0, int(left / max(1e-6, self.prefill_ms(tp, 1))))

    def prefill_rate(self, tp: int, rows: int, step_ms: float, least_tokens: int) -> float:
        """Prompt tokens per second while `rows` rows decode: what fits steps of `step_ms` beside them, but
        never less than `least_tokens` a step."""
        if not rows:
            return 1e3 / max(1e-6, self.prefill_ms(tp, 1))
        tokens = max(least_tokens, self.prefill_tokens(tp, rows, step_ms))
        return tokens * 1e3 / max(1e-6, self.step_ms(tp, rows, tokens))

    def expected_ms(self, tp: int, rows: int, prefill_tokens: int) -> float | None:
        """`step_ms`, for an untried degree taken from the nearest measured one: at worst the time grows as
        the devices get fewer, and it does not shrink as they get more. None when nothing is measured."""
        degrees = (
            self._decode.keys() & self._prefill.keys()
            if prefill_tokens and rows
            else (self._prefill.keys() if prefill_tokens else self._decode.keys())
        )
        if not degrees:
            return None
        known = min(degrees, key=lambda degree: (abs(degree - tp), degree))
        return self.step_ms(known, rows, prefill_tokens) * max(1.0, known / tp)

    def copy(self) -> StepTimes:
        """The predictions of now: later measurements do not change them."""
        return deepcopy(self)

    def measured(self, tp: int, rows: int, prefill_tokens: int, ms: float) -> None:
        """Learn from a step that ran alone on its devices."""
        if not prefill_tokens:
            self._decode.setdefault(tp, {}).setdefault(rows.bit_length(), _Median()).add(ms)
        elif prefill_tokens >= _MIN_PREFILL_TOKENS:
            share = max(0.0, ms - self.decode_ms(tp, rows)) / prefill_tokens
            self._prefill.setdefault(tp, _Median()).add(share)


def _nearest(measured: Iterable[int], tp: int) -> int:
    """The measured degree nearest to `tp`; the wider of two as near."""
    return min(measured, key=lambda degree: (abs(degree - tp), -degree))
