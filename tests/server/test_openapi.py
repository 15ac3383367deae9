"""The server against its own OpenAPI description: generated requests, sound and unsound."""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from dynamictp.server.openapi import openapi
from tests.server.planned_stack import CONFIG
from tests.server.server_stack import VOCAB, Stack
from tests.server.threaded_stack import Threaded, threaded_stack

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
DEVICES = 2
DOCUMENT = openapi(VOCAB, DEVICES)
OPERATIONS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
WITH_BODY = [
    (method, path) for method, path in OPERATIONS if "requestBody" in DOCUMENT["paths"][path][method.lower()]
]
WITH_FIELDS = [*WITH_BODY, ("GET", "/admin/decisions"), ("GET", "/admin/history")]
LEASES = "/admin/leases"
DECISIONS = schemathesis.openapi.from_dict(DOCUMENT)["/admin/decisions"]["GET"]
EXAMPLES, MANY = 15, 1000
"""Of each operation, with the unit tests and with `scripts/test --fault`."""
SEED = int(os.environ.get("DYNAMICTP_FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def server() -> Iterator[Threaded]:
    with threaded_stack(planner=True) as running:
        running.stack.service.switch_wait_s = 1.0

        async def decide() -> None:
            assert running.stack.service.plane is not None
            for _ in range(3):
                await running.stack.service.plane.tick()

        running.do(decide())
        yield running


@pytest.fixture(scope="module")
def description(server: Threaded) -> Any:
    return schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())


def exercise(server: Threaded, operation: Any, mode: GenerationMode, examples: int) -> Counter[int]:
    """Statuses of generated requests, each answer checked against the description."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples,
        derandomize=SEED == 0,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = whole(case.body)
        if case.path == LEASES and isinstance(case.body, dict) and sound_wait(case.body.get("wait_s")):
            case.body["wait_s"] = 0  # nobody gives devices back meanwhile
        response = case.call(base_url=server.url)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code == 503:
            assert int(response.headers["retry-after"][0]) > 0
        if case.path == LEASES:
            server.do(reset(server))
        if case.path == "/admin/config" and response.status_code == 200:
            still_decides(server, DECISIONS.Case(query={"last": 1, "snapshots": 1}))

    if SEED:
        run = seed(SEED)(run)
    run()
    return statuses


def sound_wait(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 600


def still_decides(server: Threaded, decisions: Any) -> None:
    """Whatever the parameters are, requests are served, and the planner decides."""
    plane = server.stack.service.plane
    assert plane is not None
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 12})
    assert answer.status_code == 200, answer.text
    assert server.do(plane.tick()) is not None
    response = decisions.call(base_url=server.url)
    assert response.status_code == 200
    decisions.validate_response(response, checks=CHECKS)


async def at_rest(server: Threaded) -> None:
    """One device serves, the other may be leased."""
    await reset(server)
    service = server.stack.service
    async with asyncio.timeout(30):
        response = await server.stack.http.put("/admin/layout", json={"layout": "tp1", "wait": "closed"})
        assert response.status_code == 200, response.text
        while service.desk.pool.free != (1,):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def reset(server: Threaded) -> None:
    """Leases are given back, the planner's parameters are the first ones."""
    service = server.stack.service
    for lease in service.desk.pool.leases:
        service.desk.give_back(lease.id)
    assert service.plane is not None
    service.plane.reload(CONFIG)


NARROW: dict[str, dict[str, Any]] = {
    "model": {"const": "tiny"},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 20},
    "min_tokens": {"enum": [0, 1]},
    "logprobs": {"const": True},
    "stream": {"const": True},
    "devices": {"const": 1},
    "target_utilisation": {"const": 1},
    "shrink_load": {"type": "number", "minimum": 0, "maximum": 0.9},
    "min_devices": {"enum": [1, DEVICES]},
    "max_devices": {"enum": [0, DEVICES]},
    "ramp_steps": {"enum": [[1], [0.5, 1]]},
    "layout": {"enum": ["tp1", "tp2", "tp1+tp1", " tp2 "]},
    "prompt": {"type": "string", "minLength": 1, "maxLength": 30},
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": {"type": "string", "maxLength": 20},
            },
            "additionalProperties": False,
        },
    },
}
"""What fits together and into the model; the description can't say that."""
EXCLUSIVE = (
    "max_completion_tokens",
    "best_of",
    "continue_final_message",
    "chat_template_kwargs",
    "interval_s",
    "journal_entries",
)


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The description of requests that must be served."""
    document = copy.deepcopy(document)
    for method, path in WITH_BODY:
        media = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]
        shape = media["schema"]
        for name in EXCLUSIVE:
            shape["properties"].pop(name, None)
        for name in NARROW.keys() & shape["properties"].keys():
            shape["properties"][name] = NARROW[name]
        # Log-probabilities are a number in one endpoint, a flag in the other.
        if path == "/v1/completions":
            shape["properties"]["logprobs"] = {"type": "integer", "minimum": 0, "maximum": 20}
        if path == "/tokenize":
            del shape["properties"]["prompt"]
            shape["required"] = ["messages"]
        if "stream" in shape["properties"]:
            shape["required"] += ["logprobs", "stream"]
        if "shrink_load" in shape["properties"]:
            shape["required"] += ["target_utilisation", "shrink_load"]
    return document


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_requests_that_fit_are_served_as_described(server: Threaded, method: str, path: str) -> None:
    server.do(at_rest(server))
    description = schemathesis.openapi.from_dict(narrowed(DOCUMENT))
    statuses = exercise(server, description[path][method], GenerationMode.POSITIVE, EXAMPLES)
    assert statuses[200] + statuses[201] + statuses[202] > EXAMPLES // 2, statuses
    assert_nothing_is_left(server)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_sound_requests_are_answered_as_described(
    server: Threaded, description: Any, method: str, path: str
) -> None:
    statuses = exercise(server, description[path][method], GenerationMode.POSITIVE, EXAMPLES)
    assert sum(statuses.values()) > 0
    assert_nothing_is_left(server)


@pytest.mark.parametrize(("method", "path"), WITH_FIELDS)
def test_unsound_requests_are_refused_as_described(
    server: Threaded, description: Any, method: str, path: str
) -> None:
    statuses = exercise(server, description[path][method], GenerationMode.NEGATIVE, EXAMPLES)
    assert statuses[400] > 0, statuses
    assert_nothing_is_left(server)


def test_what_there_is_is_shown_as_described(server: Threaded, description: Any) -> None:
    server.do(at_rest(server))
    lease = httpx.post(f"{server.url}{LEASES}", json={"devices": 1}).json()["id"]
    switch = httpx.put(f"{server.url}/admin/layout", json={"layout": "tp1", "ramp": True}).json()["switch"]
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", LEASES, {}),
        ("GET", "/admin/switches", {}),
        ("GET", "/admin/switches/{id}", {"path_parameters": {"id": switch["id"]}}),
        ("GET", "/admin/decisions", {"query": {"last": 3, "snapshots": 1}}),
        *(
            (method, LEASES + "/{id}", {"path_parameters": {"id": lease}})
            for method in ("GET", "PUT", "DELETE")
        ),
    ]
    for method, path, parts in asked:
        case = description[path][method].Case(**parts)
        response = case.call(base_url=server.url)
        assert response.status_code == 200, (path, response.text)
        case.validate_response(response, checks=CHECKS)
    assert_nothing_is_left(server)


@pytest.mark.fault
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_many_sound_requests(server: Threaded, description: Any, method: str, path: str) -> None:
    exercise(server, description[path][method], GenerationMode.POSITIVE, MANY)
    assert_nothing_is_left(server)


@pytest.mark.fault
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "path"), WITH_FIELDS)
def test_many_unsound_requests(server: Threaded, description: Any, method: str, path: str) -> None:
    exercise(server, description[path][method], GenerationMode.NEGATIVE, MANY)
    assert_nothing_is_left(server)


def assert_nothing_is_left(server: Threaded) -> None:
    client, engine = server.stack.service.client, server.stack.engine
    server.until(lambda: client.live == 0)
    # A cancelled request leaves the engine with its next turn.
    server.until(lambda: not engine.running)
    server.do(reset(server))


def whole(value: Any) -> Any:
    """1.0 as 1: the same to JSON Schema, and not to this server, which wants integers without a fraction."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


async def test_a_number_with_endless_digits_in_a_query_is_a_400(stack: Stack) -> None:
    for text in ("9" * 5000, "9" * 10, "-1", "x", "\u0663"):
        response = await stack.http.get("/admin/decisions", params={"last": text})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "last"


async def test_the_description_names_every_route(stack: Stack) -> None:
    document = (await stack.http.get("/openapi.json")).json()
    routes = {
        (method, route.path.replace(":path", ""))
        for route in stack.app.routes
        for method in route.methods
        if method != "HEAD" and route.path != "/openapi.json"
    }
    assert routes == set(OPERATIONS)
    assert document == json.loads(json.dumps(DOCUMENT))
