"""Bodies of the control plane's endpoints: what they take, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType
from msgspec import inspect as shapes

from dynamictp.control.config import ControlConfig
from dynamictp.control.pool import Level
from dynamictp.control.values import Decision, PoolSnapshot
from dynamictp.server.fields import Fields, number_range

MAX_WAIT_S = 600.0
MAX_NOTICE_S = 3600.0
NOTICE_S = 10.0
MOST_DECISIONS = 10_000
DECISIONS = 20
MOST_STEPS = 64
"""Steps of a ramp."""
MOST_NAMES = 10_000
"""Classes, or tenants, with targets of their own."""
MAX_NAME_CHARS = 128
MAX_UNIX_S = 1e11


# ---------------------------------------------------------------- requests


@dataclass(frozen=True)
class LeaseRequest:
    """`POST /admin/leases`."""

    devices: int
    level: Level
    notice_s: float
    grace_s: float
    wait_s: float


@dataclass(frozen=True)
class DecisionsQuery:
    """`GET /admin/decisions`."""

    last: int
    snapshots: bool
    model: str | None = None


@dataclass(frozen=True)
class HistoryQuery:
    """`GET /admin/history`."""

    since: float
    """Unix time."""
    model: str | None = None


def parse_lease(fields: Fields, devices: int) -> LeaseRequest:
    """Raises `BadRequest`. `devices`: how many the pool has."""
    fields.require("devices", "a number of devices")
    count = fields.integer("devices", 1, devices)
    assert count is not None
    level = cast(Level, fields.choice("level", ("standby", "released"), "standby"))
    notice_s = fields.number("notice_s", 0, MAX_NOTICE_S)
    grace_s = fields.number("grace_s", 0, MAX_NOTICE_S)
    wait_s = fields.number("wait_s", 0, MAX_WAIT_S) or 0.0
    fields.finish()
    return LeaseRequest(
        count,
        level,
        NOTICE_S if notice_s is None else notice_s,
        NOTICE_S if grace_s is None else grace_s,
        wait_s,
    )


def parse_decisions(fields: Fields) -> DecisionsQuery:
    """Raises `BadRequest`."""
    last = fields.integer("last", 0, MOST_DECISIONS)
    snapshots = fields.integer("snapshots", 0, 1)
    model = fields.text("model")
    fields.finish()
    return DecisionsQuery(DECISIONS if last is None else last, bool(snapshots), model)


def parse_journal(fields: Fields) -> str | None:
    """The model that `GET /admin/journal` names. Raises `BadRequest`."""
    model = fields.text("model")
    fields.finish()
    return model


def parse_history(fields: Fields) -> HistoryQuery:
    """Raises `BadRequest`."""
    since = fields.number("since", 0, MAX_UNIX_S)
    model = fields.text("model")
    fields.finish()
    return HistoryQuery(since or 0.0, model)


QUERIES: Mapping[str, Callable[[Fields], object]] = {
    "/admin/decisions": parse_decisions,
    "/admin/journal": parse_journal,
    "/admin/history": parse_history,
}
"""The paths under `/admin` whose GET reads a query, and how; no other path there has parameters."""


def parse_reload(fields: Fields) -> dict[str, Any]:
    """The parameters that `PUT /admin/config` names, each within the range that `ControlConfig` gives it.
    `null` is refused, since a parameter always has a value; in an override it says: as everyone's. Conditions
    between parameters are `check_control`'s. Raises `BadRequest`."""
    return _parse_struct(fields, ControlConfig, "")


def _parse_struct(fields: Fields, kind: type[msgspec.Struct], prefix: str) -> dict[str, Any]:
    info = shapes.type_info(kind)
    assert isinstance(info, shapes.StructType)
    read = {field.name: _parse_value(fields, field.name, field.type, prefix) for field in info.fields}
    fields.finish()
    return {name: value for name, value in read.items() if value is not None}


def _parse_value(fields: Fields, name: str, kind: shapes.Type, prefix: str) -> Any:
    """The value of one field as its annotation wants it; None when absent."""
    value: Any
    if not _nullable(kind):
        fields.check_not_null(name)
    match _bare(kind):
        case shapes.IntType(ge=int(low), le=int(high)):
            value = fields.integer(name, low, high)
        case shapes.FloatType() as number:
            value = fields.number(name, *_bounds(number), above=number.gt is not None)
        case shapes.LiteralType(values=values):
            value = fields.choice(name, cast(tuple[str, ...], values), "") or None
        case shapes.VarTupleType(item_type=item):
            value = _parse_numbers(fields, name, item)
        case shapes.StructType(cls=struct):
            given, inside = fields.mapping(name), f"{prefix}{name}."
            value = None if given is None else _parse_struct(fields.child(given, inside), struct, inside)
        case shapes.DictType(value_type=shapes.StructType(cls=struct)):
            value = _parse_named(fields, name, struct, prefix)
        case other:
            raise TypeError(f"{prefix}{name}: no way to read {other}")
    return value


def _bare(kind: shapes.Type) -> shapes.Type:
    """Without description, and without the null that stands for an absent field."""
    if isinstance(kind, shapes.Metadata):
        return _bare(kind.type)
    if isinstance(kind, shapes.UnionType):
        (kind,) = (each for each in kind.types if not isinstance(each, shapes.NoneType))
        return _bare(kind)
    return kind


def _nullable(kind: shapes.Type) -> bool:
    if isinstance(kind, shapes.Metadata):
        return _nullable(kind.type)
    return isinstance(kind, shapes.UnionType)


def _bounds(kind: shapes.FloatType) -> tuple[float, float]:
    low = kind.ge if kind.gt is None else kind.gt
    assert low is not None
    assert kind.le is not None
    return low, kind.le


def _parse_numbers(fields: Fields, name: str, kind: shapes.Type) -> tuple[float, ...] | None:
    item = _bare(kind)
    assert isinstance(item, shapes.FloatType)
    low, high = _bounds(item)
    above = item.gt is not None

    def fits(value: object) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and low <= cast(float, value) <= high and not (above and value == low)

    of = number_range(low, high, above).replace("a number", "numbers")
    values = fields.array(name, MOST_STEPS, of, fits)
    return tuple(map(float, values)) if fields.take(name) is not None else None


def _parse_named(
    fields: Fields, name: str, struct: type[msgspec.Struct], prefix: str
) -> dict[str, Any] | None:
    """An object of objects, by names that the client chooses."""
    given = fields.mapping(name)
    if given is None:
        return None
    if len(given) > MOST_NAMES:
        raise fields.refuse(name, f"at most {MOST_NAMES} names", len(given))
    read = {}
    for key, values in given.items():
        if len(key) > MAX_NAME_CHARS:
            raise fields.refuse(name, f"names of at most {MAX_NAME_CHARS} characters", key)
        if not isinstance(values, dict):
            raise fields.refuse(f"{name}[{key}]", "an object", values)
        inside = f"{prefix}{name}[{key}]."
        read[key] = _parse_struct(fields.child(values, inside), struct, inside)
    return read


# ---------------------------------------------------------------- answers


class LeaseAnswer(msgspec.Struct):
    """A lease. Times are seconds from now; there are a deadline and a reason while it is being revoked."""

    id: str
    devices: tuple[int, ...]
    cores: list[int]
    level: Level
    state: Literal["active", "revoking"]
    notice_s: float
    grace_s: float
    expires_s: float
    deadline_s: float | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class Leases(msgspec.Struct):
    leases: list[LeaseAnswer]
    free: tuple[int, ...]


class DecisionEntry(Decision, frozen=True, kw_only=True):
    """A decision of the journal, with what it was based on if that was asked for. `time_s` is of the clock
    that the journal uses, `decided_at` the same moment in Unix time."""

    decided_at: float
    model: str | UnsetType = UNSET
    """Where there are several."""
    snapshot: PoolSnapshot | UnsetType = UNSET


class Decisions(msgspec.Struct):
    """The latest first."""

    decisions: list[DecisionEntry]


class Config(msgspec.Struct):
    config: ControlConfig
