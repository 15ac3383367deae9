"""The error envelope on every path, limits, and small endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import dynamictp
from dynamictp.server.app import create_app
from tests.server.server_stack import Stack


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("POST", "/admin/layout", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_unknown_paths_and_methods_use_the_envelope(
    stack: Stack, method: str, path: str, status: int
) -> None:
    response = await stack.http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]


async def test_the_bare_address_says_what_is_where(stack: Stack) -> None:
    answer = (await stack.http.get("/")).json()
    assert (answer["name"], answer["version"]) == ("DynamicTP", dynamictp.__version__)
    for path in set(answer["paths"].values()):
        assert (await stack.http.get(path)).status_code in (200, 405), path


async def test_wrong_method_is_told_all_the_right_ones(stack: Stack) -> None:
    response = await stack.http.post("/admin/layout", json={})
    assert {"GET", "PUT"} <= {method.strip() for method in response.headers["allow"].split(",")}


async def test_malformed_json_is_a_400(stack: Stack) -> None:
    response = await stack.http.post("/v1/completions", content=b'{"prompt": NaN}')
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


async def test_bodies_over_the_limit_are_refused_with_and_without_a_length(stack: Stack) -> None:
    stack.service.bodies.limit_bytes = 1000

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    for content in (b" " * 2000, parts()):
        response = await stack.http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert "1000 bytes" in response.json()["error"]["message"]


async def test_a_bug_is_a_500_without_its_text(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str | None) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(stack.service, "check_model", broken)
    response = await stack.post("/v1/completions", prompt="x")
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"


async def test_version_health_ready(stack: Stack) -> None:
    told = (await stack.http.get("/version")).json()
    assert told == {"version": dynamictp.__version__, "server": "dynamictp"}
    assert (await stack.http.get("/health")).status_code == 200
    ready = await stack.http.get("/ready")
    assert (ready.status_code, ready.json()["layout"]) == (200, "tp1")
    stack.service.client.fail_all("worker 1 is gone")
    assert (await stack.http.get("/ready")).status_code == 503
    assert (await stack.http.get("/health")).status_code == 200


async def test_admin_routes_can_be_left_out(stack: Stack) -> None:
    paths = {route.path for route in create_app(stack.service, admin=False).routes}  # type: ignore[attr-defined]
    assert "/v1/completions" in paths
    assert not any(path.startswith(("/admin", "/metrics")) for path in paths)
    paths = {route.path for route in create_app(stack.service, api=False).routes}  # type: ignore[attr-defined]
    assert "/admin/layout" in paths
    assert not any(path.startswith("/v1") for path in paths)
