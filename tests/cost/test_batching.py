"""The mean field of continuous batching against Little's law and a step-by-step simulation."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest

from dynamictp.cost.batching import Replica, Targets
from dynamictp.cost.calibration import Calibration, RequestPoint
from dynamictp.cost.figures import Corner, Figure
from dynamictp.cost.hardware import DeviceFacts, EngineLimits, LinkFacts
from dynamictp.cost.lengths import Lengths, RequestClass, Workload
from dynamictp.cost.shape import ModelShape
from dynamictp.cost.steps import Domain, StepModel

LLAMA_8B = ModelShape("8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
A100 = DeviceFacts("a100", 80e9, Figure(2.039e12, "data sheet", "x"), Figure(312e12, "data sheet", "x"))
NVLINK = LinkFacts("NV12", Figure(300e9, "data sheet", "x"), Figure(1.5e-6, "assumed", "x", 1e-6, 3e-6, 0.0))
CHAT = Workload("chat", (RequestClass("chat", Lengths(100, 250), Lengths(300, 800)),))
RAG = Workload("rag", (RequestClass("rag", Lengths(1500, 4000), Lengths(40, 100)),))
LIMITS = EngineLimits(max_batched_tokens=2048, max_num_seqs=64)
KV_TOKENS = 400_000


def replica(
    workload: Workload,
    corner: Corner = Corner.EXPECTED,
    kv: float = KV_TOKENS,
    tp: int = 1,
    calibration: Calibration | None = None,
) -> Replica:
    steps = StepModel(Domain(LLAMA_8B, A100, tp, link=NVLINK, calibration=calibration), corner)
    return Replica(steps, workload, LIMITS, kv)


@pytest.mark.parametrize("workload", [CHAT, RAG])
@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_the_batch_follows_littles_law(workload: Workload, load: float) -> None:
    model = replica(workload)
    rate = load * model.capacity()
    state = model.steady(rate)
    assert state.stable
    assert state.batch == pytest.approx(rate * (workload.mean_output - 1) * state.tpot_s, rel=0.01)
    assert state.tpot_s >= state.decode_step_s


def test_beyond_capacity_nothing_settles() -> None:
    model = replica(CHAT)
    assert not model.steady(1.05 * model.capacity()).stable
    latency = model.latency(1.05 * model.capacity(), 1, Targets())
    assert latency.ttft_p99 == math.inf
    assert latency.goodput_fraction == 0


def test_little_kv_bounds_the_batch() -> None:
    rich, poor = replica(RAG), replica(RAG, kv=30_000)
    assert poor.max_batch < rich.max_batch
    # Mean context about 1,540 and a margin for its spread: clearly below 30,000 / 1,540 = 19.
    assert 5 <= poor.max_batch <= 15
    assert poor.capacity() < rich.capacity()
    assert replica(RAG, kv=2_000).max_batch == 0, "not even the longest request"


def test_the_batch_that_kv_holds_by_hand() -> None:
    # Constant lengths: contexts go evenly from 1,000 to 1,200: mean 1,100, variance 200^2 / 12. Pages of 16
    # add 8. B x 1,108 + 2.33 x 57.7 x sqrt(B) = 30,000: at B = 26 it is 29,494, at 27 it is 30,615.
    constant = Workload("c", (RequestClass("c", Lengths(1000, 1000), Lengths(200, 200)),))
    assert constant.running_context == 1100
    assert constant.running_context_variance == pytest.approx(200**2 / 12)
    assert replica(constant, kv=30_000).max_batch == 26


def test_capacity_and_stretch_by_hand() -> None:
    # Little's law: a rate of B / (E[n] d + B m) keeps B rows decoding; prompts take rate x m of the time, and
    # a token takes d / (1 - rate m).
    model = replica(CHAT)
    rows = float(model.max_batch)
    m = sum(weight * cost.added for weight, cost in model.prompt_costs(rows))
    rate = rows / (299 * model.decode_s(rows) + rows * m)
    assert CHAT.mean_output == pytest.approx(300, rel=1e-3)
    assert model.capacity() == pytest.approx(rate, rel=2e-3)
    state = model.state(rate, rows)
    assert state.tpot_s == pytest.approx(model.decode_s(rows) / (1 - rate * m))
    assert state.batch == pytest.approx(rate * 299 * state.tpot_s, rel=2e-3)


def test_a_chunk_leaves_the_step_within_its_time() -> None:
    # Of 100 ms, d(8) go to the rows; the rest buys tokens at base(2,048) / 2,048 each, a page at least.
    steps = StepModel(Domain(LLAMA_8B, A100, 1, link=NVLINK))
    limits = EngineLimits(max_batched_tokens=2048, max_num_seqs=64, max_step_s=0.1)
    model = Replica(steps, CHAT, limits, KV_TOKENS)
    per_token = steps.base(2048, 1).total_s / 2048
    assert model.chunk_tokens(8) == pytest.approx((0.1 - model.decode_s(8)) / per_token)
    assert model.chunk_tokens(0) == 2048
    tight = Replica(steps, CHAT, EngineLimits(max_step_s=1e-3), KV_TOKENS)
    assert tight.chunk_tokens(8) == 16


@pytest.mark.parametrize("workload", [CHAT, RAG])
def test_latency_grows_with_load(workload: Workload) -> None:
    model = replica(workload)
    found = [model.latency(share * model.capacity(), 1, Targets()) for share in (0.1, 0.4, 0.7, 0.9)]
    for metric in ("ttft_p50", "ttft_p99", "tpot_mean", "e2e_p99"):
        values = [getattr(latency, metric) for latency in found]
        assert values == sorted(values), metric


def test_replicas_behind_one_router_wait_less_than_a_split() -> None:
    model = replica(RAG)
    rate = 0.8 * model.capacity()
    assert model.latency(4 * rate, 4, Targets()).ttft_p99 < model.latency(rate, 1, Targets()).ttft_p99


def test_slo_capacity_is_where_a_target_breaks() -> None:
    model, targets = replica(RAG), Targets(ttft_s=1.0, tpot_s=0.06)
    edge = model.slo_capacity(1, targets)
    assert 0 < edge < model.capacity()

    def holds(rate: float) -> bool:
        latency = model.latency(rate, 1, targets)
        return latency.ttft_p99 <= targets.ttft_s and latency.tpot_p99 <= targets.tpot_s

    assert holds(0.97 * edge)
    assert not holds(1.03 * edge)
    assert model.slo_capacity(1, Targets(ttft_s=0.001)) == 0


def test_the_ideal_corner_bounds_the_others() -> None:
    rate = 0.5 * replica(RAG, Corner.SLOW).capacity()
    found = [replica(RAG, corner).latency(rate, 1, Targets()) for corner in Corner]
    for metric in ("ttft_p50", "ttft_p99", "tpot_mean", "e2e_p99"):
        values = [getattr(latency, metric) for latency in found]
        assert values == sorted(values), f"{metric}: ideal, fast, expected, slow"


def test_the_first_token_of_an_idle_replica_is_its_prompt_and_the_way_there_and_back() -> None:
    model = replica(CHAT)
    latency = model.latency(1e-9, 1, Targets())
    alone = sum(node.weight * model.steps.prompt(node.tokens, 2048).total_s for node in CHAT.prompts)
    assert latency.ttft_mean == pytest.approx(alone + 5e-3, rel=1e-3), "5 ms assumed outside of steps"
    assert replica(CHAT, Corner.IDEAL).latency(1e-9, 1, Targets()).ttft_mean < alone, "no host at the bound"


def test_what_a_request_costs_the_host_is_felt_in_the_steps_beside_it() -> None:
    points = (RequestPoint(0, 5e-3, 5e-3, 5e-3), RequestPoint(1, 5e-3, 5e-3, 5e-3, 2e-3))
    measured = Calibration("13b", "a100", "test", (), requests=points)
    plain, felt = replica(CHAT), replica(CHAT, calibration=measured)
    before, after = plain.prompt(100, 8.0), felt.prompt(100, 8.0)
    beside = 1 - math.exp(-8.0)
    assert after.added - before.added == pytest.approx(2e-3 * beside), "nobody is there to feel it at times"
    assert after.latency - before.latency == pytest.approx(2e-3 * beside)
    assert felt.prompt(100, 0.0) == plain.prompt(100, 0.0), "alone it is part of what is outside of steps"
    assert felt.steady(3.0).tpot_s > plain.steady(3.0).tpot_s


def test_a_busy_replica_makes_a_prompt_wait_for_steps() -> None:
    # Nearly no prompts beside (their share of time is 0.2 %): half a step, one planned ahead, then its own.
    few = Workload("few", (RequestClass("few", Lengths(16, 16), Lengths(4000, 4000)),))
    model = replica(few)
    state = model.steady(8 / (3999 * model.decode_s(8)))
    assert state.batch == pytest.approx(8, rel=0.02)
    ((_, first),) = model.services(state, model.prompt_costs(state.batch))
    added = model.prompt(16, state.batch).added
    assert first == pytest.approx(5e-3 + 2.5 * state.decode_step_s + added, rel=0.01)


@pytest.mark.parametrize(("workload", "load"), [(CHAT, 0.5), (RAG, 0.5), (RAG, 0.75)])
def test_the_mean_field_against_a_simulation_of_steps(workload: Workload, load: float) -> None:
    model = replica(workload)
    rate = load * model.capacity()
    tpot, ttft_p50 = simulate(model, workload, rate, requests=1500)
    found = model.latency(rate, 1, Targets())
    assert found.tpot_mean == pytest.approx(tpot, rel=0.2)
    assert found.ttft_p50 == pytest.approx(ttft_p50, rel=0.4)


def simulate(model: Replica, workload: Workload, rate: float, requests: int) -> tuple[float, float]:
    """(mean TPOT over tokens, median TTFT): step after step, prompts in chunks beside decoding rows.

    Each step is planned when the one before it begins.
    """
    rng = np.random.default_rng(1)
    kind = workload.classes[0]
    prompts = rng.lognormal(math.log(kind.prompt.median), kind.prompt.sigma, requests)
    outputs = np.maximum(rng.lognormal(math.log(kind.output.median), kind.output.sigma, requests), 1).astype(
        int
    )
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    waiting: deque[list[float]] = deque()
    running: list[int] = []
    now, coming, ttfts, token_s, tokens = 0.0, 0, [], 0.0, 0
    planned_at = 0.0
    steps = model.steps
    while coming < requests or waiting or running:
        while coming < requests and arrivals[coming] <= planned_at:
            waiting.append([arrivals[coming], prompts[coming], outputs[coming]])
            coming += 1
        if not waiting and not running:
            now = planned_at = max(now, arrivals[coming])
            continue
        planned_at = now
        left, started, attention = float(LIMITS.max_batched_tokens) - len(running), [], 0.0
        while waiting and left > 0:
            take = min(left, waiting[0][1])
            attention += steps.prompt_attention_s(take)
            waiting[0][1] -= take
            left -= take
            if waiting[0][1] > 0:
                break
            started.append(waiting.popleft())
        done = LIMITS.max_batched_tokens - left
        seconds = steps.base(done, max(1, len(running) + len(started))).total_s + attention
        if running:
            seconds += steps.decode_attention_s(len(running), workload.running_context)
        now += seconds
        token_s += seconds * len(running)
        tokens += len(running)
        running = [tokens_left - 1 for tokens_left in running if tokens_left > 1]
        for arrival, _, output in started:
            ttfts.append(now - arrival)
            if output > 1:
                running.append(int(output) - 1)
    return token_s / tokens, float(np.median(ttfts))
