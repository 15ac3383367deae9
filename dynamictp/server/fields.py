"""Strict reading of JSON requests, field by field. Every refusal names the field and what it expects."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from dynamictp.errors import BadRequest

_decoder = msgspec.json.Decoder(strict=True)
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
"""A number in a query; ASCII digits only."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. NaN and Infinity are no JSON. Raises `BadRequest`."""
    try:
        value = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise BadRequest("the body is not valid JSON: nested too deep", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {kind(value)}", code="invalid_json")
    return value


def kind(value: object) -> str:
    """JSON's word for a value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def show(value: object) -> str:
    """A value in an error message: scalars as JSON, cut to 60 characters; others by type."""
    if isinstance(value, (list, dict)):
        return kind(value)
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else None
    if text is None:
        text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def as_fields(body: dict[str, Any] | Fields) -> Fields:
    """Parsers take a body, or one that is already looked at as fields (`field_table` notes what they ask)."""
    return body if isinstance(body, Fields) else Fields(body)


def integer_range(low: int, high: int) -> str:
    return f"an integer from {low} to {high}"


def number_range(low: float, high: float, above: bool) -> str:
    return f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"


class Fields:
    """One JSON object. `null` reads as absent. `finish` refuses what nobody asked for."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        """`prefix` leads the field names in messages, such as `messages[0].`."""
        self._values = values
        self._prefix = prefix
        self._known: set[str] = set()

    @property
    def known(self) -> frozenset[str]:
        """The names that were asked for."""
        return frozenset(self._known)

    def child(self, values: dict[str, Any], prefix: str) -> Fields:
        """An object inside this one."""
        return Fields(values, prefix)

    def refuse(self, name: str, expected: str, value: object) -> BadRequest:
        full = self._prefix + name
        return BadRequest(f"{full}: expected {expected}, got {show(value)}", param=full)

    def check_not_null(self, name: str) -> None:
        """For a field that changes a value in force, where `null` does not pass for its absence."""
        if name in self._values and self._values[name] is None:
            raise self.refuse(name, "a value; leave the field out to keep the one in force", None)

    def take(self, name: str) -> Any:
        """The raw value, or None."""
        self._known.add(name)
        return self._values.get(name)

    def take_number(self, name: str) -> Any:
        """The raw value of a field that should be a number, or None."""
        return self.take(name)

    def require(self, name: str, expected: str) -> Any:
        value = self.take(name)
        if value is None:
            full = self._prefix + name
            raise BadRequest(f"{full}: required, expected {expected}", param=full, code="missing_field")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take_number(name)
        if value is None:
            return None
        if not is_integer(value) or not low <= value <= high:
            raise self.refuse(name, integer_range(low, high), value)
        return int(value)

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """With `above` the lower bound itself is not allowed."""
        value = self.take_number(name)
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or (above and value == low):
            raise self.refuse(name, number_range(low, high, above), value)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false", value)
        return value

    def text(self, name: str, max_chars: int = 1 << 23) -> str | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.refuse(name, "a string", value)
        if len(value) > max_chars:
            raise self.refuse(name, f"at most {max_chars} characters", f"{len(value)} characters")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(name, "one of " + ", ".join(allowed), value)
        return value

    def array(self, name: str, max_items: int, of: str, fits: Callable[[Any], bool]) -> list[Any]:
        """A list whose items all fit; empty when absent. `of` describes the items."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refuse(name, f"an array of {of}", value)
        if len(value) > max_items:
            raise self.refuse(name, f"at most {max_items} items", len(value))
        for item in value:
            if not fits(item):
                raise self.refuse(name, f"an array of {of}", item)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, "an object", value)
        return value

    def neutral(self, name: str, *values: object) -> None:
        """A field that is not supported: only values that change nothing pass."""
        value = self.take(name)
        if value is not None and not any(value == v and type(value) is type(v) for v in values):
            full = self._prefix + name
            raise BadRequest(f"{full} is not supported here", param=full, code="unsupported_field")

    def ignore(self, *names: str) -> None:
        self._known.update(names)

    def finish(self) -> None:
        for name in self._values:
            if name not in self._known:
                full = self._prefix + name
                raise BadRequest(f"{show(full)[1:-1]}: unknown field", param=full[:64], code="unknown_field")


class QueryFields(Fields):
    """A query's parameters: texts, which are read as numbers where a number is wanted. One that is given
    twice counts with its last value."""

    def take_number(self, name: str) -> Any:
        text = self.take(name)
        if text is None or not _NUMBER.fullmatch(text):
            return text
        value = int(text) if text.isdigit() and len(text) < 20 else float(text)
        return value if math.isfinite(value) else text


def query_of(request: Request) -> QueryFields:
    """The query of a request."""
    return QueryFields(dict(request.query_params))
