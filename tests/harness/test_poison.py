"""A request whose numbers are not finite fails alone: the others in its batch keep their bits."""

from __future__ import annotations

import numpy as np
import pytest

from dynamictp import native
from dynamictp.messages import NO_TOKEN, RowStep, SamplingParams
from dynamictp.model.weights import view_weight
from dynamictp.testing.harness import TINY, LockstepDomain, LockstepNode, random_weights
from tests.harness.conversation import Request, make_blocks

POISON = 77
STEPS = 4
SAMPLING = SamplingParams(seed=5, max_tokens=64, temperature=0.8, logprobs=1)


def prompts() -> list[list[int]]:
    tokens = np.random.default_rng(3).integers(100, TINY.vocab, (3, 20)).tolist()
    tokens[1][7] = POISON
    return tokens


def requests(node: LockstepNode, numbers: tuple[int, ...]) -> list[Request]:
    heads = node.facts.kv_heads
    pages = np.arange(9 * heads)
    return [
        Request(n, prompts()[n], SAMPLING, make_blocks(3, heads, pages[3 * n * heads :])) for n in numbers
    ]


def play(domain: LockstepDomain, batch: list[Request]) -> dict[int, list[int]]:
    """Tokens of each row, one more step than the poison is found in."""
    found: dict[int, list[int]] = {request.row: [] for request in batch}
    for step in range(STEPS):
        new = [request.as_new() for request in batch] if not step else []
        rows = [
            RowStep(r.row, 0, len(r.prompt), True)
            if not step
            else RowStep(r.row, len(r.prompt) + step - 1, 1, True)
            for r in batch
        ]
        for token in domain.step(rows, new).tokens:
            found[token.row].append(token.token)
            assert (token.logprobs is None) == (token.token == NO_TOKEN)
    return found


@pytest.mark.parametrize("kernels", ["", "portable"])
def test_a_poison_row_gives_no_token_and_touches_no_other(kernels: str) -> None:
    if kernels and native.load() is None:
        pytest.skip("no native extension")
    dtype = "bf16" if kernels else "fp32"
    index, buffer = random_weights(TINY, 0, dtype)
    view_weight(index, buffer, "embed")[POISON] = np.nan
    with LockstepNode(
        devices=3, dtype=dtype, weights=(index, buffer), max_tokens=128, kernel_level=kernels
    ) as node:
        alone = play(node.open(1), requests(node, (0, 2)))
        assert all(token >= 0 for row in alone.values() for token in row)
        for tp in (1, 2, 3):
            together = play(node.open(tp), requests(node, (0, 1, 2)))
            assert together.pop(1) == [NO_TOKEN] * STEPS
            assert together == alone
            # Its pages are used again: what is left in them reaches nobody.
            heads, other = node.facts.kv_heads, prompts()[0]
            reused = Request(0, other, SAMPLING, make_blocks(3, heads, np.arange(3 * heads, 6 * heads)))
            assert play(node.open(tp), [reused])[0] == alone[0]
