"""`/v1/completions` without streaming."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamictp.messages import CancelRequest, SubmitRequest, unpack_tokens
from dynamictp.server.admission import QueueLimits
from tests.server.server_stack import EOS, Stack, running_stack, speaking


def submitted(stack: Stack) -> list[SubmitRequest]:
    return [message for message in stack.engine.received if isinstance(message, SubmitRequest)]


async def test_an_answer_has_the_form_clients_know(stack: Stack) -> None:
    answer = await stack.complete(max_tokens=5, seed=1)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    choice = answer["choices"][0]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["dynamictp"] == {
        "choices": [{"domain": "d1", "tp": 1, "tp_min": 1, "tp_max": 1, "handovers": 0, "recomputes": 0}]
    }


async def test_headers_say_where_it_ran(stack: Stack) -> None:
    response = await stack.http.post(
        "/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine-1"}
    )
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-dynamictp-domain"] == "d1"
    assert response.headers["x-dynamictp-tp"] == "1"
    response = await stack.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "a b"})
    assert response.headers["x-request-id"] not in ("", "a b")


async def test_default_length_is_sixteen_or_what_the_context_leaves(stack: Stack) -> None:
    assert (await stack.complete())["usage"]["completion_tokens"] == 16
    assert (await stack.complete(prompt=[1] * 250))["usage"]["completion_tokens"] == 6


async def test_context_limits_name_both_lengths(stack: Stack) -> None:
    error = await stack.refused("/v1/completions", prompt=[1] * 256)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error["message"].count("256 tokens") == 2
    error = await stack.refused("/v1/completions", prompt=[1] * 250, max_tokens=7)
    assert error["param"] == "max_tokens"
    assert "250 tokens" in error["message"]
    assert "256 tokens" in error["message"]
    assert (await stack.refused("/v1/completions", prompt=""))["param"] == "prompt"
    assert not submitted(stack)


async def test_several_prompts_and_choices_are_ordered(stack: Stack) -> None:
    answer = await stack.complete(prompt=["a", "b"], n=2, max_tokens=3, seed=10, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97], [97], [98], [98]]
    assert [request.sampling.seed for request in submitted(stack)] == [10, 11, 10, 11]
    alone = await stack.complete(prompt="b", max_tokens=3, seed=11, return_token_ids=True)
    assert alone["choices"][0]["token_ids"] == answer["choices"][3]["token_ids"]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 12


async def test_a_seed_is_drawn_when_none_is_given(stack: Stack) -> None:
    await stack.complete(n=2)
    await stack.complete()
    seeds = [request.sampling.seed for request in submitted(stack)]
    assert seeds[1] == (seeds[0] + 1) % (1 << 63)
    assert len(set(seeds)) == 3


async def test_end_token_stops_and_is_left_out_of_the_text() -> None:
    async with running_stack(speaking("bye")) as stack:
        answer = await stack.complete(max_tokens=50, return_token_ids=True)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("bye", "stop")
        assert choice["token_ids"] == [*b"bye", EOS]
        assert answer["usage"]["completion_tokens"] == 4
        shown = await stack.complete(
            max_tokens=50, skip_special_tokens=False, include_stop_str_in_output=True
        )
        assert shown["choices"][0]["text"] == "bye<eos>"
        ignored = await stack.complete(max_tokens=6, ignore_eos=True, skip_special_tokens=False)
        assert ignored["choices"][0]["text"] == "bye<eos><eos><eos>"
        assert ignored["choices"][0]["finish_reason"] == "length"


async def test_stop_string_cuts_the_text_and_cancels_in_the_engine() -> None:
    async with running_stack(speaking("one, two, three")) as stack:
        answer = await stack.complete(max_tokens=50, stop=["two", "zzz"])
        assert answer["choices"][0]["text"] == "one, "
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len("one, two")
        kept = await stack.complete(max_tokens=50, stop="two", include_stop_str_in_output=True)
        assert kept["choices"][0]["text"] == "one, two"
        late = await stack.complete(max_tokens=50, stop=["one", "three"], min_tokens=4)
        assert late["choices"][0]["text"] == "one, two, "
        # One more turn so that the last cancellation is read.
        await stack.complete(max_tokens=1)
        cancelled = [m for m in stack.engine.received if isinstance(m, CancelRequest)]
        assert len(cancelled) == 3
        assert not stack.engine.running
        assert stack.service.client.live == 0


async def test_stop_token_ids_and_unfinished_characters() -> None:
    async with running_stack(speaking("né🙂!")) as stack:
        stopped = await stack.complete(max_tokens=50, stop_token_ids=[ord("!")])
        assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("né🙂", "stop")
        shown = await stack.complete(
            max_tokens=50, stop_token_ids=[ord("!")], include_stop_str_in_output=True
        )
        assert shown["choices"][0]["text"] == "né🙂!"
        cut = await stack.complete(max_tokens=5)
        assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == ("né\ufffd", "length")


async def test_legacy_logprobs() -> None:
    async with running_stack(speaking("abc")) as stack:
        logprobs = (await stack.complete(max_tokens=3, logprobs=2))["choices"][0]["logprobs"]
        assert logprobs == {
            "text_offset": [0, 1, 2],
            "token_logprobs": [-0.5, -0.5, -0.5],
            "tokens": ["a", "b", "c"],
            "top_logprobs": [{"a": -0.5, "b": -1.0}, {"b": -0.5, "c": -1.0}, {"c": -0.5, "d": -1.0}],
        }
        chosen = (await stack.complete(max_tokens=1, logprobs=0))["choices"][0]["logprobs"]
        assert chosen["top_logprobs"] == [{"a": -0.5}]


async def test_echo_scores_the_prompt() -> None:
    async with running_stack(speaking("abc")) as stack:
        choice = (await stack.complete(prompt="hey", max_tokens=2, echo=True, logprobs=1))["choices"][0]
        assert choice["text"] == "heyab"
        assert choice["logprobs"]["tokens"] == ["h", "e", "y", "a", "b"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"][0] is None
        scored = await stack.complete(prompt=[*b"hey"], max_tokens=0, echo=True, logprobs=1)
        assert scored["choices"][0]["text"] == "hey"
        assert scored["choices"][0]["logprobs"]["tokens"] == ["h", "e", "y"]
        assert scored["choices"][0]["finish_reason"] == "length"
        assert scored["usage"]["completion_tokens"] == 0


async def test_sampling_fields_reach_the_engine(stack: Stack) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "seed": -1,
        "max_tokens": 4,
    }
    await stack.complete(**fields, logit_bias={"5": 2, "3": -1.5}, stop_token_ids=[9], priority=5)
    request = submitted(stack)[0]
    sampling = request.sampling
    for name, value in fields.items():
        if name != "seed":
            assert getattr(sampling, name) == value
    assert sampling.seed == (1 << 63) - 1
    assert sampling.logit_bias == ((3, -1.5), (5, 2.0))
    assert sampling.stop_ids == (9, EOS)
    assert request.priority == 0
    assert unpack_tokens(request.tokens) == [*b"hi"]


async def test_engine_errors_are_the_clients_500() -> None:
    from dynamictp.testing.fake_engine import ScriptedError

    def script(prompt: Any, sampling: Any, position: int) -> int:
        raise ScriptedError("not a number in the logits")

    async with running_stack(script) as stack:
        response = await stack.post("/v1/completions", prompt="x")
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "not a number in the logits"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_before_the_engine_is_ready_clients_are_told_to_retry(path: str) -> None:
    async with running_stack(announce=False) as stack:
        response = (
            await stack.post(path, prompt="x")
            if "chat" not in path
            else await stack.post(path, messages=[{"role": "user", "content": "x"}])
        )
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert (await stack.http.get("/ready")).status_code == 503
        assert (await stack.http.get("/health")).status_code == 200


async def test_more_prompts_than_the_queue_holds_are_refused_as_a_whole() -> None:
    async with running_stack(limits=QueueLimits(requests=3)) as stack:
        stack.engine.hold_tokens = True
        waiting = asyncio.create_task(stack.post("/v1/completions", prompt="x"))
        while stack.service.client.live < 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        response = await stack.post("/v1/completions", prompt=["x", "y", "z"])
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "server_full"
        assert int(response.headers["retry-after"]) >= 1
        assert stack.service.client.live == 1
        stack.engine.hold_tokens = False
        stack.engine.arrived()
        assert (await waiting).status_code == 200
