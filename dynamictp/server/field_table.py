"""Every field of the API with its legal range, as the parsers ask for it.

The parsers are the one source: each runs over a body that it accepts, and what it asks of its fields is
noted. From the notes come `docs/api-fields.md`, the OpenAPI description and the tests of every boundary, so
none of them can differ from what a request meets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dynamictp.control.config import fixed_fields
from dynamictp.server import control_bodies, requests
from dynamictp.server.admin_routes import parse_set_layout
from dynamictp.server.fields import Fields, integer_range, number_range

Status = Literal["used", "neutral", "ignored", "fixed"]

_INDEX = re.compile(r"\[\d+\]")
_TOKEN = {"type": "integer", "minimum": 0}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_IDS = {"type": "array", "items": _TOKEN, "minItems": 1}
_NAMED = (
    f"an object of objects, by names of at most {control_bodies.MAX_NAME_CHARS} characters",
    {
        "type": "object",
        "maxProperties": control_bodies.MOST_NAMES,
        "propertyNames": {"maxLength": control_bodies.MAX_NAME_CHARS},
    },
)
_STOP = {"type": "string", "minLength": 1, "maxLength": requests.MAX_STOP_CHARS}


@dataclass(frozen=True)
class Rule:
    """What one field may hold. `schema` is JSON Schema, without the null that stands for an absent field."""

    name: str
    """With the objects around it, such as `messages[].role`."""
    status: Status
    expected: str
    """As the error message says it."""
    schema: Mapping[str, Any]
    required: bool = False
    nullable: bool = True
    """`null` stands for its absence."""


_OWN: dict[str, tuple[str, Mapping[str, Any]]] = {
    "prompt": (
        "a string, an array of strings, an array of token ids, or an array of such arrays",
        {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]},
    ),
    "stop": (
        f"a string or up to {requests.MAX_STOPS} strings of 1 to {requests.MAX_STOP_CHARS} characters",
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": requests.MAX_STOPS}]},
    ),
    "logit_bias": (
        f"an object of at most {requests.MAX_BIASES} token ids with numbers from -100 to 100",
        {
            "type": "object",
            "maxProperties": requests.MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    ),
    "messages": ("a non-empty array of messages", {"type": "array", "minItems": 1}),
    "slo.classes": _NAMED,
    "slo.tenants": _NAMED,
    "ramp_steps": (
        "an array of numbers above 0 and up to 1, which rise and end at 1",
        {
            "type": "array",
            "items": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "minItems": 1,
            "maxItems": control_bodies.MOST_STEPS,
        },
    ),
    "messages[].content": ("a string or an array of text parts", {"type": ["string", "array"]}),
}
"""Fields whose form the parsers check with code of their own."""


@dataclass
class _Notes:
    rules: dict[str, Rule] = field(default_factory=dict)
    without_null: set[str] = field(default_factory=set)

    def add(self, rule: Rule) -> None:
        known = self.rules.get(rule.name)
        self.rules[rule.name] = replace(
            rule,
            required=rule.required or (known is not None and known.required),
            nullable=rule.name not in self.without_null,
        )


class _Watched(Fields):
    """Fields that note what is asked of them."""

    def __init__(self, values: dict[str, Any], prefix: str = "", notes: _Notes | None = None) -> None:
        super().__init__(values, prefix)
        self.notes = notes or _Notes()

    def child(self, values: dict[str, Any], prefix: str) -> Fields:
        return _Watched(values, prefix, self.notes)

    def check_not_null(self, name: str) -> None:
        self.notes.without_null.add(self._full(name))
        super().check_not_null(name)

    def take(self, name: str) -> Any:
        own = _OWN.get(self._full(name))
        if own is not None and self._full(name) not in self.notes.rules:
            self._note(name, *own)
        return super().take(name)

    def require(self, name: str, expected: str) -> Any:
        expected, schema = _OWN.get(self._full(name), (expected, {}))
        self._note(name, expected, schema, required=True)
        return super().require(name, expected)

    def integer(self, name: str, low: int, high: int) -> int | None:
        schema = {"type": "integer", "minimum": low, "maximum": high}
        self._note(name, integer_range(low, high), schema)
        return super().integer(name, low, high)

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        schema = {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}
        self._note(name, number_range(low, high, above), schema)
        return super().number(name, low, high, above=above)

    def flag(self, name: str, default: bool = False) -> bool:
        self._note(name, "true or false", {"type": "boolean"})
        return super().flag(name, default)

    def text(self, name: str, max_chars: int = 1 << 23) -> str | None:
        self._note(name, "a string", {"type": "string", "maxLength": max_chars})
        return super().text(name, max_chars)

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        self._note(name, "one of " + ", ".join(allowed), {"enum": list(allowed)})
        return super().choice(name, allowed, default)

    def array(self, name: str, max_items: int, of: str, fits: Callable[[Any], bool]) -> list[Any]:
        schema = {"type": "array", "maxItems": max_items, "items": _TOKEN if "token ids" in of else {}}
        self._note(name, *_OWN.get(self._full(name), (f"an array of {of}", schema)))
        return super().array(name, max_items, of, fits)

    def mapping(self, name: str) -> dict[str, Any] | None:
        expected, schema = _OWN.get(self._full(name), ("an object", {"type": "object"}))
        self._note(name, expected, schema)
        return super().mapping(name)

    def neutral(self, name: str, *values: object) -> None:
        # 1 stands for 1.0 in JSON, and the other way round.
        self._note(name, "not supported", {"enum": list(values)}, status="neutral")
        super().neutral(name, *values)

    def ignore(self, *names: str) -> None:
        for name in names:
            self._note(name, "ignored", {}, status="ignored")
        super().ignore(*names)

    def _full(self, name: str) -> str:
        return _INDEX.sub("[]", self._prefix + name)

    def _note(
        self,
        name: str,
        expected: str,
        schema: Mapping[str, Any],
        *,
        status: Status = "used",
        required: bool = False,
    ) -> None:
        self.notes.add(Rule(self._full(name), status, expected, schema, required))


def _note(body: dict[str, Any], parse: Callable[[Fields], object]) -> tuple[Rule, ...]:
    watched = _Watched(body)
    parse(watched)
    return tuple(watched.notes.rules.values())


USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
CONFIG: dict[str, Any] = {"slo": {"classes": {"0": {}}, "tenants": {"0": {}}}}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {}}


def field_rules(vocab: int, devices: int) -> dict[str, tuple[Rule, ...]]:
    """The rules of every endpoint that takes a body or, with GET, a query, in the order of the checks.
    `vocab` bounds token ids, `devices` those of a lease."""
    defaults = requests.SamplingDefaults()
    chat = {"messages": [USER]}
    tokenize = {
        rule.name: rule for body in (chat, {"prompt": "x"}) for rule in _note(body, requests.parse_tokenize)
    }
    return {
        "POST /v1/completions": _note(
            {"prompt": "x", **STREAM}, lambda fields: requests.parse_completion(fields, vocab, defaults)
        ),
        "POST /v1/chat/completions": _note(
            {**chat, **STREAM, "logprobs": True}, lambda fields: requests.parse_chat(fields, vocab, defaults)
        ),
        # Either prompt or messages.
        "POST /tokenize": tuple(
            replace(rule, required=rule.required and "." in rule.name) for rule in tokenize.values()
        ),
        "POST /detokenize": _note({"tokens": []}, lambda fields: requests.parse_detokenize(fields, vocab)),
        "PUT /admin/layout": _note({"layout": "tp1"}, parse_set_layout),
        "POST /admin/leases": _note(
            {"devices": 1}, lambda fields: control_bodies.parse_lease(fields, devices)
        ),
        **{f"GET {path}": _note({}, parse) for path, parse in control_bodies.QUERIES.items()},
        "PUT /admin/config": tuple(
            replace(rule, status="fixed") if rule.name in fixed_fields() else rule
            for rule in _note(CONFIG, control_bodies.parse_reload)
        ),
    }


_UNKNOWN = 1 << 40
"""Stands for a number of devices that the page can't know."""

_INTRODUCTION = """\
What each field of a request may hold. `null` is the same as leaving a field out, except in
`PUT /admin/config`, which refuses it outside of `slo.classes[]` and `slo.tenants[]`. Anything else is a 400
whose `error.param` names the field, and whose message is `FIELD: expected RANGE, got VALUE`. The code is
`missing_field` for a field that is required, `unknown_field` for one that is not listed (also in the query of
any path under `/admin`), and `unsupported_field` for a neutral one with a value that would change the answer.
Bodies are JSON objects in UTF-8 (`invalid_json`) of at most 8 MiB (413, `body_too_large`); of repeated names
the last counts. Integers are written without a fraction (`1`, not `1.0`). Token ids are those below the
model's vocabulary. A fixed parameter can't be changed while the server runs: only the value in force passes
(`bad_config`, also where two parameters contradict each other, or want more devices than there are). In
`slo.classes[]` the brackets stand for a name, in `messages[]` for an index.
`/openapi.json` says the same to machines.
"""


def api_fields_page(note: str) -> str:
    """`docs/api-fields.md`."""
    parts = [
        f"{note}# Fields of the API\n",
        _INTRODUCTION,
    ]
    for endpoint, rules in field_rules(vocab=0, devices=_UNKNOWN).items():
        column = "parameter of the query" if endpoint.startswith("GET") else "field"
        parts.append(f"## `{endpoint}`\n\n| {column} | legal | |\n|---|---|---|")
        parts.extend(_line(rule) for rule in rules if rule.status != "ignored")
        ignored = ", ".join(f"`{rule.name}`" for rule in rules if rule.status == "ignored")
        parts.append(f"\nIgnored, whatever they hold: {ignored}.\n" if ignored else "")
    return "\n".join(parts).rstrip() + "\n"


def _line(rule: Rule) -> str:
    if rule.status == "neutral":
        values = ", ".join(f"`{json.dumps(value)}`" for value in rule.schema["enum"])
        return f"| `{rule.name}` | {f'only {values}' if values else 'only null'} | neutral |"
    limit = ""
    for key, unit in (("maxLength", "characters"), ("maxItems", "items")):
        if key in rule.schema and str(rule.schema[key]) not in rule.expected:
            limit = f", at most {rule.schema[key]} {unit}"
    expected = rule.expected.replace("token ids from 0 to -1", "token ids")
    expected = expected.replace(str(_UNKNOWN), "the number of devices")
    remark = "required" if rule.required else "fixed" if rule.status == "fixed" else ""
    return f"| `{rule.name}` | {expected}{limit} | {remark} |"
