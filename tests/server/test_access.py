"""Keys, names and ports: which request reaches which route."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest

from dynamictp.config import ServeConfig
from dynamictp.errors import ResourceError
from dynamictp.messages import SubmitRequest
from dynamictp.server.access import Access, host_names
from dynamictp.server.app import create_app
from dynamictp.server.keys import KeyRing, KeyRings
from dynamictp.server.ports import Ports
from tests.server.server_stack import Stack, on_port, running_stack

ADMIN = {"authorization": "Bearer root"}
ALICE = {"authorization": "Bearer sk-alice"}


@pytest.fixture
def api_keys(tmp_path: Path) -> KeyRing:
    file = tmp_path / "api"
    file.write_text("sk-alice alice 5\nsk-bob bob\n")
    return KeyRing(str(file))


@pytest.fixture
def admin_keys(tmp_path: Path) -> KeyRing:
    file = tmp_path / "admin"
    file.write_text("root\n")
    return KeyRing(str(file))


@asynccontextmanager
async def client(stack: Stack, access: Access, *, admin: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(stack.service, access=access, admin=admin)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
        yield http


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Bearer "}, "missing_api_key"),
        ({"authorization": "Basic c2stYWxpY2U="}, "missing_api_key"),
        ({"authorization": "Bearer sk-eve"}, "invalid_api_key"),
        ({"authorization": "Bearer root"}, "invalid_api_key"),
        ({"api-key": "sk-alice"}, "missing_api_key"),
    ],
)
async def test_without_a_key_nothing_of_the_api_answers(
    stack: Stack, api_keys: KeyRing, headers: dict[str, str], code: str
) -> None:
    async with client(stack, Access(api_keys)) as http:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
            response = await http.request(method, path, headers=headers, json={"prompt": "x"})
            assert response.status_code == 401
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("authentication_error", code)
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
        for path in ("/health", "/ready", "/version"):
            assert (await http.get(path)).status_code == 200
    assert not any(isinstance(body, SubmitRequest) for body in stack.engine.received)


async def test_a_key_gives_tenant_and_priority_and_the_body_may_only_lower_it(
    stack: Stack, api_keys: KeyRing
) -> None:
    async with client(stack, Access(api_keys)) as http:
        for priority in (None, 3, 9, -(1 << 31)):
            body = {"prompt": "x", "max_tokens": 1, "priority": priority}
            assert (await http.post("/v1/completions", json=body, headers=ALICE)).status_code == 200
        bob = {"authorization": "bearer sk-bob"}
        await http.post("/v1/completions", json={"prompt": "x", "priority": 1}, headers=bob)
    sent = [body for body in stack.engine.received if isinstance(body, SubmitRequest)]
    assert [request.priority for request in sent] == [5, 3, 5, -100, 0]
    assert {(request.tenant, request.salt) for request in sent[:4]} == {("alice", "alice")}
    assert (sent[4].tenant, sent[4].salt) == ("bob", "bob")


async def test_the_official_client_raises_its_authentication_error(stack: Stack, api_keys: KeyRing) -> None:
    stack.app = create_app(stack.service, access=Access(api_keys))
    async with on_port(stack) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-bob", max_retries=0) as right:
            assert [model.id async for model in right.models.list()] == ["tiny"]


async def test_admin_paths_want_the_admin_key_where_there_is_one(
    stack: Stack, api_keys: KeyRing, admin_keys: KeyRing
) -> None:
    async with client(stack, Access(api_keys, admin_keys)) as http:
        for path in ("/admin/layout", "/metrics"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=ALICE)).status_code == 401
            assert (await http.get(path, headers=ADMIN)).status_code == 200
    async with client(stack, Access(api_keys, admin_keys, public_metrics=True)) as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/admin/layout")).status_code == 401
    async with client(stack, Access(api_keys, public_metrics=True), admin=False) as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/admin/layout")).status_code == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("app.localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.4", 200),
        ("models.lan:8000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("", 403),
    ],
)
async def test_a_port_without_keys_answers_only_to_names_it_knows(
    stack: Stack, host: str, status: int
) -> None:
    async with client(stack, Access(names=host_names("Models.LAN."))) as http:
        for path in ("/v1/models", "/admin/layout"):
            assert (await http.get(path, headers={"host": host})).status_code == status
    async with client(stack, Access(names=host_names("*"))) as http:
        assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


async def test_pages_of_other_sites_are_refused_and_there_is_no_cors(stack: Stack) -> None:
    async with client(stack, Access()) as http:
        foreign = await http.post("/v1/completions", json={}, headers={"origin": "https://evil.example"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "foreign_origin")
        for origin in ("null", "", "x", "http://", "http://[", "http://]x[", "//", "http://\u2100.example"):
            response = await http.get("/v1/models", headers=[(b"origin", origin.encode())])
            assert response.status_code == 403, origin
        own = await http.get("/v1/models", headers={"origin": "http://localhost:3000"})
        assert own.status_code == 200
        preflight = await http.options("/v1/completions", headers={"origin": "http://localhost:3000"})
        for response in (foreign, own, preflight):
            assert not any(name.startswith("access-control") for name in response.headers)


async def test_a_key_may_come_by_any_name(stack: Stack, api_keys: KeyRing) -> None:
    async with client(stack, Access(api_keys)) as http:
        response = await http.get("/v1/models", headers={**ALICE, "host": "llm.example.org"})
        assert response.status_code == 200


@asynccontextmanager
async def ports(stack: Stack, config: ServeConfig) -> AsyncIterator[tuple[str, str]]:
    """URLs of the main and of the admin port (the main one again, if there is no other)."""
    running = Ports(config, stack.service, KeyRings.of(config))
    try:
        main = await running.start()
        admin = config.admin_address[1] if config.admin_address else main
        yield f"http://127.0.0.1:{main}", f"http://127.0.0.1:{admin}"
    finally:
        await running.stop()


@asynccontextmanager
async def with_admin_port(
    stack: Stack, unused_port: Callable[[], int], **keys: str
) -> AsyncIterator[tuple[str, str]]:
    """As `ports`. A port that is free may be another's a moment later: then the next one."""
    while True:
        config = ServeConfig(port=0, admin_port=unused_port(), **keys)  # type: ignore[arg-type]
        async with AsyncExitStack() as opened:
            try:
                urls = await opened.enter_async_context(ports(stack, config))
            except ResourceError:
                continue
            yield urls
            return


async def test_an_admin_port_of_its_own_takes_the_admin_paths(
    tmp_path: Path, unused_tcp_port_factory: Callable[[], int]
) -> None:
    (tmp_path / "admin").write_text("root\n")
    async with (
        running_stack() as stack,
        with_admin_port(stack, unused_tcp_port_factory, admin_key_file=str(tmp_path / "admin")) as urls,
        httpx.AsyncClient() as http,
    ):
        main, admin = urls
        assert (await http.get(f"{main}/v1/models")).status_code == 200
        for path in ("/admin/layout", "/metrics"):
            assert (await http.get(f"{main}{path}", headers=ADMIN)).status_code in (401, 404)
            assert (await http.get(f"{admin}{path}")).status_code == 401
            assert (await http.get(f"{admin}{path}", headers=ADMIN)).status_code == 200
        assert (await http.get(f"{admin}/v1/models", headers=ADMIN)).status_code == 404
        assert (await http.get(f"{admin}/health")).status_code == 200


async def test_a_public_port_has_no_admin_paths(tmp_path: Path) -> None:
    (tmp_path / "api").write_text("sk-alice\n")
    config = ServeConfig(host="0.0.0.0", port=0, api_key_file=str(tmp_path / "api"))
    async with running_stack() as stack, ports(stack, config) as (main, _), httpx.AsyncClient() as http:
        assert (await http.get(f"{main}/v1/models", headers=ALICE)).status_code == 200
        for path in ("/admin/layout", "/metrics"):
            assert (await http.get(f"{main}{path}", headers=ALICE)).status_code == 404


async def test_hangup_reads_the_keys_again(tmp_path: Path) -> None:
    (tmp_path / "api").write_text("sk-old\n")
    config = ServeConfig(port=0, api_key_file=str(tmp_path / "api"))
    async with running_stack() as stack, ports(stack, config) as (main, _), httpx.AsyncClient() as http:
        (tmp_path / "api").write_text("sk-alice\n")
        signal.raise_signal(signal.SIGHUP)
        while (await http.get(f"{main}/v1/models", headers=ALICE)).status_code != 200:
            pass
        old = {"authorization": "Bearer sk-old"}
        assert (await http.get(f"{main}/v1/models", headers=old)).status_code == 401


async def test_the_page_needs_no_key_and_what_it_draws_does(stack: Stack, admin_keys: KeyRing) -> None:
    async with client(stack, Access(admin_keys=admin_keys)) as http:
        assert (await http.get("/dashboard")).status_code == 200
        assert (await http.get("/admin/history")).status_code == 401
        assert (await http.get("/admin/history", headers=ADMIN)).status_code == 200


async def test_figures_of_tenants_go_by_the_names_of_the_key_file(stack: Stack, api_keys: KeyRing) -> None:
    async with client(stack, Access(api_keys)) as http:
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}, headers=ALICE)
        text = (await http.get("/metrics")).text
    assert 'dtp_tenant_requests_total{tenant="alice"} 1.0' in text
    assert 'dtp_tenant_generation_tokens_total{tenant="alice"} 3.0' in text
    assert 'dtp_tenant_time_to_first_token_seconds_count{tenant="alice"} 1.0' in text
