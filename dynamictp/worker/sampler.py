"""Choosing tokens from logits, and log-probabilities.

A choice depends on the row's logits, its tokens, its parameters and (seed, output position) alone: the same
in every batch, on every rank, at every degree. Rules apply in this order: logit bias, repetition, frequency
and presence penalties, minimum length, temperature, min_p, top_k, top_p. Equal logits go to the lowest
token id. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

import numpy as np
import numpy.ma  # np.unique imports it when it is called first: in the middle of serving
from numpy.random import Philox  # np.random is imported when it is used first
from numpy.typing import NDArray

from dynamictp.messages import NO_TOKEN, SamplingParams, TokenLogprobs

Logits = NDArray[np.float32]
Tokens = NDArray[np.int32]

_GREEDY_BELOW = 1e-5
_FP32 = np.finfo(np.float32)
_KEY_MASK = (1 << 128) - 1
_CANDIDATES = 1024
"""Tokens that top_p looks at before it sorts the whole vocabulary."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1): Philox of key `seed` at counter `position`, its upper 53 bits."""
    generator = Philox(key=seed & _KEY_MASK, counter=position)
    return int(generator.random_raw() >> 11) * 2.0**-53


def choose(logits: Logits, tokens: Tokens, prompt_len: int, params: SamplingParams) -> int:
    """The next token of a row. `logits` [V], left as they are; `tokens` are the row's so far.

    `NO_TOKEN` when the model's logits have no finite maximum. What a client asks for can't cause that:
    adjusted logits stay finite.
    """
    output = tokens[prompt_len:]
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return NO_TOKEN
    masked = len(output) < params.min_tokens and bool(params.stop_ids)
    if masked or _changes_logits(params):
        logits = _adjust(logits.copy(), tokens, output, params, masked)
        best = int(logits.argmax())
    if params.temperature < _GREEDY_BELOW:
        return best
    return _draw(logits, best, params, uniform(params.seed, len(output)))


def log_sum_exp(logits: Logits) -> float:
    """ln Σ exp of [V] logits, summed in fp64."""
    top = logits.max()
    return float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))


def token_logprobs(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """Log-probability of `token` under [V] raw logits, and the `count` most likely tokens, best first."""
    norm = log_sum_exp(logits)
    top = tuple((int(i), float(logits[i]) - norm) for i in _largest(logits, count)) if count else ()
    return TokenLogprobs(token, float(logits[token]) - norm, top)


def _changes_logits(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
    )


def _adjust(logits: Logits, tokens: Tokens, output: Tokens, params: SamplingParams, masked: bool) -> Logits:
    """Bias, penalties and minimum length, in place. Within the range of fp32 whatever the parameters."""
    for token, bias in params.logit_bias:
        logits[token] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        seen = np.unique(tokens)
        values = logits[seen]
        penalty = max(np.float32(params.repetition_penalty), _FP32.tiny)
        with np.errstate(over="ignore"):
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        seen, counts = np.unique(output, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        logits[seen] -= penalties.astype(np.float32)
    np.clip(logits, _FP32.min, _FP32.max, out=logits)
    if masked:
        logits[[token for token in params.stop_ids if token < len(logits)]] = _FP32.min
    return logits


def _draw(logits: Logits, best: int, params: SamplingParams, u: float) -> int:
    """Inverse of the cumulative distribution at `u`, over the kept tokens in the order of their ids."""
    scaled = (logits.astype(np.float64) - float(logits[best])) / params.temperature
    weights = np.exp(scaled)
    if params.min_p > 0:
        weights[weights < params.min_p] = 0.0
    kept = np.flatnonzero(weights)
    if 0 < params.top_k < len(kept):
        kept = np.sort(kept[_largest(weights[kept], params.top_k)])
    if params.top_p < 1:
        kept = np.sort(kept[_nucleus(weights[kept], params.top_p)])
    cumulative = np.cumsum(weights[kept])
    place = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(kept[min(place, len(kept) - 1)])


def _largest(values: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest, best first, equal ones by index."""
    count = min(count, len(values))
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Indices of the smallest set of the largest weights that holds the share `top_p`; at least one."""
    wanted = top_p * weights.sum()
    for count in (_CANDIDATES, len(weights)):
        order = _largest(weights, count)
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= wanted:
            break
    return order[: int(np.searchsorted(cumulative, wanted, side="left")) + 1]
