"""The API's description for machines, `/openapi.json`: requests from `field_table`, answers from `schema`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import dynamictp
from dynamictp.server import schema as answers
from dynamictp.server.field_table import Rule, field_rules

_REFERENCE = "#/components/schemas/{name}"
_RETRY = {"retry-after": {"required": True, "description": "seconds", "schema": {"type": "integer"}}}
_ERRORS = {
    "400": "a field is wrong, or the body is no JSON object",
    "401": "the key is missing or unknown",
    "403": "the key or the host does not open this",
    "404": "no such model, switch or path",
    "408": "the body did not arrive in time",
    "409": "a layout switch is in flight",
    "413": "the body is too large",
    "422": "the layout does not fit; `legal_layouts` do",
    "429": "too many requests",
    "500": "an error of the server",
    "503": "no room now",
    "504": "the wait ended before the layout switch",
}
_BODY = ("400", "401", "403", "408", "413", "503")
_GENERATION = (*_BODY, "404", "429", "500")
_TOKEN = {"type": "integer", "minimum": 0}
_OBJECT: dict[str, Any] = {"type": "object"}
_TEXT: dict[str, Any] = {"type": "string"}
_MODEL: dict[str, Any] = {"name": "model", "in": "query", "schema": _TEXT}
"""Whose, where the server has several models."""


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


_ANSWERS = (Envelope, answers.Completion, WholeChat, Model, Models, Tokens, Text)


def openapi(vocab: int, *, api: bool = True, admin: bool = True) -> dict[str, Any]:
    """An OpenAPI 3.1 document. `vocab` bounds token ids; `api` and `admin` as for `create_app`."""
    rules = field_rules(vocab)
    paths: dict[str, dict[str, Any]] = {
        "/health": {"get": _operation("health", "Alive", {"200": _json(_OBJECT)})},
        "/ready": {"get": _operation("ready", "Serving", {"200": _json(_OBJECT)}, ("503",))},
        "/version": {"get": _operation("version", "Version", {"200": _json(_OBJECT)})},
    }
    if api:
        paths |= _api_paths(rules, vocab)
    if admin:
        paths |= _admin_paths(rules, vocab)
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
        return {"post": {**_operation(name, summary, {"200": answer}, errors), "requestBody": body}}

    completion, chat = _json(_of(answers.Completion), events), _json(_of(WholeChat), events)
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    model = _operation("model", "One model", {"200": _json(_of(Model))}, ("404",))
    return {
        "/v1/models": {"get": _operation("models", "The models", {"200": _json(_of(Models))})},
        "/v1/models/{name}": {"get": {**model, "parameters": [name]}},
        "/v1/completions": post("completions", "/v1/completions", "Complete a prompt", completion),
        "/v1/chat/completions": post("chat", "/v1/chat/completions", "Answer a conversation", chat),
        "/tokenize": post("tokenize", "/tokenize", "Text to tokens", _json(_of(Tokens))),
        "/detokenize": post("detokenize", "/detokenize", "Tokens to text", _json(_of(Text))),
    }


def _admin_paths(rules: Mapping[str, tuple[Rule, ...]], vocab: int) -> dict[str, Any]:
    switch = {
        "type": "object",
        "required": ["switch"],
        "properties": {
            "switch": {"type": "object", "required": ["id", "from", "to", "outcome", "phases_ms"]}
        },
    }
    put = _operation(
        "set_layout",
        "Change the layout",
        {"200": _json(switch), "202": _json(switch)},
        (*_BODY, "409", "422", "500", "504"),
    )
    ident = [{"name": "id", "in": "path", "required": True, "schema": _TEXT}]
    show = _operation("switch", "One layout switch", {"200": _json(switch)}, ("401", "403", "404"))
    cancel = _operation(
        "cancel_switch",
        "Take a layout switch back",
        {"200": _json(switch)},
        ("401", "403", "404", "409", "503", "504"),
    )
    locked = ("401", "403")
    listed = _operation("switches", "The layout switches", {"200": _json(_OBJECT)}, locked)
    text = {"description": "the metrics", "content": {"text/plain": {"schema": _TEXT}}}
    layout = _operation("layout", "The layout", {"200": _json(_OBJECT)}, ("401", "403"))
    return {
        "/metrics": {"get": _operation("metrics", "Metrics", {"200": text}, ("401", "403"))},
        "/admin/layout": {
            "get": layout,
            "put": {**put, "requestBody": _body(rules["PUT /admin/layout"], vocab)},
        },
        "/admin/switches": {"get": listed},
        "/admin/switches/{id}": {
            "get": {**show, "parameters": ident},
            "delete": {**cancel, "parameters": ident},
        },
        **_control_paths(rules, vocab, ident),
        **_observe_paths(),
    }


def _observe_paths() -> dict[str, Any]:
    """The live page and what it draws."""
    locked = ("401", "403")
    page = {"description": "the page", "content": {"text/html": {"schema": _TEXT}}}
    since = [{"name": "since", "in": "query", "schema": {"type": "number"}}, _MODEL]
    history = _operation("history", "The last hours", {"200": _json(_OBJECT)}, (*locked, "400", "404"))
    return {
        "/dashboard": {"get": _operation("dashboard", "The live page", {"200": page}, locked)},
        "/admin/history": {"get": {**history, "parameters": since}},
    }


def _control_paths(
    rules: Mapping[str, tuple[Rule, ...]], vocab: int, ident: list[dict[str, Any]]
) -> dict[str, Any]:
    """Leases, and the planner: 400 where the server's mode has none."""
    locked, done = ("401", "403"), {"200": _json(_OBJECT)}
    lent = _operation("lend", "Lend devices", {"201": _json(_OBJECT)}, (*_BODY, "409"))
    one = {
        method: {**_operation(f"{name}_lease", summary, done, (*locked, "404", "409")), "parameters": ident}
        for method, name, summary in (
            ("get", "show", "One lease"),
            ("put", "renew", "Keep a lease"),
            ("delete", "return", "Give a lease back"),
        )
    }
    lines = {"description": "one JSON object a line", "content": {"application/jsonl": {"schema": {}}}}
    numbers = [
        {"name": name, "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 10_000}}
        for name in ("last", "snapshots")
    ]
    planned, of_model = (*locked, "400"), (*locked, "400", "404")
    decisions = _operation("decisions", "The planner's decisions", done, of_model)
    journal = _operation("journal", "The journal", {"200": lines}, of_model)
    change = _operation("set_config", "Replace parameters of the planner", done, _BODY)
    return {
        "/admin/leases": {
            "get": _operation("leases", "The leases", done, locked),
            "post": {**lent, "requestBody": _body(rules["POST /admin/leases"], vocab)},
        },
        "/admin/leases/{id}": one,
        "/admin/decisions": {"get": {**decisions, "parameters": [*numbers, _MODEL]}},
        "/admin/journal": {"get": {**journal, "parameters": [_MODEL]}},
        "/admin/config": {
            "get": _operation("config", "The planner's parameters", done, planned),
            "put": {**change, "requestBody": {"required": True, **_json_content(_OBJECT)}},
        },
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


def _json_content(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": shape}}}


def _body(rules: tuple[Rule, ...], vocab: int) -> dict[str, Any]:
    shape = _bounded(_object(rules, ""), vocab)
    return {"required": True, **_json_content(shape)}


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
            items = {"type": "array", "items": _object(rules, f"{rule.name}[].")}
            # An array of parts may be given as one text.
            texts = "string" in rule.schema.get("type", ())
            shape = {"anyOf": [_TEXT, items]} if texts else {**items, "minItems": 1}
        if rule.required:
            required.append(name)
        elif shape:
            shape = {"anyOf": [shape, {"type": "null"}]}
        properties[name] = shape
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _bounded(value: Any, vocab: int) -> Any:
    """`value` with an upper bound for token ids."""
    if value == _TOKEN:
        return {**_TOKEN, "maximum": vocab - 1}
    if isinstance(value, Mapping):
        return {key: _bounded(inner, vocab) for key, inner in value.items()}
    return [_bounded(inner, vocab) for inner in value] if isinstance(value, list) else value
