"""A closed load against Little's law and a step-by-step simulation of the CPU server's scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import cycle

import numpy as np
import pytest

from dynamictp.cost.batching import Replica, Targets
from dynamictp.cost.closed import Level, balance, closed_load
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
_STRATA = 401
"""Lengths before they come again; outputs two later, so that the pairs differ."""
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
    assert rate * in_system == pytest.approx(8, rel=0.01)


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


def test_a_replica_that_holds_no_request_carries_none() -> None:
    steps = StepModel(Domain(SMOL, CORE, 1))
    none = Replica(steps, Workload("code", (CLASSES["code"],)), LIMITS, 100)
    assert closed_load(none, 4, 1, Targets())[0] == 0


@pytest.mark.parametrize("users", [3, 8])
@pytest.mark.parametrize("name", list(CLASSES))
def test_against_a_simulation_of_steps(name: str, users: int) -> None:
    model = replica(name)
    rate, latency = closed_load(model, users, 1, Targets())
    tokens_per_s, tpot, ttft = Simulation(model, CLASSES[name], outside_s=8e-3).run(users, steps=12_000)
    assert rate * CLASSES[name].output.mean == pytest.approx(tokens_per_s, rel=0.06)
    assert latency.tpot_mean == pytest.approx(tpot, rel=0.08)
    assert latency.ttft_mean == pytest.approx(ttft, rel=0.12)


def level(decoding: float, beside: float, service: float, square: float) -> Level:
    return Level(decoding, beside, service, square)


def machine_repair(users: int, arrivals: float, service: float, square: float) -> list[Level]:
    """Users who ask after 1 / `arrivals` seconds on average, whether a prompt is there or not."""
    return [level(rows * arrivals, rows * arrivals, service, square) for rows in range(users + 1)]


def test_the_chain_is_the_machine_repairman() -> None:
    # Kleinrock I, 3.8: p0 = 1 / sum of N!/(N-k)! (lambda/mu)^k. N = 3, ratio 1/2: 1 + 3/2 + 6/4 + 6/8 = 4.75.
    found = balance(machine_repair(3, 1.0, 0.5, 2 * 0.5**2))
    assert found.busy == pytest.approx(1 - 1 / 4.75)
    assert found.rate == pytest.approx(2 * (1 - 1 / 4.75))
    # Waiting: 1 in state 2, 2 in state 3: (1.5 + 2 x 0.75) / 4.75, by Little over the rate.
    assert found.exponential_wait == pytest.approx((1.5 + 1.5) / 4.75 / found.rate)
    assert found.wait == pytest.approx(found.exponential_wait)
    assert found.rows == pytest.approx(found.rate / 1.0), "rows end at rate lambda each"


def test_constant_service_halves_the_wait() -> None:
    exponential = balance(machine_repair(3, 1.0, 0.5, 2 * 0.5**2))
    constant = balance(machine_repair(3, 1.0, 0.5, 0.5**2))
    assert constant.wait == pytest.approx(exponential.wait / 2)


def test_rows_that_stand_still_beside_a_prompt_never_queue() -> None:
    # Two users: births stop while a prompt is there, so states 0 and 1 alternate; 1/2 s each at rate 2.
    levels = [level(0.0, 0.0, 0.5, 0.5), level(1.0, 0.0, 0.5, 0.5), level(2.0, 0.0, 0.5, 0.5)]
    found = balance(levels)
    assert found.busy == pytest.approx(0.5)
    assert found.rate == pytest.approx(1.0)
    assert found.wait == 0


class Simulation:
    """The server's steps one after another: each is planned when the one before it begins, requests take
    `outside_s` (a third more or less) to the engine and back. Owns clock, queue and rows.
    """

    def __init__(self, model: Replica, kind: RequestClass, outside_s: float) -> None:
        self._model, self._outside_s = model, outside_s
        self._rng = np.random.default_rng(0)
        self._prompts, self._outputs = (
            self._draws(kind.prompt, _STRATA),
            self._draws(kind.output, _STRATA + 2),
        )
        self._now = 0.0
        self._coming: list[tuple[float, float, int, int]] = []  # at the engine, sent, prompt, output
        self._waiting: deque[list[float]] = deque()  # [sent, prompt, output, computed]
        self._rows: list[list[float]] = []  # [tokens left, context]

    def run(self, users: int, steps: int) -> tuple[float, float, float]:
        """(output tokens per second, mean TPOT over tokens, mean TTFT)."""
        for _ in range(users):
            self._ask()
        planned: deque[tuple[float, int, int, list[float], int]] = deque()
        tokens, row_s, row_steps, ttfts = 0, 0.0, 0, []
        for _ in range(steps):
            if not planned and not self._rows and not self._waiting:
                self._now = max(self._now, self._coming[0][0])
            self._arrive()
            while len(planned) < 2 and (self._rows or self._waiting):
                planned.append(self._plan())
            took, sampled, rows, sent, ended = planned.popleft()
            self._now += took
            tokens, row_s, row_steps = tokens + sampled, row_s + took * rows, row_steps + rows
            ttfts += [self._now + self._outside_s / 2 - at for at in sent]
            for _ in range(ended):
                self._ask()
        return tokens / self._now, row_s / row_steps, float(np.mean(ttfts))

    def _draws(self, lengths: Lengths, count: int) -> Iterator[int]:
        """All quantiles in a random order, so that few draws have the distribution's mean."""
        drawn = [max(1, round(lengths.quantile((i + 0.5) / count))) for i in range(count)]
        return cycle([int(length) for length in self._rng.permutation(drawn)])

    def _ask(self) -> None:
        """A user has the last token half of the way later, and asks again at once."""
        sent = self._now + self._outside_s / 2
        arrives = self._now + self._outside_s * self._rng.uniform(2 / 3, 4 / 3)
        request = (arrives, sent, next(self._prompts), next(self._outputs))
        self._coming = sorted([*self._coming, request])

    def _arrive(self) -> None:
        while self._coming and self._coming[0][0] <= self._now:
            _, sent, prompt, output = self._coming.pop(0)
            self._waiting.append([sent, prompt, output, 0])

    def _plan(self) -> tuple[float, int, int, list[float], int]:
        """(seconds, tokens sampled, decoding rows, when the requests it starts were sent, how many end)."""
        steps, rows = self._model.steps, len(self._rows)
        left = self._model.chunk_tokens(rows)
        taken, attention_s, started = 0.0, 0.0, []
        while self._waiting and left > 0:
            first = self._waiting[0]
            take = min(left, first[1] - first[3])
            attention_s += steps.prompt_attention_s(take, first[3])
            first[3] += take
            left, taken = left - take, taken + take
            if first[3] < first[1]:
                break
            started.append(self._waiting.popleft())
        sampled = rows + len(started)
        seconds = steps.base(taken + rows, max(1, sampled)).total_s + attention_s
        if rows:
            seconds += steps.decode_attention_s(rows, sum(row[1] for row in self._rows) / rows)
        going = [[tokens - 1, context + 1] for tokens, context in self._rows]
        going += [[output - 1, prompt + 1] for _, prompt, output, _ in started]
        self._rows = [row for row in going if row[0] > 0]
        return seconds, sampled, rows, [request[0] for request in started], len(going) - len(self._rows)
