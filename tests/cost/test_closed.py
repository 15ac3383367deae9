"""A closed load against Little's law and a step-by-step simulation of the CPU server's scheduler."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest

from dynamictp.cost.batching import Replica, Targets
from dynamictp.cost.closed import closed_load
from dynamictp.cost.figures import Figure
from dynamictp.cost.hardware import DeviceFacts, EngineLimits
from dynamictp.cost.lengths import Lengths, RequestClass, Workload
from dynamictp.cost.shape import ModelShape
from dynamictp.cost.steps import Domain, StepModel

SMOL = ModelShape("smol", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True)
CORE = DeviceFacts(
    "core", 4e9, Figure(28e9, "measured", "x"), Figure(200e9, "measured", "x"), shared_memory=True
)
LIMITS = EngineLimits(max_batched_tokens=512, max_num_seqs=64, max_step_s=0.1, page_tokens=64)
CLASSES = {
    "qa": RequestClass("qa", Lengths(25, 62), Lengths(10, 25)),
    "chat": RequestClass("chat", Lengths(25, 62), Lengths(75, 200)),
    "rag": RequestClass("rag", Lengths(375, 1000), Lengths(10, 25)),
    "code": RequestClass("code", Lengths(375, 1000), Lengths(75, 200)),
}


def replica(name: str) -> Replica:
    return Replica(StepModel(Domain(SMOL, CORE, 1)), Workload(name, (CLASSES[name],)), LIMITS, 200_000)


def test_users_are_the_rate_times_their_time_in_the_system() -> None:
    model = replica("chat")
    rate, latency = closed_load(model, 8, 1, Targets())
    in_system = latency.ttft_mean + model.decode_tokens * latency.tpot_mean
    assert rate * in_system == pytest.approx(8, rel=0.03)


def test_replicas_share_users() -> None:
    model = replica("chat")
    one, _ = closed_load(model, 4, 1, Targets())
    two, _ = closed_load(model, 8, 2, Targets())
    assert two == pytest.approx(2 * one)
    uneven, _ = closed_load(model, 5, 2, Targets())
    assert closed_load(model, 4, 2, Targets())[0] < uneven < closed_load(model, 6, 2, Targets())[0]


def test_every_replica_needs_a_user() -> None:
    with pytest.raises(ValueError, match="idle"):
        closed_load(replica("qa"), 1, 2, Targets())


@pytest.mark.parametrize("name", list(CLASSES))
def test_against_a_simulation_of_steps(name: str) -> None:
    model = replica(name)
    rate, latency = closed_load(model, 6, 1, Targets())
    tokens_per_s, tpot, ttft = simulate(model, CLASSES[name], users=6, seconds=200)
    assert rate * CLASSES[name].output.mean == pytest.approx(tokens_per_s, rel=0.2)
    assert latency.tpot_mean == pytest.approx(tpot, rel=0.25)
    assert ttft / 2 <= latency.ttft_mean <= 2 * ttft


def simulate(model: Replica, kind: RequestClass, users: int, seconds: float) -> tuple[float, float, float]:
    """(output tokens per second, mean TPOT over tokens, mean TTFT)."""
    rng = np.random.default_rng(0)

    def draw(lengths: Lengths) -> int:
        return max(1, round(rng.lognormal(math.log(lengths.median), lengths.sigma)))

    def ask(now: float) -> list[float]:
        return [now, draw(kind.prompt), draw(kind.output), 0]

    waiting = deque(ask(0.0) for _ in range(users))
    running: list[list[float]] = []  # [tokens left, context]
    now, produced, row_s, rows, ttfts = 0.0, 0, 0.0, 0, []
    while now < seconds:
        left = model.chunk_tokens(len(running))
        taken, attention_s, started = 0.0, 0.0, []
        while waiting and left > 0:
            first = waiting[0]
            take = min(left, first[1] - first[3])
            attention_s += model.steps.prompt_attention_s(take, first[3])
            first[3] += take
            left, taken = left - take, taken + take
            if first[3] < first[1]:
                break
            started.append(waiting.popleft())
        sampled = len(running) + len(started)
        step = model.steps.base(taken + len(running), max(1, sampled)).total_s + attention_s
        if running:
            context = sum(row[1] for row in running) / len(running)
            step += model.steps.decode_attention_s(len(running), context)
        now += step
        produced, row_s, rows = produced + sampled, row_s + step * len(running), rows + len(running)
        running = [[tokens - 1, context + 1] for tokens, context in running]
        waiting.extend(ask(now) for tokens, _ in running if tokens <= 0)
        running = [row for row in running if row[0] > 0]
        for asked, prompt, output, _ in started:
            ttfts.append(now - asked)
            if output > 1:
                running.append([output - 1, prompt + 1])
            else:
                waiting.append(ask(now))
    return produced / now, row_s / rows, float(np.mean(ttfts))
