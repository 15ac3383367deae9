from __future__ import annotations

import numpy as np
import pytest

from dynamictp.bench.prompts import exact_prompts
from dynamictp.bench.schedule import (
    Bursts,
    Request,
    burst_arrivals,
    constant_arrivals,
    poisson_arrivals,
)


def test_constant_arrivals_are_even() -> None:
    assert constant_arrivals(4.0, 1.0) == (0.0, 0.25, 0.5, 0.75)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = np.array(poisson_arrivals(50.0, 200.0, seed=1))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.05)  # exponential gaps
    assert times[-1] < 200.0


def test_the_seed_decides_the_arrivals() -> None:
    assert poisson_arrivals(5.0, 20.0, seed=3) == poisson_arrivals(5.0, 20.0, seed=3)
    assert poisson_arrivals(5.0, 20.0, seed=3) != poisson_arrivals(5.0, 20.0, seed=4)


def test_bursts_have_their_rate_inside_and_the_base_rate_outside() -> None:
    bursts = Bursts(base_per_s=2.0, burst_per_s=40.0, period_s=10.0, burst_s=2.0, offset_s=-1.0)
    times = np.array(burst_arrivals(bursts, 1_000.0, seed=2))
    inside = (times + 1.0) % 10.0 < 2.0
    assert inside.sum() / 200.0 == pytest.approx(40.0, rel=0.05)
    assert (~inside).sum() / 800.0 == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("base", "burst", "period", "length"), [(1, 2, 5, 6), (1, 2, 0, 0), (-1, 2, 5, 1), (0, 0, 5, 1)]
)
def test_impossible_bursts_are_refused(base: float, burst: float, period: float, length: float) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own wording
        Bursts(base, burst, period, length)


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
