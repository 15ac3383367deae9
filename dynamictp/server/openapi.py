"""The API's description for machines, `/openapi.json`: requests from `field_table`, answers from `schema`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import dynamictp
from dynamictp.server import control_bodies
from dynamictp.server import schema as answers
from dynamictp.server.field_table import Rule, field_rules

_REFERENCE = "#/components/schemas/{name}"
_RETRY = {"retry-after": {"required": True, "description": "seconds", "schema": {"type": "integer"}}}
_ERRORS = {
    "400": "a field is wrong, or the body is no JSON object",
    "401": "the key is missing or unknown",
    "403": "the key or the host does not open this",
    "404": "no such model, switch, lease or path",
    "408": "the body did not arrive in time",
    "409": "a layout switch is in flight, or devices are leased",
    "413": "the body is too large",
    "422": "the layout does not fit; `legal_layouts` do",
    "429": "too many requests",
    "500": "an error of the server",
    "503": "no room now",
    "504": "the wait ended before the layout switch",
}
_BODY = ("400", "401", "403", "408", "413", "503")
_GENERATION = (*_BODY, "404", "429", "500")
_OPERATOR = ("401", "403")
_TOKEN = {"type": "integer", "minimum": 0}
_OBJECT: dict[str, Any] = {"type": "object"}
_TEXT: dict[str, Any] = {"type": "string"}


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Envelope(msgspec.Struct):
    """Every answer with a status from 400 on."""

    error: Error


class WholeChat(msgspec.Struct):
    """`chat.completion`."""

    id: str
    created: int
    model: str
    choices: list[answers.ChatChoice]
    object: str
    usage: answers.Usage
    dynamictp: answers.Served
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class Models(msgspec.Struct):
    object: str
    data: list[Model]


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(msgspec.Struct):
    prompt: str


_ANSWERS = (
    Envelope,
    answers.Completion,
    WholeChat,
    Model,
    Models,
    Tokens,
    Text,
    control_bodies.LeaseAnswer,
    control_bodies.Leases,
    control_bodies.Decisions,
    control_bodies.Config,
)


def openapi(vocab: int, devices: int, *, api: bool = True, admin: bool = True) -> dict[str, Any]:
    """An OpenAPI 3.1 document. `vocab` bounds token ids, `devices` those of a lease; `api` and `admin` as for
    `create_app`."""
    rules = field_rules(vocab, devices)
    paths: dict[str, dict[str, Any]] = {
        "/": {"get": _operation("root", "What is where", {"200": _json(_OBJECT)})},
        "/health": {"get": _operation("health", "Alive", {"200": _json(_OBJECT)})},
        "/ready": {"get": _operation("ready", "Serving", {"200": _json(_OBJECT)}, ("503",))},
        "/version": {"get": _operation("version", "Version", {"200": _json(_OBJECT)})},
    }
    if api:
        paths |= _api_paths(rules, vocab)
    if admin:
        paths |= _layout_paths(rules) | _lease_paths(rules) | _planner_paths(rules) | _observe_paths(rules)
    _, components = msgspec.json.schema_components(_ANSWERS, ref_template=_REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "DynamicTP", "version": dynamictp.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _api_paths(rules: Mapping[str, tuple[Rule, ...]], vocab: int) -> dict[str, Any]:
    # One event; its data is a chunk as JSON, an error, or [DONE].
    event = {"type": "object", "required": ["data"], "properties": {"data": _TEXT}}
    events = {"text/event-stream": {"schema": event}}

    def post(name: str, path: str, summary: str, answer: dict[str, Any]) -> dict[str, Any]:
        errors = _GENERATION if "text/event-stream" in answer["content"] else (*_BODY, "404")
        body = _body(rules[f"POST {path}"], vocab)
        return {"post": {**_operation(name, summary, {"200": answer}, errors), **body}}

    completion, chat = _json(_of(answers.Completion), events), _json(_of(WholeChat), events)
    model = _operation("model", "One model", {"200": _json(_of(Model))}, ("404",))
    return {
        "/v1/models": {"get": _operation("models", "The models", {"200": _json(_of(Models))})},
        "/v1/models/{name}": {"get": {**model, **_path("name")}},
        "/v1/completions": post("completions", "/v1/completions", "Complete a prompt", completion),
        "/v1/chat/completions": post("chat", "/v1/chat/completions", "Answer a conversation", chat),
        "/tokenize": post("tokenize", "/tokenize", "Text to tokens", _json(_of(Tokens))),
        "/detokenize": post("detokenize", "/detokenize", "Tokens to text", _json(_of(Text))),
    }


def _layout_paths(rules: Mapping[str, tuple[Rule, ...]]) -> dict[str, Any]:
    one = {"type": "object", "required": ["id", "from", "to", "outcome", "phases_ms"]}
    switch = {"type": "object", "required": ["switch"], "properties": {"switch": one}}
    all_switches = {
        "type": "object",
        "required": ["switches"],
        "properties": {"switches": {"type": "array", "items": one}},
    }
    put = _operation(
        "set_layout",
        "Change the layout",
        {"200": _json(switch), "202": _json(switch)},
        (*_BODY, "409", "422", "500", "504"),
    )
    show = _operation("switch", "One layout switch", {"200": _json(switch)}, (*_OPERATOR, "404"))
    cancel = _operation(
        "cancel_switch",
        "Take a layout switch back",
        {"200": _json(switch)},
        (*_OPERATOR, "404", "409", "503", "504"),
    )
    text = {"description": "the metrics", "content": {"text/plain": {"schema": _TEXT}}}
    listed = _operation("switches", "The layout switches", {"200": _json(all_switches)}, _OPERATOR)
    return {
        "/metrics": {"get": _operation("metrics", "Metrics", {"200": text}, _OPERATOR)},
        "/admin/layout": {
            "get": _operation("layout", "The layout", {"200": _json(_OBJECT)}, _OPERATOR),
            "put": {**put, **_body(rules["PUT /admin/layout"], 0)},
        },
        "/admin/switches": {"get": listed},
        "/admin/switches/{id}": {
            "get": {**show, **_path("id")},
            "delete": {**cancel, **_path("id")},
        },
    }


def _lease_paths(rules: Mapping[str, tuple[Rule, ...]]) -> dict[str, Any]:
    lease = _json(_of(control_bodies.LeaseAnswer))
    leases = _json(_of(control_bodies.Leases))
    lend = _operation("lend", "Lend devices", {"201": lease}, (*_BODY, "409"))

    def of_one(name: str, summary: str) -> dict[str, Any]:
        return {**_operation(name, summary, {"200": lease}, (*_OPERATOR, "404")), **_path("id")}

    return {
        "/admin/leases": {
            "get": _operation("leases", "The leases", {"200": leases}, _OPERATOR),
            "post": {**lend, **_body(rules["POST /admin/leases"], 0)},
        },
        "/admin/leases/{id}": {
            "get": of_one("lease", "One lease"),
            "put": of_one("renew", "Keep a lease for longer"),
            "delete": of_one("give_back", "Give devices back"),
        },
    }


def _planner_paths(rules: Mapping[str, tuple[Rule, ...]]) -> dict[str, Any]:
    config = {"200": _json(_of(control_bodies.Config))}
    decided = {"200": _json(_of(control_bodies.Decisions))}
    decisions = _operation("decisions", "The planner's last decisions", decided, ("400", "404", *_OPERATOR))
    reload = _operation("reload", "Replace some parameters of the planner", config, _BODY)
    lines = {"description": "one JSON object a line", "content": {"application/jsonl": {"schema": {}}}}
    journal = _operation("journal", "The planner's journal", {"200": lines}, ("400", "404", *_OPERATOR))
    return {
        "/admin/decisions": {"get": {**decisions, **_query(rules["GET /admin/decisions"])}},
        "/admin/journal": {"get": {**journal, **_query(rules["GET /admin/journal"])}},
        "/admin/config": {
            "get": _operation("config", "The planner's parameters", config, ("400", *_OPERATOR)),
            "put": {**reload, **_body(rules["PUT /admin/config"], 0)},
        },
    }


def _observe_paths(rules: Mapping[str, tuple[Rule, ...]]) -> dict[str, Any]:
    """The live page and what it draws."""
    page = {"description": "the page", "content": {"text/html": {"schema": _TEXT}}}
    history = _operation("history", "The last hours", {"200": _json(_OBJECT)}, ("400", "404", *_OPERATOR))
    return {
        "/dashboard": {"get": _operation("dashboard", "The live page", {"200": page}, _OPERATOR)},
        "/admin/history": {"get": {**history, **_query(rules["GET /admin/history"])}},
    }


def _operation(
    name: str, summary: str, answered: Mapping[str, Any], errors: Sequence[str] = ()
) -> dict[str, Any]:
    responses = {**answered, **{status: _error(status) for status in errors}}
    return {"operationId": name, "summary": summary, "responses": responses}


def _error(status: str) -> dict[str, Any]:
    error = {"description": _ERRORS[status], "content": {"application/json": {"schema": _of(Envelope)}}}
    return {**error, "headers": _RETRY} if status in ("429", "503") else error


def _of(kind: type) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _json(shape: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"description": "done", "content": {"application/json": {"schema": shape}, **(more or {})}}


def _path(name: str) -> dict[str, Any]:
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": _TEXT}]}


def _query(rules: Sequence[Rule]) -> dict[str, Any]:
    return {
        "parameters": [
            {"name": rule.name, "in": "query", "required": rule.required, "schema": rule.schema}
            for rule in rules
        ]
    }


def _body(rules: Sequence[Rule], vocab: int) -> dict[str, Any]:
    """`vocab` matters only where there are token ids."""
    shape = _bounded(_object(rules, ""), vocab)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": shape}}}}


def _object(rules: Sequence[Rule], prefix: str) -> dict[str, Any]:
    """The JSON Schema of the object whose fields' names begin with `prefix`."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for rule in rules:
        name = rule.name.removeprefix(prefix)
        if not rule.name.startswith(prefix) or "." in name:
            continue
        shape: dict[str, Any] = dict(rule.schema)
        if any(other.name.startswith(f"{rule.name}.") for other in rules):
            shape = _object(rules, f"{rule.name}.")
        elif any(other.name.startswith(f"{rule.name}[].") for other in rules):
            shape = _collection(rule.schema, _object(rules, f"{rule.name}[]."))
        if rule.required:
            required.append(name)
        elif shape and rule.nullable:
            shape = {"anyOf": [shape, {"type": "null"}]}
        properties[name] = shape
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _collection(shape: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """`shape`, an array or an object by names, of objects of the shape `inner`."""
    if shape.get("type") == "object":
        return {**shape, "additionalProperties": inner}
    items = {"type": "array", "items": inner}
    # An array of parts may be given as one text.
    return {"anyOf": [_TEXT, items]} if "string" in shape.get("type", ()) else {**items, "minItems": 1}


def _bounded(value: Any, vocab: int) -> Any:
    """`value` with an upper bound for token ids."""
    if value == _TOKEN:
        return {**_TOKEN, "maximum": vocab - 1}
    if isinstance(value, Mapping):
        return {key: _bounded(inner, vocab) for key, inner in value.items()}
    return [_bounded(inner, vocab) for inner in value] if isinstance(value, list) else value
