"""Clients that send nonsense, or go at any moment: each is answered or let go, and nothing of them stays."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import httpx
import pytest

from tests.server.server_stack import Stack, on_port, running_stack

DEEP = 100_000
MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  \n",
    "bare word": b"prompt",
    "array": b"[]",
    "text": b'"prompt"',
    "number": b"1",
    "null": b"null",
    "cut": b'{"prompt": "x"',
    "more": b'{"prompt": "x"} {}',
    "comma": b'{"prompt": "x",}',
    "single quotes": b"{'prompt': 'x'}",
    "comment": b'{"prompt": "x" /* y */}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "minus Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "beyond a float": b'{"prompt": "x", "temperature": 1e400}',
    "leading zero": b'{"prompt": "x", "n": 01}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
    "encoded surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "control character": b'{"prompt": "\x00"}',
    "bad escape": b'{"prompt": "\\x41"}',
    "byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "gzip": gzip.compress(b'{"prompt": "x"}'),
    "form": b"prompt=x&max_tokens=1",
    "multipart": b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n--x--\r\n',
    "deep arrays": b'{"prompt": ' + b"[" * DEEP,
    "deep arrays, closed": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"prompt": ' * DEEP + b"1" + b"}" * DEEP,
    "deep kwargs": b'{"chat_template_kwargs": ' + b'{"a": ' * DEEP + b"1" + b"}" * DEEP + b"}",
}
HUGE: dict[str, bytes] = {
    "digits": b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
    "negative digits": b'{"prompt": "x", "n": -' + b"9" * 100_000 + b"}",
    "fraction": b'{"prompt": "x", "n": 1.' + b"9" * 100_000 + b"}",
    "exponent": b'{"prompt": "x", "n": 1e-999999999}',
    "token": b'{"prompt": [18446744073709551616]}',
    "bias": b'{"prompt": "x", "logit_bias": {"' + b"9" * 100_000 + b'": 1}}',
    "name": b'{"prompt": "x", "' + b"n" * 100_000 + b'": 1}',
    "many names": b'{"prompt": "x"' + b"".join(b', "n%d": 1' % i for i in range(50_000)) + b"}",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_what_is_no_json_object_is_a_400(stack: Stack, path: str) -> None:
    for name, body in MALFORMED.items():
        response = await stack.http.post(path, content=body)
        assert response.status_code == 400, name
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json"), name
        assert len(error["message"]) < 300, name
    response = await stack.http.put("/admin/layout", content=MALFORMED["cut"])
    assert response.json()["error"]["code"] == "invalid_json"


async def test_huge_values_are_refused_in_short_messages(stack: Stack) -> None:
    for name, body in HUGE.items():
        response = await stack.http.post("/v1/completions", content=body)
        assert response.status_code == 400, name
        assert len(response.content) < 500, name


async def test_nested_values_that_a_template_may_get_are_bounded_by_the_parser(stack: Stack) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = {"a": deep}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"deep": deep},
        "max_tokens": 1,
    }
    assert (await stack.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_of_repeated_names_the_last_counts(stack: Stack) -> None:
    body = b'{"prompt": "x", "max_tokens": 9, "max_tokens": 1, "temperature": 9, "temperature": 0}'
    answer = (await stack.http.post("/v1/completions", content=body)).json()
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "x"]
)
async def test_the_content_type_does_not_matter(stack: Stack, kind: str) -> None:
    """Clients of the field's servers send what their library sends; the body says what it is."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    response = await stack.http.post("/v1/completions", content=body, headers={"content-type": kind})
    assert response.status_code == 200


# --- raw connections --------------------------------------------------------------------------------------

STREAM = json.dumps({"prompt": "x", "max_tokens": 250, "stream": True, "ignore_eos": True, "n": 3}).encode()
WHOLE = json.dumps({"prompt": "x", "max_tokens": 250, "ignore_eos": True, "n": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def request(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


@asynccontextmanager
async def raw(url: str) -> AsyncIterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.setblocking(False)
    try:
        yield connection
    finally:
        connection.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def nothing_left(stack: Stack, tasks: int) -> None:
    """No request in client or engine, and no task that was not there before."""
    await until(lambda: stack.service.client.live == 0)
    await until(lambda: not stack.engine.running)
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
STAGES: dict[str, tuple[bytes, Literal["connection", "task", "engine"]]] = {
    # What is sent before the client goes, and how far the server has come by then
    "connected": (b"", "connection"),
    "in the request line": (b"POST /v1/compl", "connection"),
    "in the headers": (HEAD + b"content-le", "connection"),
    "before the body": (HEAD + b"content-length: 100\r\n\r\n", "task"),
    "in the body": (request(STREAM)[:-10], "task"),
    "in a chunk": (CHUNKED + b'20\r\n{"prompt"', "task"),
    "between chunks": (CHUNKED + b'5\r\n{"pro\r\n', "task"),
    "before the first token of a stream": (request(STREAM), "engine"),
    "before the answer": (request(WHOLE), "engine"),
    "with a second request behind": (request(STREAM) + request(WHOLE), "engine"),
}


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_may_go_at_any_stage(stage: str, reset: bool) -> None:
    sent, reached = STAGES[stage]
    async with running_stack() as stack, on_port(stack) as url:
        stack.engine.hold_tokens = True
        tasks = len(asyncio.all_tasks())
        async with raw(url) as connection:
            await asyncio.get_running_loop().sock_sendall(connection, sent)
            match reached:
                case "connection":
                    # What connected later has been answered.
                    async with httpx.AsyncClient() as http:
                        await http.get(f"{url}/health")
                case "task":
                    await until(lambda: len(asyncio.all_tasks()) > tasks)
                case "engine":
                    await until(lambda: len(stack.engine.running) == 3)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await nothing_left(stack, tasks)
        stack.engine.hold_tokens = False
        stack.engine.arrived()
        assert (await httpx_post(url, b'{"prompt": "x", "max_tokens": 1}')).status_code == 200


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_client_may_go_while_it_is_answered(reset: bool) -> None:
    async with running_stack(step_s=0.001) as stack, on_port(stack) as url:
        tasks = len(asyncio.all_tasks())
        async with raw(url) as connection:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, request(STREAM))
            assert b"200 OK" in await loop.sock_recv(connection, 64)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await nothing_left(stack, tasks)


async def test_a_client_may_go_after_its_answer() -> None:
    async with running_stack() as stack, on_port(stack) as url:
        tasks = len(asyncio.all_tasks())
        async with raw(url) as connection:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, request(STREAM))
            answer = b""
            while b"[DONE]" not in answer:
                answer += await loop.sock_recv(connection, 1 << 16)
        await nothing_left(stack, tasks)


PROTOCOL = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "bad header": b"GET /health HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n",
    "bad header name": b"GET /health HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n",
    "NUL": b"GET /health HTTP/1.1\r\nhost: x\r\na: \x00\r\n\r\n",
    "huge header": b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"x" * (1 << 20) + b"\r\n\r\n",
    "endless line": b"GET /" + b"x" * (1 << 20),
    "negative length": HEAD + b"content-length: -1\r\n\r\n",
    "length of words": HEAD + b"content-length: ten\r\n\r\n",
    "two lengths": HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "bad chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
    "unknown coding": HEAD + b"transfer-encoding: gzip\r\n\r\n",
}


@pytest.mark.parametrize("name", PROTOCOL)
async def test_what_is_no_http_is_refused_and_harms_nobody(name: str) -> None:
    async with running_stack() as stack, on_port(stack) as url:
        tasks = len(asyncio.all_tasks())
        async with raw(url) as connection:
            loop = asyncio.get_running_loop()
            with suppress(ConnectionError):
                await loop.sock_sendall(connection, PROTOCOL[name])
            answer = b""
            with suppress(ConnectionError):
                # The server answers and hangs up.
                async with asyncio.timeout(20):
                    while part := await loop.sock_recv(connection, 1 << 16):
                        answer += part
            assert answer == b"" or answer.split(b" ", 2)[1][:1] in (b"4", b"5"), answer[:200]
            assert b" 500 " not in answer[:20]
        await nothing_left(stack, tasks)
        assert (await httpx_post(url, b'{"prompt": "x", "max_tokens": 1}')).status_code == 200


async def httpx_post(url: str, body: bytes) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.post(f"{url}/v1/completions", content=body)
