"""More than the server can do: who is refused and how, slow clients, bounded memory."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from dynamictp.messages import CancelRequest, Outputs, PromptLogprobs, SubmitRequest, TokenLogprobs
from dynamictp.server import connection, generation
from dynamictp.server.access import Access
from dynamictp.server.admission import QueueLimits
from dynamictp.server.app import create_app
from dynamictp.server.bodies import Bodies
from dynamictp.server.choice import Choice
from dynamictp.server.keys import KeyRing
from tests.server.server_stack import Stack, on_port, running_stack
from tests.server.test_streaming import until


def post(stack: Stack, **body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(
        stack.post("/v1/completions", **{"prompt": "x" * 100, "max_tokens": 2, **body})
    )


async def fill(stack: Stack, **body: Any) -> list[asyncio.Task[httpx.Response]]:
    """Requests of 100 prompt tokens, as many as are taken. No token comes meanwhile."""
    stack.engine.hold_tokens = True
    taken: list[asyncio.Task[httpx.Response]] = []
    while True:
        task, live = post(stack, **body), stack.service.client.live
        await until(lambda task=task, live=live: task.done() or stack.service.client.live > live)  # type: ignore[misc]
        if task.done():
            assert task.result().status_code == 503
            return taken
        taken.append(task)


def release(stack: Stack) -> None:
    stack.engine.hold_tokens = False
    stack.engine.arrived()


async def test_who_would_wait_too_long_is_told_when_to_come_back_and_then_is_served() -> None:
    async with running_stack(limits=QueueLimits(wait_s=1.5)) as stack:
        taken = await fill(stack)
        # 1,000 tokens a second are assumed before anything is measured.
        assert len(taken) == 16
        response = await post(stack)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "wait_too_long"
        assert response.json()["error"]["type"] == "service_unavailable"
        assert int(response.headers["retry-after"]) >= 1
        assert (
            'dtp_requests_refused_total{reason="wait_too_long"} 2.0'
            in (await stack.http.get("/metrics")).text
        )
        release(stack)
        assert [(await task).status_code for task in taken] == [200] * 16
        assert (await post(stack)).status_code == 200


async def test_a_long_list_in_the_queue_refuses_nobody_else() -> None:
    async with running_stack() as stack:
        stack.engine.hold_tokens = True
        listed = post(stack, prompt=["x" * 200] * 900)
        await until(lambda: stack.service.client.live == 900)
        others = [post(stack) for _ in range(5)]
        await until(lambda: stack.service.client.live == 905)
        release(stack)
        assert {(await task).status_code for task in others} == {200}
        assert len((await listed).json()["choices"]) == 900


async def test_who_says_so_waits_longer_or_less_long() -> None:
    async with running_stack() as stack:
        taken = await fill(stack)
        patient = post(stack, timeout=60)
        await until(lambda: stack.service.client.live == len(taken) + 1)
        hasty = await stack.http.post(
            "/v1/completions", json={"prompt": "x"}, headers={"x-request-timeout": "0.5"}
        )
        assert hasty.status_code == 503
        release(stack)
        assert (await patient).status_code == 200
        await asyncio.gather(*taken)


async def test_without_a_limit_everything_waits() -> None:
    async with running_stack(limits=QueueLimits(requests=200, wait_s=0.0)) as stack:
        taken = await fill(stack)
        assert len(taken) == 200
        release(stack)
        assert {(await task).status_code for task in taken} == {200}


async def test_one_tenant_is_told_that_it_has_enough_and_the_other_is_served(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one first\ntwo second\n")
    ring = KeyRing(str(tmp_path / "keys"))
    async with running_stack(limits=QueueLimits(requests=20, wait_s=0.0), tenants=lambda: 2) as stack:
        stack.engine.hold_tokens = True
        transport = httpx.ASGITransport(create_app(stack.service, access=Access(ring)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def send(key: str) -> httpx.Response:
                headers = {"authorization": f"Bearer {key}"}
                return await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)

            waiting = [asyncio.create_task(send("one")) for _ in range(10)]
            await until(lambda: stack.service.client.live == 10)
            refused = await send("one")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_full")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
            waiting += [asyncio.create_task(send("two")) for _ in range(5)]
            await until(lambda: stack.service.client.live == 15)
            full = await send("two")
            assert (full.status_code, full.json()["error"]["code"]) == (503, "class_full")
            release(stack)
            assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_goes_to_the_engine_and_its_end_is_a_504(stack: Stack, stream: bool) -> None:
    stack.engine.hold_tokens = True
    task = asyncio.create_task(
        stack.http.post(
            "/v1/completions",
            json={"prompt": "x", "timeout": 30, "stream": stream},
            headers={"x-request-timeout": "20"},
        )
    )
    await until(lambda: bool(stack.engine.running))
    (submitted,) = [body for body in stack.engine.received if isinstance(body, SubmitRequest)]
    assert submitted.deadline_s is not None
    assert submitted.deadline_s - submitted.arrival_s == pytest.approx(20)
    stack.engine.expire(submitted.request_id)
    response = await task
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "100000"])
async def test_a_time_out_that_is_none_is_a_400(stack: Stack, value: str) -> None:
    response = await stack.http.post(
        "/v1/completions", json={"prompt": "x"}, headers={"x-request-timeout": value}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-timeout"


async def test_the_server_s_own_deadline_holds_for_all(stack: Stack) -> None:
    stack.service.request_timeout_s = 5.0
    await stack.complete(timeout=60)
    await stack.complete()
    sent = [body for body in stack.engine.received if isinstance(body, SubmitRequest)]
    assert [body.deadline_s - body.arrival_s for body in sent if body.deadline_s] == [pytest.approx(5)] * 2


# ---------------------------------------------------------------- slow clients

STREAM = b'{"prompt":"x","max_tokens":20000,"stream":true,"n":8,"logprobs":20,"ignore_eos":true}'


async def start_without_reading(url: str) -> socket.socket:
    """A client that asks for a long stream and reads nothing of it."""
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(STREAM)
    await loop.sock_sendall(client, head + STREAM)
    return client


async def test_a_client_that_never_reads_holds_little_and_its_request_ends() -> None:
    async with running_stack(max_model_len=100_000) as stack, on_port(stack) as url:
        client = await start_without_reading(url)
        await until(lambda: len(stack.engine.running) == 8)
        await until(lambda: stack.service.client.live == 0)
        cancelled = [body for body in stack.engine.received if isinstance(body, CancelRequest)]
        assert len(cancelled) == 8
        client.close()


async def test_a_client_that_takes_nothing_for_a_while_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_S", 0.05)
    monkeypatch.setattr(generation, "LEAST_UNREAD", 1 << 30)
    async with running_stack(max_model_len=100_000) as stack, on_port(stack) as url:
        client = await start_without_reading(url)
        await until(lambda: len(stack.engine.running) == 8)
        await until(lambda: stack.service.client.live == 0)
        client.close()
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{url}/health")).status_code == 200


async def exchange(url: str, sent: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    received = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return received


async def test_a_head_without_an_end_is_refused(stack: Stack) -> None:
    async with on_port(stack) as url:
        answer = await exchange(url, b"GET /health HTTP/1.1\r\nhost: x\r\nx-much: " + b"a" * 40_000)
        assert answer.startswith(b"HTTP/1.1 400 ")
        whole = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-much: %b\r\n\r\n" % (
            b"a" * 20_000
        )
        assert (await exchange(url, whole)).startswith(b"HTTP/1.1 200 ")


# ---------------------------------------------------------------- answers that are kept


async def test_an_answer_that_gets_too_large_to_be_kept_ends_with_a_400(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "MAX_KEPT", 1000)
    async with running_stack(max_model_len=100_000) as stack:
        body = {"prompt": "x", "max_tokens": 120, "ignore_eos": True, "n": 4}
        assert (await stack.post("/v1/completions", **body)).status_code == 200
        response = await stack.post("/v1/completions", **body, logprobs=2)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "answer_too_large")
        assert "`stream`" in error["message"]
        await until(lambda: stack.service.client.live == 0 and not stack.engine.running)
        async with stack.http.stream(
            "POST", "/v1/completions", json={**body, "stream": True, "logprobs": 2}
        ) as s:
            assert s.status_code == 200
            assert "[DONE]" in (await s.aread()).decode()
        metrics = (await stack.http.get("/metrics")).text
        assert 'reason="too_large"' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_prompts_count_for_every_choice(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(generation, "MAX_KEPT", 1000)
    async with running_stack() as stack:
        body = {"prompt": "x" * 100, "max_tokens": 1, "echo": True, "logprobs": 4, "stream": stream}
        assert (await stack.post("/v1/completions", **body)).status_code == 200
        response = await stack.post("/v1/completions", **body, n=3)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "answer_too_large"


async def test_log_probabilities_that_a_restarted_engine_sends_again_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "MAX_KEPT", 1000)
    async with running_stack() as stack:
        stack.engine.hold_tokens = True
        task = post(stack, max_tokens=1, echo=True, logprobs=4)
        client = stack.service.client
        await until(lambda: client.live == 1)
        (live,) = client.live_requests
        choice, entry = cast(Choice, live.sink), TokenLogprobs(120, -0.5, ((120, -0.5),) * 4)
        for count in (60, 70, 80):  # that the engine sends before it is lost
            part = PromptLogprobs(live.request_id, live.attempt, 1, (entry,) * count)
            stack.engine.link.send(Outputs(prompts=(part,)))
            await until(lambda count=count: len(choice.prompt_logprobs) == count or task.done())  # type: ignore[misc]
            client.resubmit_all()
        release(stack)
        response = await task
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"][0]["logprobs"]["tokens"]) == 101


# ---------------------------------------------------------------- bodies


async def test_bodies_take_so_much_memory_together_and_give_it_back(stack: Stack) -> None:
    stack.service.bodies = Bodies(total_bytes=1000)
    response = await stack.http.post("/v1/completions", content=b" " * 1001)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert stack.service.bodies.held_bytes == 0
    await stack.complete()
    assert stack.service.bodies.held_bytes == 0


async def test_a_body_that_does_not_come_is_a_408(stack: Stack) -> None:
    stack.service.bodies = Bodies(read_s=0.05)

    async with on_port(stack) as url:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        answer = await exchange(url, head + b'{"prompt":')
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_too_slow" in answer
    assert stack.service.bodies.held_bytes == 0
