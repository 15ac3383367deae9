"""A whole server over a fake engine in one event loop, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dynamictp.clock import Clock
from dynamictp.control.values import Mode
from dynamictp.facts import ModelFacts, RopeFacts
from dynamictp.messages import SamplingParams
from dynamictp.model.chat import ChatTemplate
from dynamictp.model.tokenizer import Tokenizer
from dynamictp.server.admission import QueueLimits
from dynamictp.server.app import create_app
from dynamictp.server.run import ServerRunner
from dynamictp.server.service import Service
from dynamictp.testing.fake_engine import FakeEngine, Script, counting
from dynamictp.transport import MemoryLink, memory_link_pair

EOS = 256
VOCAB = 260
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def facts() -> ModelFacts:
    return ModelFacts(
        family="llama",
        layers=1,
        hidden=144,
        query_heads=9,
        kv_heads=3,
        head_dim=16,
        intermediate=288,
        vocab=VOCAB,
        max_context=256,
        norm_eps=1e-5,
        rope=RopeFacts(10_000.0),
        eos_ids=(EOS,),
    )


def byte_tokenizer() -> Tokenizer:
    """Token i < 256 is byte i; 256 is the end token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(rest)}
    backend = Backend(models.BPE(vocab={spelled[byte]: byte for byte in range(0x100)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(
        backend, coding="byte_level", special_tokens={"eos_token": "<eos>"}, id_limit=VOCAB, eos_ids=(EOS,)
    )


def speaking(text: str) -> Script:
    """The engine says `text`, then ends."""
    tokens = [*text.encode(), EOS]

    def script(prompt: Sequence[int], sampling: SamplingParams, position: int) -> int:
        return tokens[min(position, len(tokens) - 1)]

    return script


@dataclass
class Stack:
    service: Service
    engine: FakeEngine
    app: FastAPI
    http: httpx.AsyncClient
    client_link: MemoryLink

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", **{"prompt": "hi", **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a request that must be a 400."""
        response = await self.post(path, **body)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@asynccontextmanager
async def running_stack(
    script: Script | None = None,
    *,
    announce: bool = True,
    mode: Mode = "static",
    limits: QueueLimits | None = None,
    tenants: Callable[[], int] = lambda: 1,
    clock: Clock | None = None,
    devices: int = 2,
    degrees: tuple[int, ...] = (1, 2),
    **engine: Any,
) -> AsyncIterator[Stack]:
    """The stack with an HTTP client that calls the application directly (no streaming, no disconnects).

    Without a script the engine never says the end token: the server draws the seed of a request that has
    none, so an answer's length would be a matter of luck.
    """
    service = Service.create(
        model="tiny",
        tokenizer=byte_tokenizer(),
        template=ChatTemplate(TEMPLATE, special_tokens={}),
        facts=facts(),
        devices=devices,
        legal_degrees=degrees,
        limits=limits,
        tenants=tenants,
        clock=clock,
        mode=mode,
    )
    fake: list[FakeEngine] = []
    left, right = memory_link_pair(service.client.wake, lambda: fake[0].arrived() if fake else None)
    fake.append(
        FakeEngine(
            right, script or counting(EOS), vocab=VOCAB, devices=devices, degrees=degrees, **engine
        )
    )  # fmt: skip
    service.client.attach(left)
    if announce:
        fake[0].start()
        await service.client.wait_ready()
    app = create_app(service)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield Stack(service, fake[0], app, http, left)
    service.client.detach()
    await service.desk.close()


@asynccontextmanager
async def on_port(stack: Stack) -> AsyncIterator[str]:
    """The stack's application on a real port; gives its URL."""
    runner = ServerRunner(stack.app, port=0)
    port = await runner.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.stop()


async def read_events(
    http: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> tuple[httpx.Headers, list[Any]]:
    """Headers and all events of a streamed request, `[DONE]` as text."""
    events: list[Any] = []
    async with http.stream("POST", url, json={"stream": True, **body}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                payload = line.removeprefix("data: ")
                events.append(payload if payload == "[DONE]" else json.loads(payload))
    return response.headers, events
