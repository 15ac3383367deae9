"""The official `openai` client against a real server of the embedded model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.live import Api, until

pytestmark = pytest.mark.e2e

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three primary colours."}]
PROMPT = "The capital of France is"


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_a_completion_says_what_it_used_and_where_it_ran(client: openai.OpenAI, api: Api) -> None:
    raw = client.completions.with_raw_response.create(
        model="demo", prompt=PROMPT, max_tokens=8, temperature=0, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-dynamictp-tp"] == "1"
    assert raw.headers["x-dynamictp-domain"] == api.layout()["domains"][0]["id"]
    answer = raw.parse()
    assert "Paris" in answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(api.tokenize(PROMPT))
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (8, "length")
    assert answer.model_extra is not None
    served = answer.model_extra["dynamictp"]["choices"][0]
    assert served == {
        "domain": raw.headers["x-dynamictp-domain"],
        **{"tp": 1, "tp_min": 1, "tp_max": 1, "handovers": 0, "recomputes": 0},
    }


def test_a_streamed_completion_is_the_whole_one_in_parts(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, temperature=0)
    stream = client.completions.create(
        model="demo",
        prompt=PROMPT,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert stream.response.headers["x-dynamictp-tp"] == "1"
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert len(chunks) > 8
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == 16
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.model_extra is not None
    assert last.model_extra["dynamictp"]["choices"][0]["tp"] == 1


def test_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_completion_tokens=24, temperature=0
    )
    assert whole.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=24, temperature=0, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["dynamictp"]["choices"][0]["tp_max"] == 1


def test_chat_ends_at_the_models_end_token(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the capital of France? Answer with one word."}
    ]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=64, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert "Paris" in (answer.choices[0].message.content or "")
    assert "<|im_end|>" not in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 64


async def test_thirty_two_streams_at_once(async_client: openai.AsyncOpenAI, api: Api) -> None:
    async def one(number: int) -> None:
        prompt = f"Story number {number}: " + "once upon a time " * (number % 5)
        limit = 6 + number % 7
        stream = await async_client.completions.create(
            model="demo",
            prompt=prompt,
            max_tokens=limit,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        tokens: list[int] = []
        reasons = []
        async for chunk in stream:
            for choice in chunk.choices:
                assert choice.model_extra is not None
                tokens += choice.model_extra.get("token_ids") or []
                reasons += [choice.finish_reason] if choice.finish_reason else []
            usage = chunk.usage
        assert reasons == ["length"]
        assert usage is not None
        assert len(tokens) == usage.completion_tokens == limit
        assert usage.prompt_tokens == len(api.tokenize(prompt))
        assert usage.total_tokens == usage.prompt_tokens + limit

    before = api.metric("dtp_request_success_total", finish_reason="length")
    await asyncio.gather(*(one(number) for number in range(32)))
    assert api.metric("dtp_request_success_total", finish_reason="length") == before + 32


async def test_streams_that_are_cancelled_free_their_rows_and_pages(
    async_client: openai.AsyncOpenAI, api: Api
) -> None:
    streams = []
    for number in range(4):
        stream = await async_client.completions.create(
            model="demo",
            prompt=f"Count to {number} thousand:",
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = aiter(stream)
        for _ in range(2):
            await anext(chunks)
        streams.append(stream)
    await asyncio.to_thread(until, lambda: api.metric("dtp_rows_used") == 4, "four rows in use")
    assert api.metric("dtp_kv_pages_used") > 0
    for stream in streams:
        await stream.close()
    await asyncio.to_thread(until, lambda: not api.in_use(), "rows and pages are free")


async def test_a_cancelled_whole_answer_frees_its_row(async_client: openai.AsyncOpenAI, api: Api) -> None:
    task = asyncio.create_task(
        async_client.completions.create(
            model="demo", prompt="Count:", max_tokens=2000, n=2, extra_body={"ignore_eos": True}
        )
    )
    await asyncio.to_thread(until, lambda: api.metric("dtp_rows_used") == 2, "two rows in use")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: not api.in_use(), "rows and pages are free")


def test_log_probabilities_are_those_of_scoring_the_text_again(client: openai.OpenAI, api: Api) -> None:
    prompt = api.tokenize(PROMPT)
    answer = client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        logprobs=3,
        extra_body={"return_token_ids": True},
    ).choices[0]
    assert answer.logprobs is not None
    chosen = answer.logprobs.token_logprobs
    assert chosen is not None
    assert answer.logprobs.top_logprobs is not None
    assert all(value is not None and value <= 0 for value in chosen)
    assert [max(top.values()) for top in answer.logprobs.top_logprobs] == chosen
    assert all(len(top) == 3 for top in answer.logprobs.top_logprobs)
    assert answer.model_extra is not None
    scored = client.completions.create(
        model="demo",
        prompt=[*prompt, *answer.model_extra["token_ids"]],
        max_tokens=0,
        echo=True,
        logprobs=0,
    ).choices[0]
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[len(prompt) :] == chosen


def test_chat_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    assert answer.logprobs is not None
    assert answer.logprobs.content is not None
    assert len(answer.logprobs.content) == 6
    for entry in answer.logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob
    spelled = b"".join(bytes(entry.bytes or ()) for entry in answer.logprobs.content)
    assert spelled.decode() == answer.message.content


def test_a_seed_repeats_and_choices_count_on_from_it(client: openai.OpenAI) -> None:
    def sample(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=12, temperature=1.0, seed=seed, n=n
        )
        return [choice.text for choice in answer.choices]

    two = sample(7, n=2)
    assert len(set(two)) == 2
    assert sample(7) + sample(8) == two


def test_unseeded_samples_differ(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=12, n=3)
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 36


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    text = (
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text
    )
    stop = text[12:15]
    assert text.index(stop) > 0
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=16, temperature=0, stop=["never there", stop], stream=stream
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_prompts_as_token_ids_and_as_a_list(client: openai.OpenAI, api: Api) -> None:
    def texts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str]:
        answer = client.completions.create(model="demo", prompt=prompt, max_tokens=6, temperature=0)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    other = "Two plus two is"
    both = texts([PROMPT, other])
    assert texts(PROMPT) + texts(other) == both
    assert texts(api.tokenize(PROMPT)) == both[:1]
    assert texts([api.tokenize(PROMPT), api.tokenize(other)]) == both


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'demo'") as unknown:
        client.completions.create(model="gpt-4", prompt="x")
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.completions.create(model="demo", prompt="x", temperature=3.0)
    assert bad.value.param == "temperature"
