"""The ramp of a switch: sides, steps, gates, rollback, cancel, crashes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from dynamictp.control.reconciler import PROBE_ONLY
from dynamictp.control.route import ramp_side
from dynamictp.engine.ramp import percentile
from dynamictp.messages import (
    NO_TOKEN,
    CancelSwitch,
    DomainBroken,
    RampSettings,
    SetDevices,
    SetLayout,
    StepPlan,
    StepResult,
)
from dynamictp.testing.fake_worker import FakeWorker
from tests.engine.engine_simulation import PAGE, Simulation, Stream, engine_start

RAMP = RampSettings(observe_s=2.0, settle_s=1.0, min_finished=10, probe_s=3.0)


def simulation(
    step_s: Callable[[StepPlan], float] = lambda plan: 0.002, *, ramp: RampSettings = RAMP, **changes: Any
) -> Simulation:
    sim = Simulation(random.Random(1), engine_start(ramp=ramp, **changes), step_s=step_s, latency_s=0.0)
    sim.run(lambda: sim.ready is not None)
    return sim


def states(sim: Simulation) -> dict[str, str]:
    return {str(d.placed): d.state for d in sim.core.fleet.domains.values()}


def share(sim: Simulation, switch_id: str) -> float:
    return sim.statuses[switch_id].ramp_share


def traffic(sim: Simulation, switch_id: str, every_s: float = 0.05) -> list[Stream]:
    """Short requests until the switch has an outcome."""
    sent: list[Stream] = []
    while not sim.statuses[switch_id].outcome:
        sent.append(sim.submit([len(sent) % 40, 1, 2], 6))
        until = sim.clock.now() + every_s
        sim.at(every_s, lambda: None)
        sim.run(lambda: sim.clock.now() >= until)  # noqa: B023
    return sent


def begin(sim: Simulation, layout: str, **fields: Any) -> str:
    switch_id = sim.set_layout(layout, ramp=True, **fields)
    sim.run(lambda: share(sim, switch_id) > 0)
    return switch_id


def test_new_requests_move_step_by_step_and_the_old_domain_serves_until_the_end() -> None:
    sim = simulation()
    old = sim.submit([1], 80)
    sim.run(lambda: len(old.tokens) > 3)
    switch_id = begin(sim, "tp2")
    assert states(sim) == {"tp1@0": "serving", "tp2@0,1": "serving"}
    assert (sim.core.snapshot().layout, sim.core.snapshot().placed) == ("tp1", "tp1@0")
    began = sim.clock.now()
    first = sim.submit([2], 2)
    sim.run(lambda: first.end is not None)
    assert served_at(sim, first) == 2
    sent = traffic(sim, switch_id)
    status = sim.statuses[switch_id]
    assert status.outcome in {"committed", "closed"}
    assert sim.clock.now() - began == pytest.approx(4 * 2.0 + 1.0, abs=0.1)
    assert status.phases_ms["ramp"] == pytest.approx(9000, abs=150)
    sim.run_until_idle()
    sim.check_idle()
    degrees = [served_at(sim, stream) for stream in sent]
    tenth, quarter, half, rest = (degrees[at : at + 40] for at in (0, 40, 80, 120))
    counts = [part.count(2) for part in (tenth, quarter, half, rest)]
    assert counts == sorted(counts)
    assert counts[0] < 12
    assert set(degrees[121:]) == {2}


def served_at(sim: Simulation, stream: Stream) -> int:
    return sim.degrees[stream.id]


def test_a_ramp_without_traffic_is_passed_by_time() -> None:
    sim = simulation()
    switch_id = sim.set_layout("tp1+tp1", ramp=True)
    sim.run(lambda: sim.statuses[switch_id].outcome == "closed")
    sim.run_until_idle()
    assert states(sim) == {"tp1@0": "serving", "tp1@1": "serving"}


def test_forced_growth_is_probed_and_then_complete() -> None:
    sim = simulation()
    began = sim.clock.now()
    switch_id = sim.set_layout("tp2", forced=True)
    sim.run(lambda: sim.statuses[switch_id].outcome == "closed")
    assert sim.clock.now() - began < 0.1
    assert sim.statuses[switch_id].phases_ms["ramp"] > 3.9  # two steps
    assert sum(len(plan.rows) for plan in sim.plans) == 2 * 2  # the probe, on both sides; no one else


def test_the_probe_is_asked_of_the_old_side_only_once() -> None:
    sim = simulation()
    for layout in ("tp2", "tp3"):
        switch_id = sim.set_layout(layout, forced=True)
        sim.run(lambda: sim.statuses[switch_id].outcome == "closed")  # noqa: B023
    assert sum(len(plan.rows) for plan in sim.plans) == 3 * 2


def test_a_new_domain_that_computes_something_else_gets_no_request() -> None:
    sim = simulation()
    for worker in sim.cluster.workers:
        worker._vocab = 37 if worker.device == 1 else worker._vocab
    switch_id = sim.set_layout("tp1@1", ramp=True)
    stream = sim.submit([3], 30)
    sim.run(lambda: sim.statuses[switch_id].outcome != "")
    status = sim.statuses[switch_id]
    assert status.outcome == "rolled_back"
    assert status.error is not None
    assert "other tokens" in status.error
    sim.run(lambda: stream.end is not None)
    sim.run_until_idle()
    sim.check_idle()
    assert states(sim) == {"tp1@0": "serving"}
    assert "rollback" in sim.statuses[switch_id].phases_ms


def test_a_probe_that_does_not_end_takes_the_switch_back() -> None:
    sim = simulation(lambda plan: 10.0 if plan.epoch == 2 else 0.002)
    switch_id = sim.set_layout("tp2", ramp=True)
    sim.run(lambda: sim.statuses[switch_id].outcome != "")
    assert sim.statuses[switch_id].outcome == "rolled_back"
    assert "in time" in (sim.statuses[switch_id].error or "")
    sim.run_until_idle()
    sim.check_idle()


def test_a_slow_new_side_is_rolled_back_and_its_requests_are_handed_back() -> None:
    sim = simulation(lambda plan: 0.008 if plan.epoch == 2 else 0.002)
    warm = [sim.submit([n], 20) for n in range(4)]
    sim.run(lambda: all(stream.end for stream in warm))
    switch_id = begin(sim, "tp2")
    long = sim.submit([9], 85)
    sent = traffic(sim, switch_id)
    status = sim.statuses[switch_id]
    assert status.outcome == "rolled_back"
    assert "P95 of measured over expected time is 4" in (status.error or "")
    assert status.ramp_share == 0.0
    sim.run_until_idle()
    sim.check_idle()
    assert all(stream.tokens == stream.expected for stream in (*sent, long))
    assert sim.statuses[switch_id].recomputes == 0
    assert states(sim) == {"tp1@0": "serving"}


def test_a_degree_that_is_expected_to_be_slower_is_no_regression() -> None:
    sim = simulation(lambda plan: 0.002 if plan.epoch == 1 else 0.0039, layout="tp2")
    warm = [sim.submit([n], 20) for n in range(4)]
    sim.run(lambda: all(stream.end for stream in warm))
    switch_id = begin(sim, "tp1@2")
    traffic(sim, switch_id)
    assert sim.statuses[switch_id].outcome in {"committed", "closed"}
    sim.run_until_idle()


def test_what_a_failing_new_domain_computed_is_thrown_away() -> None:
    sim = simulation()
    switch_id = begin(sim, "tp1@1")
    prompt = list(range(4 * PAGE))
    first = sim.submit(prompt, 60)
    sim.run(lambda: len(first.tokens) > 2)
    domain = next(d for d in sim.core.fleet.domains.values() if d.placed.devices == (1,))
    assert len(domain.running) == 1
    other = sim.submit(prompt, 2)
    hits = sim.core.snapshot().prefix_hits
    sim.run(lambda: other.end is not None)
    assert ramp_side(other.id, 0.1) == "old"  # which does not trust those pages yet
    assert sim.core.snapshot().prefix_hits == hits
    sim.core.on_worker(1, DomainBroken(domain.epoch, 0, 5, True, "ValueError: injected"))
    sim.turn()
    status = sim.statuses[switch_id]
    assert (status.outcome, status.error) == ("rolled_back", "rank 0 of tp1@1: ValueError: injected")
    again = sim.submit(prompt, 2)
    sim.run_until_idle()
    assert again.end == first.end == "length"
    assert states(sim) == {"tp1@0": "serving"}
    sim.core.check_integrity()


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_the_other_new_domain_has_in_flight_meanwhile_is_thrown_away_too(cancelled: bool) -> None:
    sim = simulation(lambda plan: 0.002 * sum(row.count for row in plan.rows), max_batched_tokens=2 * PAGE)
    switch_id = begin(sim, "tp1@1+tp1@2")
    sim.run(lambda: share(sim, switch_id) == 1.0)
    prompts = [[n, *range(2 * PAGE)] for n in range(2)]
    for prompt in prompts:
        sim.submit(prompt, 20)
    sim.run(lambda: all(domain.in_flight for domain in sim.core.fleet.live() if domain.trial))
    failing, other = (domain for domain in sim.core.fleet.live() if domain.trial)
    (request,) = other.running
    stream = sim.streams[request.id]
    assert [work.count for record in other.in_flight for work in record.rows] == [2 * PAGE, 1]
    sim.core.on_worker(failing.devices[0], DomainBroken(failing.epoch, 0, 99, True, "ValueError: injected"))
    sim.turn()
    assert sim.statuses[switch_id].outcome == "rolled_back"
    if cancelled:
        sim.cancel(stream)
    sim.run(lambda: other.empty)
    assert stream.tokens == []
    last = sim.submit(stream.prompt, 2) if cancelled else stream
    sim.run(lambda: last.tokens != [])
    assert sim.core.snapshot().prefix_hits == 0
    sim.run_until_idle()
    sim.check_idle()


def test_a_new_domain_without_finite_numbers_is_rolled_back_and_its_request_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = simulation()
    switch_id = begin(sim, "tp1@1")
    first = sim.submit([1, 2, 3], 30)
    sim.run(lambda: len(first.tokens) > 2)
    honest = FakeWorker.finish

    def finish(worker: FakeWorker, plan: StepPlan, seconds: float) -> StepResult | None:
        result = honest(worker, plan, seconds)
        if result is None or worker.device != 1:
            return result
        bad = tuple(structs.replace(token, token=NO_TOKEN) for token in result.tokens)
        return structs.replace(result, tokens=bad)

    monkeypatch.setattr(FakeWorker, "finish", finish)
    sim.run_until_idle()
    assert sim.statuses[switch_id].outcome == "rolled_back"
    assert "not finite" in (sim.statuses[switch_id].error or "")
    assert first.end == "length"
    assert states(sim) == {"tp1@0": "serving"}


def test_cancel_in_mid_ramp_hands_everything_back() -> None:
    sim = simulation()
    switch_id = begin(sim, "tp2")
    streams = [sim.submit([n], 60) for n in range(6)]
    sim.run(lambda: share(sim, switch_id) == 0.5)
    sim.core.on_server(CancelSwitch(switch_id))
    sim.turn()
    assert sim.statuses[switch_id].outcome == "cancelled"
    sim.run_until_idle()
    sim.check_idle()
    assert all(stream.end == "length" for stream in streams)
    assert states(sim) == {"tp1@0": "serving"}


def test_cancel_while_the_probe_runs_leaves_nothing() -> None:
    sim = simulation()
    switch_id = sim.set_layout("tp2", ramp=True)
    sim.run(lambda: any(name.startswith("shadow") for name in sim.core.book.live))
    sim.core.on_server(CancelSwitch(switch_id))
    sim.run_until_idle()
    sim.check_idle()
    assert sim.statuses[switch_id].outcome == "cancelled"


def test_a_killed_worker_of_the_new_side_ends_in_the_layout_before() -> None:
    sim = simulation()
    switch_id = begin(sim, "tp2")
    streams = [sim.submit([n], 60) for n in range(4)]
    sim.run(lambda: all(len(stream.tokens) > 2 for stream in streams))
    sim.kill(1)
    sim.run(lambda: sim.statuses[switch_id].outcome == "rolled_back")
    sim.run_until_idle()
    assert states(sim) == {"tp1@0": "serving"}
    assert all(stream.tokens == stream.expected for stream in streams)


def test_a_failing_old_side_leaves_its_requests_to_the_new_one() -> None:
    sim = simulation(layout="tp1@2")
    switch_id = begin(sim, "tp2@0,1")
    streams = [sim.submit([n], 60) for n in range(4)]
    sim.run(lambda: all(len(stream.tokens) > 2 for stream in streams))
    sim.kill(2)
    sim.run(lambda: all(stream.end for stream in streams))
    sim.run(lambda: sim.statuses[switch_id].outcome == "closed")
    sim.run_until_idle()
    assert states(sim) == {"tp2@0,1": "serving"}


def test_a_domain_revived_for_a_ramp_drains_again_when_it_is_taken_back() -> None:
    sim = simulation()
    old = sim.submit([1], 85)
    sim.run(lambda: len(old.tokens) > 3)
    first = sim.set_layout("tp2@1,2", drain_deadline_s=60.0)
    sim.run(lambda: sim.statuses[first].outcome == "committed")
    second = begin(sim, "tp1@0+tp1@1")
    assert states(sim) == {"tp1@0": "serving", "tp1@1": "serving", "tp2@1,2": "serving"}
    assert sim.statuses[first].outcome == "closed"
    sim.core.on_server(CancelSwitch(second))
    sim.run_until_idle()
    sim.check_idle()
    assert states(sim) == {"tp2@1,2": "serving"}
    assert old.tokens == old.expected


def test_a_layout_of_revived_domains_alone_has_no_ramp() -> None:
    sim = simulation()
    old = sim.submit([1], 85)
    sim.run(lambda: len(old.tokens) > 3)
    first = sim.set_layout("tp2", drain_deadline_s=60.0)
    sim.run(lambda: sim.statuses[first].outcome == "committed")
    began = sim.clock.now()
    second = sim.set_layout("tp1", ramp=True)
    sim.run(lambda: sim.statuses[second].outcome == "closed")
    assert sim.clock.now() - began < 0.1
    sim.run_until_idle()
    assert states(sim) == {"tp1@0": "serving"}
    assert old.tokens == old.expected


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_ramp_that_becomes_urgent_ends_at_once(step: int) -> None:
    sim = simulation()
    switch_id = begin(sim, "tp2")
    steps = RAMP.shares[step]
    sim.run(lambda: share(sim, switch_id) >= steps)
    began = sim.clock.now()
    sim.core.on_server(SetLayout(switch_id, "tp2", ramp=True, forced=True))
    sim.run(lambda: sim.statuses[switch_id].outcome == "closed")
    assert sim.clock.now() - began < 0.1
    assert states(sim) == {"tp2@0,1": "serving"}


def test_an_urgent_switch_still_waits_for_its_probe() -> None:
    """That comes before the ramp began, or while the probe runs."""
    sim = simulation()
    switch_id = sim.set_layout("tp2", ramp=True)
    sim.core.on_server(SetLayout(switch_id, "tp2", ramp=True, forced=True))
    began = sim.clock.now()
    sim.run(lambda: sim.statuses[switch_id].outcome == "closed")
    assert sim.clock.now() - began < 0.1
    assert sum(len(plan.rows) for plan in sim.plans) == 2 * 2


def test_a_ramp_of_one_step_without_length_is_the_probe_alone() -> None:
    sim = simulation()
    began = sim.clock.now()
    switch_id = sim.set_layout("tp2", ramp=True, settings=PROBE_ONLY)
    sim.run(lambda: sim.statuses[switch_id].outcome == "closed")
    assert sim.clock.now() - began < 0.1
    assert sum(len(plan.rows) for plan in sim.plans) == 2 * 2


def test_no_domain_is_put_on_a_leased_device() -> None:
    sim = simulation()
    sim.core.on_server(SetDevices((1,)))
    assert [device.state for device in sim.core.snapshot().devices] == ["serving", "leased", "standby"]
    switch_id = sim.set_layout("tp2")
    sim.run(lambda: sim.statuses[switch_id].outcome == "closed")
    assert states(sim) == {"tp2@0,2": "serving"}
    refused = sim.set_layout("tp3")
    named = sim.set_layout("tp2@0,1")
    sim.turn()
    assert "1 of the pool's 3 are leased" in (sim.statuses[refused].error or "")
    assert "names device 1, which is leased" in (sim.statuses[named].error or "")
    sim.core.on_server(SetDevices(()))
    last = sim.set_layout("tp3")
    sim.run(lambda: sim.statuses[last].outcome == "closed")


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile(list(range(1, 21)), 0.95) == 19
    assert percentile([5.0], 0.5) == 5.0
