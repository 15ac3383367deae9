"""Drives requests through a lock-step domain, step by step, in any chunking and on any pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dynamictp.messages import (
    NewRow,
    RowStep,
    SamplingParams,
    StepResult,
    TokenLogprobs,
    pack_tokens,
)
from dynamictp.testing.harness import LockstepDomain

GREEDY = SamplingParams(seed=0, max_tokens=64, temperature=0.0, logprobs=3)


@dataclass
class Request:
    """One request's state: what a scheduler would know of it."""

    row: int
    prompt: Sequence[int]
    sampling: SamplingParams = GREEDY
    blocks: Sequence[tuple[int, ...]] = ()
    computed: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def as_new(self) -> NewRow:
        tokens = pack_tokens([*self.prompt, *self.output])
        return NewRow(
            self.row, f"r{self.row}", 1, tokens, len(self.prompt), self.sampling, tuple(self.blocks)
        )


def random_prompt(seed: int, length: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def make_blocks(count: int, kv_heads: int, pages: np.ndarray) -> list[tuple[int, ...]]:
    """`count` blocks from a list of page ids, which is used up from the front."""
    return [tuple(int(p) for p in pages[b * kv_heads : (b + 1) * kv_heads]) for b in range(count)]


def run(
    domain: LockstepDomain,
    requests: Sequence[Request],
    steps: int,
    *,
    chunk: int = 64,
    budget: int = 64,
    announced: bool = False,
) -> None:
    """Compute the requests until each has `steps` more tokens: decodes first, prefill in chunks."""
    goal = {request.row: len(request.output) + steps for request in requests}
    new = [] if announced else [request.as_new() for request in requests]
    while waiting := [r for r in requests if len(r.output) < goal[r.row]]:
        plan: list[RowStep] = []
        left = budget
        for request in sorted(waiting, key=lambda r: r.length - r.computed):
            count = min(request.length - request.computed, chunk, left)
            if count < 1:
                continue
            left -= count
            sample = request.computed + count == request.length
            wants = request.sampling.prompt_logprobs is not None
            plan.append(RowStep(request.row, request.computed, count, sample, prompt_logprobs=wants))
        result = domain.step(plan, new)
        new = []
        take(result, requests, plan)


def take(result: StepResult, requests: Sequence[Request], plan: Sequence[RowStep]) -> None:
    by_row = {request.row: request for request in requests}
    for step in plan:
        by_row[step.row].computed = step.start + step.count
    for prompt in result.prompts:
        assert prompt.start == len(by_row[prompt.row].prompt_logprobs) + 1
        by_row[prompt.row].prompt_logprobs.extend(prompt.entries)
    for token in result.tokens:
        request = by_row[token.row]
        assert token.index == request.length
        request.output.append(token.token)
        request.logprobs.append(token.logprobs)
