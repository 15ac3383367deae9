"""The server against its own OpenAPI description: generated requests, sound and unsound."""

from __future__ import annotations

import asyncio
import copy
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

from dynamictp.control.config import ControlConfig
from dynamictp.server.openapi import openapi
from tests.server.server_stack import VOCAB, Stack
from tests.server.test_control_plane import pool_facts
from tests.server.threaded_stack import Threaded, threaded_stack

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
OPERATIONS = [
    (method.upper(), path) for path, methods in openapi(VOCAB)["paths"].items() for method in methods
]
WITH_BODY = [
    (method, path)
    for method, path in OPERATIONS
    if "requestBody" in openapi(VOCAB)["paths"][path][method.lower()]
]
PLANNED = [
    (mode, method, path)
    for method, path in OPERATIONS
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if path.startswith("/admin/") and (mode is GenerationMode.POSITIVE or (method, path) in WITH_BODY)
]
"""What answers otherwise where there is a planner."""
SERVED = [pair for pair in WITH_BODY if pair[1] not in ("/admin/leases", "/admin/config")]
"""Without a planner, and with two devices, the others have little to give."""
EXAMPLES, MANY = 15, 1000
"""Of each operation, with the unit tests and with `scripts/test --fault`."""
SEED = int(os.environ.get("DYNAMICTP_FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def server() -> Iterator[Threaded]:
    with threaded_stack() as running:
        yield running


@pytest.fixture(scope="module")
def planned() -> Iterator[Threaded]:
    """In dynamic mode, with some decisions made and the loop at rest."""

    async def plan(stack: Stack) -> None:
        plane = stack.service.plan_with(pool_facts(), ControlConfig())
        for _ in range(3):
            assert await plane.tick() is not None

    with threaded_stack(mode="dynamic") as running:
        asyncio.run_coroutine_threadsafe(plan(running.stack), running.loop).result(30)
        yield running


@pytest.fixture(scope="module")
def whole_description(server: Threaded) -> Any:
    """For unsound requests: what is sound must not be narrowed, or the server is blamed for taking it."""
    return schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())


@pytest.fixture(scope="module")
def description(server: Threaded) -> Any:
    document = httpx.get(f"{server.url}/openapi.json").json()
    lease = document["paths"]["/admin/leases"]["post"]["requestBody"]["content"]["application/json"]
    # Nobody gives a device back meanwhile.
    lease["schema"]["properties"]["wait_s"] = {"const": 0}
    return schemathesis.openapi.from_dict(document)


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
        response = case.call(base_url=server.url)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code == 503:
            assert int(response.headers["retry-after"][0]) > 0

    if SEED:
        run = seed(SEED)(run)
    run()
    return statuses


NARROW: dict[str, dict[str, Any]] = {
    "model": {"const": "tiny"},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 20},
    "min_tokens": {"enum": [0, 1]},
    "logprobs": {"const": True},
    "stream": {"const": True},
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
EXCLUSIVE = ("max_completion_tokens", "best_of", "continue_final_message", "chat_template_kwargs")


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The description of requests that must be served."""
    document = copy.deepcopy(document)
    for method, path in SERVED:
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
    return document


@pytest.mark.parametrize(("method", "path"), SERVED)
def test_requests_that_fit_are_served_as_described(server: Threaded, method: str, path: str) -> None:
    description = schemathesis.openapi.from_dict(narrowed(openapi(VOCAB)))
    statuses = exercise(server, description[path][method], GenerationMode.POSITIVE, EXAMPLES)
    assert statuses[200] + statuses[202] > EXAMPLES // 2, statuses
    assert_nothing_is_left(server)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_sound_requests_are_answered_as_described(
    server: Threaded, description: Any, method: str, path: str
) -> None:
    statuses = exercise(server, description[path][method], GenerationMode.POSITIVE, EXAMPLES)
    assert sum(statuses.values()) > 0
    assert_nothing_is_left(server)


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_unsound_requests_are_refused_as_described(
    server: Threaded, whole_description: Any, method: str, path: str
) -> None:
    statuses = exercise(server, whole_description[path][method], GenerationMode.NEGATIVE, EXAMPLES)
    assert statuses[400] > 0, statuses
    assert_nothing_is_left(server)


@pytest.mark.parametrize(("mode", "method", "path"), PLANNED)
def test_an_operator_of_a_server_with_a_planner_is_answered_as_described(
    planned: Threaded, description: Any, mode: GenerationMode, method: str, path: str
) -> None:
    statuses = exercise(planned, description[path][method], mode, EXAMPLES)
    refused = statuses[400] + statuses[404] + statuses[409]
    assert statuses[400] > 0 if mode is GenerationMode.NEGATIVE else sum(statuses.values()) > 0, statuses
    if "{id}" not in path and mode is GenerationMode.POSITIVE:
        assert sum(statuses.values()) > refused, statuses
    for lease in httpx.get(f"{planned.url}/admin/leases").json()["leases"]:
        httpx.delete(f"{planned.url}/admin/leases/{lease['id']}")
    assert_nothing_is_left(planned)


@pytest.mark.fault
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_many_sound_requests(server: Threaded, description: Any, method: str, path: str) -> None:
    exercise(server, description[path][method], GenerationMode.POSITIVE, MANY)
    assert_nothing_is_left(server)


@pytest.mark.fault
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_many_unsound_requests(server: Threaded, whole_description: Any, method: str, path: str) -> None:
    exercise(server, whole_description[path][method], GenerationMode.NEGATIVE, MANY)
    assert_nothing_is_left(server)


def assert_nothing_is_left(server: Threaded) -> None:
    client, engine = server.stack.service.client, server.stack.engine
    server.until(lambda: client.live == 0)
    # A cancelled request leaves the engine with its next turn.
    server.until(lambda: not engine.running)


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
    assert document == openapi(VOCAB)
