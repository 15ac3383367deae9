"""Each sampling rule, and that a choice depends on nothing but the row, its parameters and its position."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.messages import NO_TOKEN, SamplingParams
from dynamictp.worker.sampler import choose, log_sum_exp, token_logprobs, uniform

NO_TOKENS = np.array([], np.int32)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 9, "temperature": 0.0, **changes})  # type: ignore[arg-type]


def logits(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def frequencies(row: np.ndarray, draws: int = 4000, **changes: object) -> np.ndarray:
    counts = np.zeros(len(row))
    for seed in range(draws):
        counts[choose(row, NO_TOKENS, 0, params(**{"seed": seed, "temperature": 1.0, **changes}))] += 1
    return counts / draws


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert choose(logits(1, 3, 2, 3), NO_TOKENS, 0, params()) == 1


def test_the_row_is_left_as_it_was() -> None:
    row = logits(1, 3, 2, 3)
    choose(row, tokens(1, 2), 1, params(logit_bias=((1, -9.0),), presence_penalty=1.0, temperature=1.0))
    assert row.tolist() == [1, 3, 2, 3]


def test_logit_bias() -> None:
    assert choose(logits(1, 3, 2), NO_TOKENS, 0, params(logit_bias=((0, 2.5), (1, -0.1)))) == 0


def test_min_tokens_hold_back_the_stop_tokens() -> None:
    masked = params(min_tokens=2, stop_ids=(1, 700))
    row = logits(1, 3, 2)
    assert choose(row, tokens(5), 1, masked) == 2
    assert choose(row, tokens(5, 0), 1, masked) == 2
    assert choose(row, tokens(5, 0, 0), 1, masked) == 1


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    row = logits(2.0, 1.5, 1.0)
    assert choose(row, tokens(0, 0, 0), 3, params(presence_penalty=2.0)) == 0
    assert choose(row, tokens(0, 0, 0), 2, params(presence_penalty=0.6)) == 1
    assert choose(row, tokens(0), 0, params(frequency_penalty=0.4)) == 0
    assert choose(row, tokens(0, 0), 0, params(frequency_penalty=0.4)) == 1


def test_repetition_penalty_counts_prompt_and_output() -> None:
    assert choose(logits(2.0, 1.5), tokens(0), 1, params(repetition_penalty=1.5)) == 1
    assert choose(logits(-1.0, -1.2), tokens(0), 0, params(repetition_penalty=1.5)) == 1
    assert choose(logits(-1.0, -1.2), tokens(0), 0, params(repetition_penalty=1.1)) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-320, 1e-300, 1e-38, 1e-30, 10.0])
def test_no_parameter_takes_logits_out_of_range(penalty: float, temperature: float) -> None:
    row = logits(-90, 3e38, 2, -3e38, 0)
    changes = {"repetition_penalty": penalty, "temperature": temperature, "logit_bias": ((1, 100.0),)}
    changes |= {"min_tokens": 5, "stop_ids": (1,), "frequency_penalty": -2.0}
    got = choose(row, tokens(0, 1, 2, 3, 2), 1, params(**changes))
    assert got != 1
    assert choose(logits(1, 2), tokens(0), 1, params(min_tokens=5, stop_ids=(0, 1))) in {0, 1}


def test_draws_follow_the_distribution() -> None:
    expected = np.array([0.5, 0.3, 0.15, 0.05])
    found = frequencies(np.log(expected).astype(np.float32))
    assert np.abs(found - expected).max() < 4 * math.sqrt(0.25 / 4000)


def test_temperature_sharpens() -> None:
    row = np.log(np.array([0.6, 0.4])).astype(np.float32)
    expected = 0.36 / (0.36 + 0.16)
    assert frequencies(row, temperature=0.5)[0] == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_k_tokens_and_breaks_ties_by_id() -> None:
    assert np.flatnonzero(frequencies(logits(1, 2, 2, 2, 0), 300, top_k=2)).tolist() == [1, 2]
    assert np.flatnonzero(frequencies(logits(1, 2, 2, 2, 0), 300, top_k=1)).tolist() == [1]
    assert len(np.flatnonzero(frequencies(logits(1, 1, 1), 300, top_k=9))) == 3


def test_top_p_keeps_the_smallest_set_with_that_share() -> None:
    row = np.log(np.array([0.1, 0.5, 0.3, 0.1])).astype(np.float32)
    assert np.flatnonzero(frequencies(row, 400, top_p=0.45)).tolist() == [1]
    assert np.flatnonzero(frequencies(row, 400, top_p=0.7)).tolist() == [1, 2]
    assert np.flatnonzero(frequencies(row, 400, top_p=0.85)).tolist() == [0, 1, 2]


def test_top_p_looks_beyond_its_first_candidates() -> None:
    row = np.zeros(5000, np.float32)
    drawn = {choose(row, NO_TOKENS, 0, params(seed=s, temperature=1.0, top_p=0.5)) for s in range(200)}
    assert max(drawn) < 2500
    assert max(drawn) > 1100


def test_min_p_is_relative_to_the_most_likely() -> None:
    row = np.log(np.array([0.6, 0.25, 0.1, 0.05])).astype(np.float32)
    assert np.flatnonzero(frequencies(row, 400, min_p=0.3)).tolist() == [0, 1]


def test_undefined_logits_give_no_token_whatever_is_asked_for() -> None:
    for row in (logits(1, math.nan, 2), logits(1, math.inf, 2), logits(-math.inf, -math.inf)):
        for asked in (params(), params(temperature=1.0, top_k=1), params(logit_bias=((1, -100.0),))):
            assert choose(row, NO_TOKENS, 0, asked) == NO_TOKEN


def test_uniform_is_counter_based() -> None:
    drawn = {
        (seed, position): uniform(seed, position) for seed in (0, 1, -5, 2**64 + 1) for position in range(50)
    }
    assert len(set(drawn.values())) == len(drawn)
    assert all(0 <= u < 1 for u in drawn.values())
    assert uniform(7, 3) == uniform(7, 3)


def test_log_probabilities() -> None:
    row = np.random.default_rng(0).normal(0, 4, 3000).astype(np.float32)
    exact = math.log(np.exp(row.astype(np.float64)).sum())
    assert log_sum_exp(row) == pytest.approx(exact, abs=1e-6)
    found = token_logprobs(row, 17, 3)
    assert found.logprob == pytest.approx(float(row[17]) - exact, abs=1e-6)
    assert [i for i, _ in found.top] == np.argsort(-row, kind="stable")[:3].tolist()
    assert token_logprobs(row, 17, 0).top == ()
    assert [i for i, _ in token_logprobs(logits(1, 2, 2, 2), 0, 2).top] == [1, 2]


@given(
    seed=st.integers(0, 2**63),
    position=st.integers(0, 30),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 400]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
)
def test_a_choice_is_within_the_rules(
    *, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = np.random.default_rng(seed).normal(0, 3, 2000).astype(np.float32)
    history = np.arange(position, dtype=np.int32)
    rules = params(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    chosen = choose(row, history, 0, rules)
    assert chosen == choose(row.copy(), history, 0, rules)
    probabilities = np.exp((row.astype(np.float64) - row.max()) / temperature)
    rank = int((row > row[chosen]).sum())
    assert not top_k or rank < top_k
    assert probabilities[chosen] >= min_p
    kept = np.sort(probabilities[probabilities >= min_p])[::-1]
    if top_k:
        kept = kept[:top_k]
    assert kept[:rank].sum() < top_p * kept.sum() or rank == 0
