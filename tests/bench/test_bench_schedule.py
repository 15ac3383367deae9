from __future__ import annotations

import numpy as np
import pytest

from dynamictp.bench.prompts import exact_prompts
from dynamictp.bench.schedule import Message, Request, schedule_digest


def test_completions_body() -> None:
    request = Request(0.0, (1, 2, 3), 8, seed=7, extra={"ignore_eos": True})
    body = request.body("m", return_token_ids=True)
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 8,
        "temperature": 0.0,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
    }


def test_chat_body_has_one_user_message_and_no_prompt() -> None:
    body = Request(0.0, "hi", 8, endpoint="chat").body("m", return_token_ids=False)
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert "prompt" not in body
    assert "return_token_ids" not in body


def test_earlier_messages_come_before_the_prompt() -> None:
    history = (Message("system", "be brief"), Message("user", "a"), Message("assistant", "b"))
    body = Request(0.0, "c", 8, endpoint="chat", history=history).body("m", return_token_ids=False)
    assert body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    with pytest.raises(ValueError, match="earlier messages"):
        Request(0.0, "c", 8, history=history)


def test_the_digest_tells_schedules_apart() -> None:
    one, other = Request(0.0, "a", 8), Request(0.0, "a", 8, tenant="t")
    assert schedule_digest([one]) == schedule_digest([Request(0.0, "a", 8)])
    assert len({schedule_digest(s) for s in ([one], [other], [one, other], [other, one])}) == 4


def test_bad_requests_are_refused_when_built() -> None:
    with pytest.raises(ValueError, match="before the origin"):
        Request(-1.0, "a", 1)
    with pytest.raises(ValueError, match="at least 1"):
        Request(0.0, "a", 0)
    with pytest.raises(ValueError, match="needs text"):
        Request(0.0, (1,), 1, endpoint="chat")


def test_exact_prompts_have_the_length_and_differ_from_the_first_token_on() -> None:
    ids = tuple(range(50))
    prompts = exact_prompts(ids, 120, 10, np.random.default_rng(0))
    assert {len(prompt) for prompt in prompts} == {120}
    assert len({prompt[0] for prompt in prompts}) == 10
    with pytest.raises(ValueError, match="51 distinct prompts"):
        exact_prompts(ids, 10, 51, np.random.default_rng(0))
