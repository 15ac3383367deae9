"""The embedded model's tokenizer and chat template behind the API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import httpx
import pytest_asyncio

from dynamictp.messages import SamplingParams, SubmitRequest, unpack_tokens
from dynamictp.model.load import open_model
from dynamictp.server.service import Service
from dynamictp.testing.fake_engine import FakeEngine
from tests.server.server_stack import on_port, read_events, running_stack

ANSWER = "Grüße, 世界 🙂! The end."


@pytest_asyncio.fixture
async def url() -> AsyncIterator[tuple[str, FakeEngine, Service]]:
    source = open_model("demo")
    tokenizer, template = source.tokenizer(), source.chat_template()
    spoken = [*tokenizer.encode(ANSWER, False), tokenizer.eos_ids[0]]

    def script(prompt: Sequence[int], sampling: SamplingParams, position: int) -> int:
        return spoken[min(position, len(spoken) - 1)]

    async with running_stack(script, max_model_len=2048) as stack:
        stack.service.tokenizer, stack.service.template, stack.service.facts = (
            tokenizer,
            template,
            source.facts,
        )
        async with on_port(stack) as address:
            yield address, stack.engine, stack.service


async def test_chat_and_stop_over_real_token_boundaries(url: tuple[str, FakeEngine, Service]) -> None:
    address, engine, service = url
    messages = [{"role": "user", "content": "Say 12 + 3 in Chinese: 你好"}]
    async with httpx.AsyncClient() as http:
        _, events = await read_events(http, f"{address}/v1/chat/completions", {"messages": messages})
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert text == ANSWER
        request = engine.received[0]
        assert isinstance(request, SubmitRequest)
        prompt = service.tokenizer.decode(unpack_tokens(request.tokens), skip_special_tokens=False)
        assert prompt.startswith("<|im_start|>system\n")
        assert prompt.endswith(
            "<|im_start|>user\nSay 12 + 3 in Chinese: 你好<|im_end|>\n<|im_start|>assistant\n"
        )
        for stop, expected in (
            (" 🙂", "Grüße, 世界"),
            ("界 🙂! T", "Grüße, 世"),
            ("nd.", "Grüße, 世界 🙂! The e"),
        ):
            body = {"prompt": "x", "max_tokens": 100, "stop": stop}
            _, events = await read_events(http, f"{address}/v1/completions", body)
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected
