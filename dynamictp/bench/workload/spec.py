"""Arrivals as text: `KIND:VALUE,KEY=VALUE,…`, the form of the command line, workload files and reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dynamictp.bench.workload import arrivals
from dynamictp.bench.workload.arrivals import RateCurve
from dynamictp.bench.workload.traces import load_rates
from dynamictp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OpenArrivals:
    """Requests leave when due, whatever became of the earlier ones."""

    curve: RateCurve
    cv: float


@dataclass(frozen=True, slots=True)
class ReplayArrivals:
    """A recorded trace from `start_s` on, `speed` times as fast, a share `keep` of its requests."""

    trace: str
    start_s: float
    speed: float
    keep: float


@dataclass(frozen=True, slots=True)
class ClosedArrivals:
    """`users` that each wait for an answer, think, and send the next; `requests` in all at most."""

    users: int
    think_s: float
    requests: int


Arrivals = OpenArrivals | ReplayArrivals | ClosedArrivals

FORMS = (
    "constant:RATE                                        evenly spaced",
    "poisson:RATE                                         independent",
    "gamma:RATE,cv=3                                      bursts: gaps with this coefficient of variation",
    "onoff:base=1,burst=8,every=20,for=4[,offset=0]       bursts at fixed times",
    "steps:0=1,30=5                                       from each second on, this rate",
    "ramp:0=1,60=8                                        linear between the seconds given",
    "spikes:base=2,peak=10,every=30,for=5                 sudden peaks that fade",
    "daynight:mean=4,day=120[,swing=0.6][,spike=16,every=30,for=5]  a sine from its trough, spikes that fade",
    "rates:TRACE[,pool=P][,start=0][,speed=1][,mean=RATE] recorded rates, brought to a mean",
    "replay:TRACE[,start=0][,speed=1][,keep=1]            recorded requests with their lengths",
    "closed:users=8[,think=1][,requests=200]              users who wait for answers (closed loop)",
)
"""Rates in requests per second, times in seconds. Every open kind takes cv= (1: Poisson around the rate)."""

_CURVES = ("constant", "poisson", "gamma", "onoff", "steps", "ramp", "spikes", "daynight", "rates")
KINDS = (*_CURVES, "replay", "closed")


def parse_arrivals(text: str, duration_s: float) -> Arrivals:
    """`duration_s` bounds open arrivals. Raises ConfigError that names what is wrong."""
    kind, _, rest = text.partition(":")
    fields = _Fields(text, kind, rest)
    parsed: Arrivals
    if kind == "replay":
        parsed = ReplayArrivals(
            fields.name(), fields.number("start", 0.0), fields.positive("speed", 1.0), fields.share("keep")
        )
    elif kind == "closed":
        parsed = ClosedArrivals(
            fields.count("users"), fields.number("think", 0.0), fields.count("requests", 200)
        )
    elif kind in _CURVES:
        cv = fields.number("cv", 0.0 if kind == "constant" else 1.0)
        parsed = OpenArrivals(_curve(kind, fields, duration_s), cv)
    else:
        raise ConfigError(f"'{kind}' is no kind of arrivals: expected one of {', '.join(KINDS)}")
    fields.finish()
    return parsed


def _curve(kind: str, fields: _Fields, duration_s: float) -> RateCurve:  # noqa: PLR0911
    match kind:
        case "constant" | "poisson" | "gamma":
            return arrivals.constant_rate(fields.positive("rate", first=True), duration_s)
        case "onoff":
            return arrivals.on_off(
                base_per_s=fields.number("base"),
                burst_per_s=fields.positive("burst"),
                period_s=fields.positive("every"),
                burst_s=fields.positive("for"),
                duration_s=duration_s,
                offset_s=fields.number("offset", 0.0),
            )
        case "steps":
            return arrivals.steps(fields.points(), duration_s)
        case "ramp":
            return arrivals.ramp(fields.points(), duration_s)
        case "spikes":
            return arrivals.spikes(
                fields.number("base"),
                fields.positive("peak"),
                fields.positive("every"),
                fields.positive("for"),
                duration_s,
            )
        case "daynight":
            mean, swing = fields.positive("mean"), fields.number("swing", 0.6)
            curve = arrivals.day_night(mean, swing, fields.positive("day"), duration_s)
            peak = fields.number("spike", 0.0)
            if not peak:
                return curve
            return arrivals.with_spikes(curve, peak, fields.positive("every"), fields.positive("for"))
        case _:
            return _recorded(fields, duration_s)


def _recorded(fields: _Fields, duration_s: float) -> RateCurve:
    """Recorded rates, brought to the mean that the machine under test can bear."""
    curve = load_rates(fields.name(), fields.word("pool"), fields.number("start", 0.0))
    curve = curve.stretched(fields.positive("speed", 1.0)).until(duration_s)
    mean = fields.number("mean", 0.0)
    return curve.stretched(1.0, mean * curve.duration_s / curve.expected) if mean else curve


class _Fields:
    """Takes the values of one text one by one; `finish` refuses what is left over."""

    def __init__(self, text: str, kind: str, rest: str) -> None:
        self._text, self._kind = text, kind
        self._first = ""
        self._values: dict[str, str] = {}
        for i, part in enumerate(filter(None, rest.split(","))):
            key, equals, value = part.partition("=")
            if not equals and i == 0:
                self._first = part
            elif not equals or key in self._values:
                raise ConfigError(f"'{part}' in arrivals '{text}': expected KEY=VALUE, each key once")
            else:
                self._values[key] = value

    def number(self, key: str, default: float | None = None, *, first: bool = False) -> float:
        text = self._values.pop(key, "")
        if first and self._first:
            text, self._first = self._first, ""
        if not text:
            if default is None:
                raise ConfigError(f"arrivals '{self._text}' need {key}=…")
            return default
        return self._to_number(text, key)

    def positive(self, key: str, default: float | None = None, *, first: bool = False) -> float:
        value = self.number(key, default, first=first)
        if value <= 0:
            raise ConfigError(f"{key} is {value:g} in arrivals '{self._text}'; expected more than 0")
        return value

    def share(self, key: str) -> float:
        value = self.positive(key, 1.0)
        if value > 1:
            raise ConfigError(f"{key} is {value:g} in arrivals '{self._text}'; expected at most 1")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.positive(key, default)
        if value != int(value):
            raise ConfigError(f"{key} is {value:g} in arrivals '{self._text}'; expected a whole number")
        return int(value)

    def name(self) -> str:
        """The leading value: a trace of the package or a file."""
        name, self._first = self._first, ""
        if not name:
            raise ConfigError(f"arrivals '{self._text}' need a trace, as in {self._kind}:NAME_OR_FILE")
        return name

    def word(self, key: str) -> str:
        return self._values.pop(key, "")

    def points(self) -> list[tuple[float, float]]:
        """All `seconds=rate` pairs that are left."""
        values: Mapping[str, str] = dict(self._values)
        self._values.clear()
        return sorted((self._to_number(t, "time"), self._to_number(r, t)) for t, r in values.items())

    def finish(self) -> None:
        for left in (self._first, *self._values):
            if left:
                raise ConfigError(f"'{left}' means nothing in arrivals '{self._text}'")

    def _to_number(self, text: str, key: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{key} is '{text}' in arrivals '{self._text}'; expected a number")
        return value
