"""The real workers and the real engine on the native kernels: exact over switches, true to the references."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dynamictp.facts import DType
from dynamictp.messages import SamplingParams, TokenLogprobs
from dynamictp.testing.gate_threads import run_threaded_gate
from dynamictp.testing.harness import TINY, LockstepNode
from tests.harness.conversation import GREEDY, Request, make_blocks, random_prompt, run
from tests.kernels.models import USABLE

DRAWN = SamplingParams(seed=11, max_tokens=64, temperature=0.9, top_p=0.95, presence_penalty=0.3, logprobs=2)


def converse(
    dtype: DType, level: str, tp: int, sampling: SamplingParams, **native: Any
) -> tuple[list[list[int]], list[list[TokenLogprobs | None]]]:
    """Outputs and log-probabilities of four ragged requests, prefilled in chunks and decoded together."""
    with LockstepNode(TINY, devices=tp, dtype=dtype, kernel_level=level, **native) as node:
        requests, page = [], 0
        for i, length in enumerate((3, 16, 37, 70)):
            count = node.spec.blocks(length + 8) * TINY.kv_heads
            blocks = make_blocks(node.spec.blocks(length + 8), TINY.kv_heads, np.arange(page, page + count))
            requests.append(Request(i, random_prompt(i, length, TINY.vocab), sampling, blocks))
            page += count
        run(node.open(tp), requests, 8, chunk=20, budget=40)
    return [request.output for request in requests], [request.logprobs for request in requests]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_degrees_give_equal_streams(dtype: DType, sampling: SamplingParams) -> None:
    reference = converse(dtype, USABLE[-1], 1, sampling)
    for tp in (2, 5, 9):
        assert converse(dtype, USABLE[-1], tp, sampling) == reference, f"tp{tp}"


def test_int8_and_threads_give_equal_streams() -> None:
    reference = converse("bf16", USABLE[-1], 1, DRAWN, quantised="int8")
    assert reference != converse("bf16", USABLE[-1], 1, DRAWN)
    for tp, threads in ((1, 2), (2, 1), (2, 2), (5, 1)):
        found = converse("bf16", USABLE[-1], tp, DRAWN, quantised="int8", threads=threads)
        assert found == reference, f"tp{tp}, {threads} threads"


@pytest.mark.parametrize("level", USABLE)
def test_fp32_chooses_what_torch_chooses(level: str) -> None:
    assert converse("fp32", level, 2, GREEDY)[0] == converse("fp32", "", 2, GREEDY)[0]


@pytest.mark.timeout(300)
def test_switches_change_no_bit() -> None:
    seed = random.SystemRandom().randrange(1 << 20)
    print(f"seed {seed}")
    report = run_threaded_gate(seed, 100, kernel_level=USABLE[-1])
    print("\n".join(report.lines()))
    assert not report.faults
    assert report.handovers > 0
    assert report.recomputes > 0
    assert report.crossed > 0
