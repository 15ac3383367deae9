"""Server-sent events over a real port, disconnects, and the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from dynamictp.messages import CancelRequest, SamplingParams
from dynamictp.testing.fake_engine import Script, ScriptedError
from tests.server.server_stack import (
    EOS,
    VOCAB,
    Stack,
    counting,
    on_port,
    read_events,
    running_stack,
    speaking,
)

USER: Any = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def served(stack: Stack) -> AsyncIterator[tuple[Stack, str]]:
    async with on_port(stack) as url:
        yield stack, url


@asynccontextmanager
async def official_client(script: Script) -> AsyncIterator[openai.AsyncOpenAI]:
    async with running_stack(script) as stack, on_port(stack) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client:
            yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_chat_stream_begins_with_the_role_and_ends_with_done() -> None:
    async with running_stack(speaking("né!")) as stack, on_port(stack) as url, httpx.AsyncClient() as http:
        headers, events = await read_events(http, f"{url}/v1/chat/completions", {"messages": USER})
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-dynamictp-domain"] == "d1"
        assert headers["x-dynamictp-tp"] == "1"
        assert headers["x-request-id"]
        assert events[-1] == "[DONE]"
        chunks = events[:-1]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["choices"][0]["delta"].get("content", "") for c in chunks[1:-1]] == ["n", "é", "!"]
        assert chunks[-1]["choices"][0]["delta"] == {}
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert "dynamictp" not in chunks[1]
        assert chunks[-1]["dynamictp"]["choices"][0]["domain"] == "d1"
        assert "usage" not in chunks[0]


async def test_usage_chunk_comes_last_with_no_choices(served: tuple[Stack, str]) -> None:
    _, url = served
    body = {"prompt": "hi", "max_tokens": 4, "seed": 3, "n": 2, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient() as http:
        _, events = await read_events(http, f"{url}/v1/completions", {**body, "return_token_ids": True})
        whole = (
            await http.post(
                f"{url}/v1/completions", json={"prompt": "hi", "max_tokens": 4, "seed": 3, "n": 2}
            )
        ).json()
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert len(usage["dynamictp"]["choices"]) == 2
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all("dynamictp" not in chunk for chunk in chunks)
    assert chunks[0]["prompt_token_ids"] == [*b"hi"]
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == whole["choices"][index]["text"]
        assert sum(len(choice.get("token_ids", ())) for choice in mine) == 4
        assert mine[-1]["finish_reason"] == "length"


async def test_stop_strings_never_leak_in_part() -> None:
    async with running_stack(speaking("one <|end|> two")) as stack, on_port(stack) as url:
        async with httpx.AsyncClient() as http:
            _, events = await read_events(
                http, f"{url}/v1/completions", {"prompt": "x", "max_tokens": 50, "stop": ["<|end|>"]}
            )
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert text == "one "
        await until(lambda: not stack.engine.running)


async def test_logprobs_and_echo_stream() -> None:
    async with running_stack(speaking("ab")) as stack, on_port(stack) as url, httpx.AsyncClient() as http:
        _, events = await read_events(
            http, f"{url}/v1/completions", {"prompt": "hey", "max_tokens": 2, "echo": True, "logprobs": 1}
        )
        choices = [event["choices"][0] for event in events[:-1]]
        assert "".join(choice["text"] for choice in choices) == "heyab"
        offsets = [o for choice in choices if choice["logprobs"] for o in choice["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2, 3, 4]
        _, events = await read_events(
            http, f"{url}/v1/chat/completions", {"messages": USER, "max_tokens": 2, "logprobs": True}
        )
        entries = [e["choices"][0]["logprobs"] for e in events[:-1] if e["choices"][0]["logprobs"]]
        assert [entry["token"] for part in entries for entry in part["content"]] == ["a", "b"]


async def test_an_error_after_the_first_token_is_an_event() -> None:
    def script(prompt: Any, sampling: SamplingParams, position: int) -> int:
        if position == 2:
            raise ScriptedError("worker lost twice")
        return 65

    async with running_stack(script) as stack, on_port(stack) as url, httpx.AsyncClient() as http:
        _, events = await read_events(http, f"{url}/v1/completions", {"prompt": "x"})
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["message"] == "worker lost twice"
        assert "".join(event["choices"][0]["text"] for event in events[:-2]) == "AA"


async def test_an_error_before_the_first_token_is_a_status() -> None:
    def script(prompt: Any, sampling: SamplingParams, position: int) -> int:
        raise ScriptedError("no")

    async with running_stack(script) as stack, on_port(stack) as url, httpx.AsyncClient() as http:
        response = await http.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "no"


async def test_headers_wait_for_the_first_token(served: tuple[Stack, str]) -> None:
    stack, url = served
    stack.engine.hold_tokens = True
    async with httpx.AsyncClient() as http:
        request = http.build_request("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True})
        sending = asyncio.create_task(http.send(request, stream=True))
        await until(lambda: bool(stack.engine.running))
        assert not sending.done()
        stack.engine.hold_tokens = False
        stack.engine.arrived()
        response = await sending
        assert response.headers["x-dynamictp-tp"] == "1"
        await response.aclose()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("held", [True, False])
async def test_a_client_that_goes_is_cancelled_at_once(
    served: tuple[Stack, str], stream: bool, held: bool
) -> None:
    stack, url = served
    stack.engine.hold_tokens = held
    stack.engine.step_s = 0.002
    body = {"prompt": "x", "max_tokens": 250, "stream": stream, "ignore_eos": True}
    async with httpx.AsyncClient() as http:
        sending = asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
        await until(lambda: bool(stack.engine.running))
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    await until(lambda: any(isinstance(m, CancelRequest) for m in stack.engine.received))
    await until(lambda: not stack.engine.running)
    assert stack.service.client.live == 0


async def test_a_reader_that_stalls_does_not_hold_up_the_others(served: tuple[Stack, str]) -> None:
    stack, url = served
    host, port = url.removeprefix("http://").split(":")
    body = b'{"prompt":"x","max_tokens":250,"stream":true,"n":100,"logprobs":20,"ignore_eos":true}'
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    try:
        await writer.drain()
        await until(lambda: len(stack.engine.running) == 100)
        async with httpx.AsyncClient() as http:
            answer = (await http.post(f"{url}/v1/completions", json={"prompt": "y", "max_tokens": 20})).json()
            assert answer["usage"]["completion_tokens"] == 20
    finally:
        writer.close()
    await until(lambda: stack.service.client.live == 0)
    assert reader is not None


async def test_the_official_client_reads_answers_and_streams() -> None:
    async with official_client(speaking("Hello there")) as client:
        chat = await client.chat.completions.create(model="tiny", messages=USER)
        assert chat.choices[0].message.content == "Hello there"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == len("Hello there") + 1
        stream = await client.chat.completions.create(
            model="tiny",
            messages=USER,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello there"
        assert chunks[-1].usage is not None
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        completion = await client.completions.create(model="tiny", prompt="x", max_tokens=5, stop="l")
        assert completion.choices[0].text == "He"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gone", messages=USER)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="tiny", messages=USER, temperature=5)


async def test_the_official_client_raises_on_an_error_in_mid_stream() -> None:
    def script(prompt: Any, sampling: SamplingParams, position: int) -> int:
        if position == 1:
            raise ScriptedError("worker lost")
        return 65

    async with official_client(script) as client:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="worker lost"):
            async for _ in stream:
                pass


async def test_many_streams_at_once_are_each_whole() -> None:
    script = counting(VOCAB)

    async def one(http: httpx.AsyncClient, url: str, seed: int) -> list[int]:
        body = {"prompt": "x", "max_tokens": 30, "seed": seed, "return_token_ids": True, "ignore_eos": True}
        _, events = await read_events(http, f"{url}/v1/completions", body)
        return [t for event in events[:-1] for t in event["choices"][0].get("token_ids", ())]

    limits = httpx.Limits(max_connections=64)
    async with (
        running_stack(script) as stack,
        on_port(stack) as url,
        httpx.AsyncClient(limits=limits) as http,
    ):
        streams = await asyncio.gather(*(one(http, url, seed) for seed in range(32)))
    for seed, tokens in enumerate(streams):
        assert tokens == [script([120], SamplingParams(seed, 30), position) for position in range(30)]
    assert EOS in {token for tokens in streams for token in tokens}
