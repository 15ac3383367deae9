"""Exactness: equal tokens, log-probabilities and KV bytes at every degree, batch, chunking and page table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamictp.facts import DType, ModelFacts
from dynamictp.messages import SamplingParams, TokenLogprobs
from dynamictp.testing.harness import TINY, LockstepNode
from tests.harness.conversation import GREEDY, Request, make_blocks, random_prompt, run

DRAWN = SamplingParams(
    seed=11,
    max_tokens=64,
    temperature=0.9,
    top_p=0.95,
    top_k=200,
    presence_penalty=0.3,
    repetition_penalty=1.1,
    logprobs=2,
)
LENGTHS = (3, 16, 37, 70)
STEPS = 6


class Outcome(NamedTuple):
    """What a client and the next reader of the pages can see of a request."""

    output: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[TokenLogprobs]
    kv: torch.Tensor
    """Bytes of the computed tokens' K and V."""

    def same(self, other: Outcome) -> bool:
        return self[:3] == other[:3] and torch.equal(self.kv, other.kv)


def node_of(dtype: DType, **changes: object) -> LockstepNode:
    return LockstepNode(**{"dtype": dtype, "blocks": 80, **changes})  # type: ignore[arg-type]


def prepare(
    node: LockstepNode,
    lengths: Sequence[int] = LENGTHS,
    *,
    steps: int = STEPS,
    sampling: SamplingParams = GREEDY,
    pages: np.ndarray | None = None,
) -> list[Request]:
    """Requests with seeds and prompts of their own, on pages in the given order."""
    heads = node.facts.kv_heads
    pages = np.arange(len(node.arena) // node.spec.page_bytes) if pages is None else pages
    requests = []
    for i, length in enumerate(lengths):
        count = node.spec.blocks(length + steps)
        prompt = random_prompt(100 + i, length, node.facts.vocab)
        requests.append(Request(i, prompt, sampling, make_blocks(count, heads, pages)))
        pages = pages[count * heads :]
    return requests


def outcome(node: LockstepNode, request: Request) -> Outcome:
    spec = node.spec
    arena = node.workers[0]._device.arena.tensor
    tokens = torch.arange(request.computed)
    table = torch.tensor(request.blocks, dtype=torch.int64)
    block, slot = tokens // spec.page_tokens, tokens % spec.page_tokens
    pages = table[block]
    k = arena[:, 0].view(spec.layers, -1, spec.head_dim // 2, spec.page_tokens, 2)
    v = arena[:, 1].view(spec.layers, -1, spec.page_tokens // 2, spec.head_dim, 2)
    keys = k[:, pages, :, slot[:, None]]
    values = v[:, pages, (slot // 2)[:, None], :, (slot % 2)[:, None]]
    kv = torch.cat((keys.reshape(-1), values.reshape(-1)))
    bits = torch.int16 if spec.dtype == "bf16" else torch.int32
    return Outcome(request.output, request.logprobs, request.prompt_logprobs, kv.view(bits))


def outcomes(
    node: LockstepNode, tp: int, requests: list[Request], *, steps: int = STEPS, chunk: int = 64
) -> list[Outcome]:
    domain = node.open(tp)
    run(domain, requests, steps, chunk=chunk)
    domain.close()
    return [outcome(node, request) for request in requests]


def same(left: Sequence[Outcome], right: Sequence[Outcome]) -> bool:
    return all(a.same(b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_every_degree_gives_the_same_bits(dtype: DType, sampling: SamplingParams) -> None:
    with node_of(dtype) as node:
        expected = outcomes(node, 1, prepare(node, sampling=sampling))
        assert len({tuple(o.output) for o in expected}) == len(expected)
        for tp in range(2, 10):
            assert same(outcomes(node, tp, prepare(node, sampling=sampling)), expected), f"tp{tp}"


@pytest.mark.parametrize(
    "changes",
    [
        {"tied_head": True, "vocab": 512},
        {"family": "qwen2", "qkv_bias": True},
        {"family": "qwen3", "qk_norm": True, "head_dim": 32},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "intermediate": 280},
        {"query_heads": 8, "kv_heads": 8},
        {"query_heads": 12, "kv_heads": 1},
    ],
    ids=["tied", "qwen2", "qwen3", "biases", "multi-head", "multi-query"],
)
def test_every_form_of_model_is_exact(changes: dict[str, object]) -> None:
    facts = ModelFacts(**{**{f: getattr(TINY, f) for f in TINY.__struct_fields__}, **changes})  # type: ignore[arg-type]
    with node_of("bf16", facts=facts, blocks=80) as node:
        expected = outcomes(node, 1, prepare(node))
        for tp in (2, 3, 5, 7):
            assert same(outcomes(node, tp, prepare(node)), expected), f"tp{tp}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_request_does_not_see_its_batch(dtype: DType) -> None:
    lengths = [3 + 7 * (i % 9) for i in range(64)]
    with node_of(dtype, blocks=400) as node:
        everyone = outcomes(node, 1, prepare(node, lengths))
        for size in (1, 5, 16):
            assert same(outcomes(node, 2, prepare(node, lengths[:size])), everyone[:size]), size


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_chunking_does_not_matter(dtype: DType) -> None:
    with node_of(dtype) as node:
        expected = outcomes(node, 1, prepare(node, sampling=DRAWN))
        for chunk in (1, 5, 16, 33):
            assert same(outcomes(node, 3, prepare(node, sampling=DRAWN), chunk=chunk), expected), chunk


def test_long_contexts_in_mixed_batches() -> None:
    """Contexts over several groups of pages, beside short ones: buckets are padded and split."""
    lengths = (700, 130, 257, 17, 384, 192)
    with node_of("fp32", blocks=120, max_tokens=256) as node:
        alone = []
        for i in range(len(lengths)):
            request = prepare(node, lengths)[i]
            alone += outcomes(node, 1, [request], chunk=200)
        for tp, chunk in ((1, 64), (2, 250), (4, 90)):
            assert same(outcomes(node, tp, prepare(node, lengths), chunk=chunk), alone), (tp, chunk)


def test_pages_may_lie_anywhere() -> None:
    with node_of("bf16") as node:
        expected = outcomes(node, 1, prepare(node))
        for seed in range(3):
            pages = np.random.default_rng(seed).permutation(80 * node.facts.kv_heads)
            assert same(outcomes(node, 2, prepare(node, pages=pages)), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stale_pages_are_harmless(dtype: DType) -> None:
    with node_of(dtype) as node:
        expected = outcomes(node, 1, prepare(node))
        node.arena.fill_(0xFF)  # every element not a number, in both types
        assert same(outcomes(node, 2, prepare(node)), expected)


def test_a_computed_prefix_can_be_reused() -> None:
    with node_of("bf16") as node:
        first, second = prepare(node, (48, 60))
        second.prompt = [*first.prompt, *second.prompt[48:]]
        fresh = outcomes(node, 1, [second])
        outcomes(node, 2, [first])
        reusing = prepare(node, (48, 60))[1]
        reusing.prompt = second.prompt
        reusing.blocks = [*first.blocks[:3], *reusing.blocks[3:]]
        reusing.computed = 48
        assert same(outcomes(node, 3, [reusing]), fresh)


def test_a_running_request_moves_between_domains() -> None:
    """A handover copies nothing: the next domain reads the pages that the last one wrote."""
    with node_of("bf16") as node:
        expected = outcomes(node, 1, prepare(node, steps=12, sampling=DRAWN), steps=12)
        moving = prepare(node, steps=12, sampling=DRAWN)
        for tp, members in ((2, (0, 1)), (5, (4, 3, 2, 1, 0)), (1, (7,)), (3, (8, 6, 2))):
            domain = node.open(tp, members)
            run(domain, moving, 3)
            domain.close()
        assert same([outcome(node, request) for request in moving], expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_prompt_logprobs_in_any_slicing(dtype: DType) -> None:
    sampling = SamplingParams(seed=0, max_tokens=9, temperature=0.0, logprobs=1, prompt_logprobs=2)
    with node_of(dtype) as node, node_of(dtype, max_rows=5) as narrow:
        expected = outcomes(node, 1, prepare(node, (70, 21), sampling=sampling))
        assert [len(o.prompt_logprobs) for o in expected] == [69, 20]
        for tp, chunk in ((1, 9), (3, 64)):
            assert same(
                outcomes(narrow, tp, prepare(narrow, (70, 21), sampling=sampling), chunk=chunk), expected
            )


def test_greedy_takes_the_most_likely_token() -> None:
    with node_of("fp32") as node:
        (request,) = prepare(node, (10,))
        (found,) = outcomes(node, 2, [request])
        entries = [entry for entry in found.logprobs if entry]
        assert len(entries) == STEPS
        assert [entry.token for entry in entries] == request.output
        assert [entry.top[0] for entry in entries] == [(entry.token, entry.logprob) for entry in entries]


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=7),
    tp=st.integers(1, 9),
    chunk=st.integers(1, 64),
    budget=st.integers(8, 64),
    seed=st.integers(0, 2**32),
)
def test_ragged_work_is_exact(lengths: list[int], tp: int, chunk: int, budget: int, seed: int) -> None:
    with node_of("bf16", blocks=60) as node:
        pages = np.random.default_rng(seed).permutation(60 * node.facts.kv_heads)
        requests = prepare(node, lengths, steps=3, sampling=DRAWN, pages=pages)
        domain = node.open(tp)
        run(domain, requests, 3, chunk=chunk, budget=budget)
        domain.close()
        found = [outcome(node, request) for request in requests]
        for i, expected in enumerate(found):
            alone = prepare(node, lengths, steps=3, sampling=DRAWN)[i]
            assert same(outcomes(node, 1, [alone], steps=3), [expected])
