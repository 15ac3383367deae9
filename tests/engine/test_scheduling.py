"""Steps: one ahead, chunked prefill, prefix hits, ends, cancels, preemption, deadlines."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from dynamictp.messages import ArenaFacts, CancelRequest, RowStep, StepPlan
from tests.engine.engine_simulation import HEADS, PAGE, Simulation, engine_start


def simulation(*, step_s: float = 0.002, **changes: Any) -> Simulation:
    sim = Simulation(random.Random(1), engine_start(**changes), step_s=lambda plan: step_s, latency_s=0.0)
    sim.run(lambda: sim.ready is not None)
    return sim


def rows(plan: StepPlan) -> list[tuple[int, int, bool]]:
    return [(step.start, step.count, step.sample) for step in plan.rows]


def finish(sim: Simulation) -> None:
    sim.run_until_idle()
    sim.turn()
    sim.check_idle()


def test_the_next_step_is_planned_while_one_is_in_flight_and_not_beyond_max_tokens() -> None:
    sim = simulation()
    stream = sim.submit([1, 2, 3], 3)
    sim.turn()
    assert [rows(plan) for plan in sim.plans] == [[(0, 3, True)], [(3, 1, True)]]
    finish(sim)
    assert [rows(plan) for plan in sim.plans[2:]] == [[(4, 1, True)]]
    assert stream.end == "length"


def test_a_row_is_sent_in_full_once_and_then_as_differences() -> None:
    sim = simulation()
    sim.submit([1, 2, 3], 8)
    finish(sim)
    assert [len(plan.new) for plan in sim.plans] == [1] + [0] * 7
    assert len(sim.plans[0].new[0].blocks) == 1
    assert [len(step.new_blocks) for plan in sim.plans for step in plan.rows] == [0, 0, 1, 0, 0, 0, 1, 0]


def test_a_stop_id_drops_the_token_that_was_in_flight() -> None:
    sim = simulation()
    stream = sim.submit([5, 6], 20, stop_at=2)
    finish(sim)
    assert stream.end == "stop"
    planned = sum(step.sample for plan in sim.plans for step in plan.rows)
    assert planned == len(stream.tokens) + 1


def test_a_stop_id_before_min_tokens_does_not_end_a_request() -> None:
    sim = simulation()
    stream = sim.submit([5, 6], 6, stop_at=2, min_tokens=4)
    stream.cancelled = True  # the reference ends at the stop id
    sim.run(lambda: len(stream.tokens) == len(stream.expected))
    sim.step()
    assert stream.end is None


def test_prompts_are_cut_into_chunks_that_end_with_pages() -> None:
    sim = simulation(max_batched_tokens=10)
    sim.submit(list(range(30)), 2)
    finish(sim)
    assert [rows(plan)[0] for plan in sim.plans] == [
        (0, 8, False),
        (8, 8, False),
        (16, 8, False),
        (24, 6, True),
        (30, 1, True),
    ]


def test_beside_a_running_stream_prefill_is_bounded_by_time_and_goes_on_by_a_page() -> None:
    sim = simulation(max_step_ms=1.0, max_batched_tokens=64, step_s=0.005)
    sim.submit([1], 60)
    sim.run(lambda: len(sim.streams["r0"].tokens) > 5)
    mark = len(sim.plans)
    sim.submit(list(range(20)), 4)
    sim.run(lambda: len(sim.streams["r1"].tokens) == 4)
    chunks = [step.count for plan in sim.plans[mark:] for step in plan.rows if step.count > 1]
    assert chunks == [PAGE] * 5
    assert all(len(plan.rows) == 2 for plan in sim.plans[mark + 1 : mark + 5])
    finish(sim)


def test_several_prompts_share_a_step() -> None:
    sim = simulation()
    for start in (0, 10, 20):
        sim.submit([start + i for i in range(6)], 2)
    sim.turn()
    assert rows(sim.plans[0]) == [(0, 6, True)] * 3
    finish(sim)


def test_a_known_prefix_is_not_computed_again_but_the_last_token_is() -> None:
    sim = simulation()
    prompt = list(range(3 * PAGE))
    sim.submit(prompt, 2)
    finish(sim)
    mark = len(sim.plans)
    sim.submit(prompt, 2)
    finish(sim)
    assert rows(sim.plans[mark]) == [(2 * PAGE, PAGE, True)]
    assert sim.snapshot is not None
    snapshot = sim.core.snapshot()
    assert (snapshot.prefix_hits, snapshot.prefix_queries) == (2 * PAGE, 6 * PAGE)


def test_another_tenant_does_not_see_the_prefix() -> None:
    sim = simulation()
    prompt = list(range(3 * PAGE))
    sim.submit(prompt, 1, salt="a")
    finish(sim)
    sim.submit(prompt, 1, salt="b")
    finish(sim)
    assert sim.core.snapshot().prefix_hits == 0


def test_prompt_logprobs_are_complete_over_chunks_and_skip_the_cache() -> None:
    sim = simulation(max_batched_tokens=8)
    prompt = list(range(20))
    for _ in range(2):
        stream = sim.submit(prompt, 2, prompt_logprobs=0, logprobs=0)
        finish(sim)
        assert len(stream.prompt_logprobs) == 19
    assert sim.core.snapshot().prefix_hits == 0


def test_a_request_for_prompt_logprobs_alone_samples_nothing() -> None:
    sim = simulation()
    stream = sim.submit(list(range(9)), 0, prompt_logprobs=0)
    finish(sim)
    assert (stream.end, stream.tokens, len(stream.prompt_logprobs)) == ("length", [], 8)


def test_pages_return_only_after_the_last_step_that_names_them() -> None:
    sim = simulation()
    stream = sim.submit(list(range(9)), 50)
    sim.turn()
    domain = next(sim.core.fleet.live())
    assert len(domain.in_flight) == 2
    sim.cancel(stream)
    sim.core.turn()
    assert (sim.core.pool.available, domain.free_rows) == (sim.core.pool.total - 3, 5)
    sim.core.check_integrity()
    finish(sim)
    assert stream.end == "cancelled"


def test_cancelling_a_waiting_or_unknown_request() -> None:
    sim = simulation(max_num_seqs=1)
    first, second = sim.submit([1], 10), sim.submit([2], 10)
    sim.turn()
    sim.cancel(second)
    sim.core.on_server(CancelRequest("nobody", 1))
    sim.core.on_server(CancelRequest(first.id, 0))
    finish(sim)
    assert (first.end, second.end) == ("length", "cancelled")


def test_the_newest_request_is_preempted_and_comes_back_complete() -> None:
    arena = ArenaFacts(12 * HEADS, PAGE, "fp32")
    sim = simulation(arena=arena, max_model_len=40, legal_degrees=(1,), devices=1)
    streams = [sim.submit([n], 30) for n in range(3)]
    finish(sim)
    assert sim.core.snapshot().preemptions > 0
    assert sim.ends[0] == streams[0].id


def test_a_prompt_that_fills_the_context_and_one_that_exceeds_it() -> None:
    sim = simulation(max_model_len=20)
    full = sim.submit(list(range(20)), 5)
    beyond = sim.submit(list(range(21)), 5)
    beyond.cancelled = True
    finish(sim)
    assert (full.end, full.tokens) == ("length", [])
    assert beyond.end == "error"


def test_a_request_that_no_quota_holds_runs_when_nothing_else_does() -> None:
    sim = simulation(arena=ArenaFacts(24 * HEADS, PAGE, "fp32"))
    small = sim.submit([1, 2], 20)
    large = sim.submit(list(range(50)), 10)
    later = sim.submit([3], 3)
    finish(sim)
    assert (small.end, large.end, later.end) == ("length",) * 3
    assert sim.ends.index(large.id) > sim.ends.index(later.id)


def test_a_deadline_ends_a_request_with_an_error() -> None:
    sim = simulation()
    stream = sim.submit([1], 90, deadline_s=sim.clock.now() + 0.05)
    stream.cancelled = True
    finish(sim)
    assert stream.end == "deadline"
    assert 0 < len(stream.tokens) < 90


def test_a_higher_attempt_replaces_the_running_one_and_a_repeated_one_is_ignored() -> None:
    sim = simulation()
    stream = sim.submit([1, 2], 12)
    sim.run(lambda: len(stream.tokens) >= 4)
    sim.send_stream(stream)
    sim.resubmit(stream)
    finish(sim)
    assert stream.end == "length"


def test_a_higher_priority_starts_first() -> None:
    sim = simulation(max_num_seqs=1)
    streams = [sim.submit([n], 3, priority=priority) for n, priority in enumerate((0, 0, 5))]
    finish(sim)
    assert sim.ends == [streams[2].id, streams[0].id, streams[1].id]


def test_steady_decode_of_32_rows_costs_the_engine_few_calls() -> None:
    sim = simulation(
        arena=ArenaFacts(2048 * HEADS, PAGE, "fp32"), max_num_seqs=32, max_batched_tokens=512,
        devices=1, legal_degrees=(1,), max_model_len=200,
    )  # fmt: skip
    for n in range(32):
        sim.submit([n], 150)

    def shortest() -> int:
        return min(len(stream.tokens) for stream in sim.streams.values())

    sim.run(lambda: shortest() > 40)
    first = len(sim.plans)
    calls = calls_of_the_engine(lambda: sim.run(lambda: shortest() > 100))
    assert isinstance(sim.plans[-1].rows[0], RowStep)
    assert len(sim.plans[-1].rows) == 32
    # Time is measured in scripts/bench; here what it goes into: the simulation's own checks among it.
    assert calls / (len(sim.plans) - first) / 32 < 40


def calls_of_the_engine(run: Callable[[], object]) -> int:
    """Calls that code of the engine makes, and those of its functions, meanwhile."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call") and "/dynamictp/engine/" in frame.f_code.co_filename:
            count += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
