"""Walks the table of fields: what lies in range is accepted, what lies just outside is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from dynamictp.control.config import ControlConfig, build_control, fixed_fields
from dynamictp.errors import BadRequest
from dynamictp.server import requests
from dynamictp.server.admin_routes import parse_set_layout
from dynamictp.server.control_bodies import (
    parse_decisions,
    parse_history,
    parse_journal,
    parse_lease,
    parse_reload,
)
from dynamictp.server.field_table import Rule, field_rules
from dynamictp.server.fields import Fields, QueryFields

VOCAB = 100
DEVICES = 4
DEFAULTS = requests.SamplingDefaults()
PARSERS: dict[str, Callable[[Fields], object]] = {
    "POST /v1/completions": lambda fields: requests.parse_completion(fields, VOCAB, DEFAULTS),
    "POST /v1/chat/completions": lambda fields: requests.parse_chat(fields, VOCAB, DEFAULTS),
    "POST /tokenize": requests.parse_tokenize,
    "POST /detokenize": lambda fields: requests.parse_detokenize(fields, VOCAB),
    "PUT /admin/layout": parse_set_layout,
    "POST /admin/leases": lambda fields: parse_lease(fields, DEVICES),
    "GET /admin/decisions": parse_decisions,
    "GET /admin/journal": parse_journal,
    "GET /admin/history": parse_history,
    "PUT /admin/config": parse_reload,
}
RULES = field_rules(VOCAB, DEVICES)
CASES = [(endpoint, rule) for endpoint, rules in RULES.items() for rule in rules]
TABLE = pytest.mark.parametrize(
    ("endpoint", "rule"), CASES, ids=[f"{endpoint} {rule.name}" for endpoint, rule in CASES]
)


def base(endpoint: str, name: str) -> dict[str, Any]:
    """A sound body in which `name` may have any value of its range."""
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    body: dict[str, Any] = {
        "POST /v1/completions": {"prompt": "x"},
        "POST /v1/chat/completions": {"messages": [message]},
        "POST /tokenize": {"messages": [message]}
        if name.startswith("messages") or name in CHAT
        else {"prompt": "x"},
        "POST /detokenize": {"tokens": []},
        "PUT /admin/layout": {"layout": "tp1"},
        "POST /admin/leases": {"devices": 1},
        "GET /admin/decisions": {},
        "GET /admin/journal": {},
        "GET /admin/history": {},
        "PUT /admin/config": {"slo": {"classes": {"0": {}}, "tenants": {"0": {}}}},
    }[endpoint]
    if name.startswith("stream_options"):
        body |= {"stream": True, "stream_options": {}}
    if name == "top_logprobs":
        body["logprobs"] = True
    return body


CHAT = ("continue_final_message", "add_generation_prompt", "chat_template_kwargs")


def with_value(endpoint: str, name: str, value: Any) -> dict[str, Any]:
    """The sound body with `value` in place of the field `name`."""
    body = base(endpoint, name)
    *path, last = name.replace("[]", ".0").split(".")
    place: Any = body
    for step in path:
        place = place[int(step) if isinstance(place, list) else step]
    if name == "best_of" and type(value) is int and 1 <= value <= requests.MAX_CHOICES:
        body["n"] = value
    if name == "continue_final_message" and value:
        body["add_generation_prompt"] = False
    place[last] = value
    return body


def inside(rule: Rule) -> Iterator[Any]:
    """Both ends of the range, or each of the choices."""
    shape = rule.schema
    if rule.status == "ignored":
        yield from (None, 1, "x", [], {"a": None})
        return
    if not rule.required and rule.nullable:
        yield None
    if "enum" in shape:
        yield from shape["enum"]
    elif rule.name in OWN:
        yield from OWN[rule.name][0]
    else:
        match shape["type"]:
            case "integer":
                yield from (shape["minimum"], shape["maximum"])
            case "number":
                low = shape.get("minimum", math.nextafter(shape.get("exclusiveMinimum", 0), math.inf))
                yield from (low, shape["maximum"])
            case "boolean":
                yield from (True, False)
            case "string":
                yield from ("x", "x" * shape["maxLength"])
            case "array":
                yield from ([], [VOCAB - 1] * shape["maxItems"])
            case "object":
                yield {}


def outside(rule: Rule) -> Iterator[Any]:
    """Just beyond both ends, and values of other types."""
    shape = rule.schema
    if rule.required or not rule.nullable:
        yield None
    if rule.status == "neutral":
        yield from (value for value in ({"x": 1}, [0], "x", 7) if value not in shape["enum"])
    elif rule.name in OWN:
        yield from OWN[rule.name][1]
    elif "enum" in shape:
        yield from ("x", 1, [], True)
    else:
        match shape["type"]:
            case "integer":
                yield from (shape["minimum"] - 1, shape["maximum"] + 1, 1.5, 1.0, "1", True, [1], {})
            case "number":
                low = shape.get("minimum")
                yield shape["exclusiveMinimum"] if low is None else math.nextafter(low, -math.inf)
                yield from (math.nextafter(shape["maximum"], math.inf), "1", True, [1], {})
            case "boolean":
                yield from (0, 1, "true", [], {})
            case "string":
                yield from (1, True, [], {}, "x" * (shape["maxLength"] + 1))
            case "array":
                yield from (1, "x", {}, [-1], [VOCAB], [1.0], [True], ["1"], [[1]])
                yield [0] * (shape["maxItems"] + 1)
            case "object":
                yield from (1, "x", [], True)


NAMED: tuple[list[Any], list[Any]] = (
    [{}, {"": {}, "x" * 128: {"tpot_p99_ms": 1}}],
    [1, "x", [], True, {"x": 1}, {"x": []}, {"x" * 129: {}}, {str(i): {} for i in range(10_001)}],
)
OWN: dict[str, tuple[list[Any], list[Any]]] = {
    "prompt": (
        ["", "x", ["x", "y"], [0, VOCAB - 1], [[0], [1, 2]]],
        [1, True, {}, [], [VOCAB], [-1], [1, "x"], [1.0], [[1], "x"], [[VOCAB]], [[True]]],
    ),
    "stop": (
        ["x", "x" * 256, [], ["x"] * 16],
        ["", "x" * 257, ["x"] * 17, [""], [1], 1, 0, True, False, {"a": 1}, {}],
    ),
    "logit_bias": (
        [{}, {"0": -100, str(VOCAB - 1): 100}, {"1": 0.5}],
        [
            [1],
            "x",
            1,
            {str(VOCAB): 1},
            {"-1": 1},
            {"x": 1},
            {"1": 100.1},
            {"1": -101},
            {"1": True},
            {"1": "x"},
        ],
    ),
    "messages": ([[{"role": "user", "content": ""}] * 3], [[], "x", 1, {}]),
    "messages[].content": (["", "x", [{"type": "text", "text": ""}], []], [1, True, {}]),
    "slo.classes": NAMED,
    "slo.tenants": NAMED,
    "ramp_steps": (
        [[1], [0.5, 1.0], [1.0] * 64],
        [1, "x", {}, True, [0], [1.1], [True], ["1"], [[1]], [1.0] * 65],
    ),
    "layout": (["tp1", "auto", "", "x" * 4096], [1, True, [], {}, "x" * 4097]),
}


@TABLE
def test_what_is_in_range_is_accepted(endpoint: str, rule: Rule) -> None:
    for value in inside(rule):
        if value is None and rule.name == "messages[].content":
            continue  # only an assistant may say nothing
        if rule.name == "prompt" and endpoint == "POST /tokenize" and not isinstance(value, str):
            continue  # one text
        if value is None and rule.name in ("prompt", "messages"):
            continue  # either of them
        PARSERS[endpoint](Fields(with_value(endpoint, rule.name, value)))


@TABLE
def test_what_is_just_outside_is_refused_by_name(endpoint: str, rule: Rule) -> None:
    if rule.status == "ignored":
        return
    for value in outside(rule):
        body = with_value(endpoint, rule.name, value)
        with pytest.raises(BadRequest) as refusal:
            PARSERS[endpoint](Fields(body))
        message, param = refusal.value.message, (refusal.value.param or "").replace("[0]", "[]")
        assert param.startswith(rule.name), (value, message)
        assert message.startswith(refusal.value.param or "?"), value
        if rule.status == "neutral":
            assert refusal.value.code == "unsupported_field"
        elif value is None and rule.required:
            assert refusal.value.code == "missing_field"
        elif value is None:
            assert message.endswith("leave the field out to keep the one in force, got null")
        elif rule.name not in OWN and not isinstance(value, (str, list)):
            assert rule.expected in message, value


@pytest.mark.parametrize("endpoint", PARSERS)
def test_a_field_that_is_not_in_the_table_is_refused(endpoint: str) -> None:
    body = base(endpoint, "")
    PARSERS[endpoint](Fields(body))
    with pytest.raises(BadRequest) as refusal:
        PARSERS[endpoint](Fields({**body, "frobnicate": None}))
    assert (refusal.value.param, refusal.value.code) == ("frobnicate", "unknown_field")


@pytest.mark.parametrize("endpoint", PARSERS)
def test_the_table_has_every_field_that_is_accepted(endpoint: str) -> None:
    """Else a field that a parser takes would be missing from the page and the description."""
    fields = Fields(base(endpoint, ""))
    PARSERS[endpoint](fields)
    known = {rule.name for rule in RULES[endpoint] if "." not in rule.name}
    assert fields.known <= known


def test_the_table_has_every_parameter_of_the_planner() -> None:
    rules = {rule.name: rule.status for rule in RULES["PUT /admin/config"]}
    assert {name for name in rules if "." not in name} == set(ControlConfig.__struct_fields__)
    assert {name for name, status in rules.items() if status == "fixed"} == set(fixed_fields())


def test_a_reload_reads_what_the_planner_takes() -> None:
    given = {
        "slo": {"tpot_p99_ms": 50, "classes": {"gold [1]": {"ttft_p99_s": 0.5, "tpot_p99_ms": None}}},
        "objective": "latency",
        "min_devices": 2,
        "ramp_steps": [0.5, 1],
    }
    read = parse_reload(Fields(given))
    assert read == {
        "slo": {"tpot_p99_ms": 50.0, "classes": {"gold [1]": {"ttft_p99_s": 0.5}}},
        "objective": "latency",
        "min_devices": 2,
        "ramp_steps": (0.5, 1.0),
    }
    assert build_control(read).slo.of("gold [1]").ttft_p99_s == 0.5
    with pytest.raises(BadRequest) as refusal:
        parse_reload(Fields({"slo": {"classes": {"gold": {"tpot_p99_ms": 0}}}}))
    assert refusal.value.param == "slo.classes[gold].tpot_p99_ms"


def test_what_is_shown_can_be_put_back() -> None:
    """The nulls in it are those of overrides."""
    config = build_control({"slo": {"classes": {"gold": {"ttft_p99_s": 0.5}}}})
    shown = msgspec.json.decode(msgspec.json.encode(config))
    assert shown["slo"]["classes"]["gold"]["tpot_p99_ms"] is None
    assert build_control(parse_reload(Fields(shown))) == config


@pytest.mark.parametrize(
    "since", ["", "x", "-1", "1e12", "nan", "inf", "1_0", " 1", "\u0661", "1.", "9" * 5000]
)
def test_a_time_in_a_query_is_a_number(since: str) -> None:
    with pytest.raises(BadRequest, match=r"since: expected a number from 0 to 1e\+11, got") as refusal:
        parse_history(QueryFields({"since": since}))
    assert refusal.value.param == "since"


def test_a_time_in_a_query_may_have_a_fraction() -> None:
    for since in ("1796032983.406469", "1796032983", "1.7e9", "0"):
        assert parse_history(QueryFields({"since": since})).since == float(since)


def test_the_name_of_a_model_in_a_query_may_be_of_digits() -> None:
    asked = QueryFields({"model": "7"})
    assert (parse_journal(asked), parse_decisions(asked).model, parse_history(asked).model) == ("7",) * 3


@pytest.mark.parametrize("last", ["", "x", "-1", "+1", "1.0", " 1", "1_0", "\u0661", "10001", "9" * 5000])
def test_a_number_in_a_query_is_of_digits(last: str) -> None:
    with pytest.raises(BadRequest, match=r"last: expected an integer from 0 to 10000, got") as refusal:
        parse_decisions(QueryFields({"last": last}))
    assert refusal.value.param == "last"
    assert parse_decisions(QueryFields({"last": "7", "snapshots": "1"})).last == 7
