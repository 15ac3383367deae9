"""Switches: phases, idempotence, refusals, drains, revives, sharing of devices."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from dynamictp.errors import ConfigError
from dynamictp.messages import (
    ArenaFacts,
    CancelSwitch,
    CloseDomain,
    OpenDomain,
    ProveDomain,
    SetLayout,
    Shutdown,
)
from tests.engine.engine_simulation import HEADS, PAGE, Simulation, Stream, engine_start

PHASES = ["prepare_views", "prepare_communicator", "proof", "ramp", "commit", "drain", "close"]


def simulation(*, step_s: float = 0.002, **changes: Any) -> Simulation:
    sim = Simulation(random.Random(1), engine_start(**changes), step_s=lambda plan: step_s, latency_s=0.0)
    sim.run(lambda: sim.ready is not None)
    return sim


def domain_states(sim: Simulation) -> dict[str, str]:
    return {str(d.placed): d.state for d in sim.core.fleet.domains.values()}


def switch(sim: Simulation, layout: str, **fields: Any) -> str:
    switch_id = sim.set_layout(layout, **fields)
    sim.run(lambda: sim.statuses[switch_id].outcome in {"closed", "noop", "failed"})
    return switch_id


def longest_gap(sim: Simulation, stream: Stream, until: Callable[[], bool]) -> float:
    """The stream's longest time without a token, in seconds."""
    longest, seen, since = 0.0, len(stream.tokens), sim.clock.now()
    while not until():
        sim.step()
        if len(stream.tokens) > seen:
            longest = max(longest, sim.clock.now() - since)
            seen, since = len(stream.tokens), sim.clock.now()
    return max(longest, sim.clock.now() - since)


def test_ready_is_said_when_the_first_layout_serves() -> None:
    sim = simulation(layout="tp2")
    assert sim.ready is not None
    assert (sim.ready.layout, sim.ready.arena_pages, sim.ready.legal_degrees) == ("tp2", 96, (1, 2, 3))
    assert domain_states(sim) == {"tp2@0,1": "serving"}


def test_a_switch_reports_every_phase_and_hands_running_streams_over() -> None:
    sim = simulation()
    streams = [sim.submit([n], 40) for n in range(4)]
    sim.run(lambda: all(len(stream.tokens) > 5 for stream in streams))
    status = sim.statuses[switch(sim, "tp2")]
    assert (status.from_layout, status.to_layout, status.outcome) == ("tp1", "tp2", "closed")
    assert list(status.phases_ms) == PHASES
    assert (status.handovers, status.recomputes, status.weight_bytes_copied) == (4, 0, 0)
    assert all(stream.end is None for stream in streams)
    sim.run_until_idle()
    sim.check_idle()


def test_a_stream_goes_on_without_a_gap_longer_than_a_few_steps() -> None:
    sim = simulation()
    stream = sim.submit([1], 80)
    sim.run(lambda: len(stream.tokens) > 10)
    sim.set_layout("tp3")
    longest = longest_gap(sim, stream, lambda: stream.end is not None)
    assert longest < 5 * 0.002


def test_a_long_prompt_on_one_of_the_domains_that_become_one_does_not_hold_the_others_streams() -> None:
    """Alone on its device, it has steps of any length, two in flight; the new domain's proof, which the other
    device is in at once, and its first step come after those."""
    start = engine_start(
        layout="tp1@0+tp1@1",
        max_model_len=4096,
        max_batched_tokens=512,
        arena=ArenaFacts(3000 * HEADS, PAGE, "fp32"),
    )
    sim = Simulation(
        random.Random(1),
        start,
        step_s=lambda plan: 0.01 + 0.001 * sum(row.count for row in plan.rows),
        latency_s=0.0,
    )
    sim.run(lambda: sim.ready is not None)
    stream = sim.submit([1], 600)
    sim.run(lambda: len(stream.tokens) > 10)
    long = sim.submit([2] * 3500, 2)
    sim.run(lambda: any(row.count == 512 for plan in sim.plans for row in plan.rows))
    switch_id = sim.set_layout("tp2@0,1")
    sim.turn()
    assert longest_gap(sim, stream, lambda: long.end is not None) < 0.2
    assert (sim.statuses[switch_id].outcome, sim.statuses[switch_id].handovers) == ("closed", 2)
    assert stream.end is None


def test_a_switch_tells_when_its_new_domains_first_admitted_a_waiting_request() -> None:
    sim = simulation()
    running = sim.submit([1], 200)
    sim.run(lambda: len(running.tokens) > 3)
    began_s = sim.clock.now()
    first = switch(sim, "tp2")
    sim.run(lambda: sim.statuses[first].handovers == 1)
    assert sim.first_admitted_ms == {}  # a handover is no admission
    sim.submit([2], 4)
    sim.run(lambda: first in sim.first_admitted_ms)
    waited_ms = sim.first_admitted_ms[first]
    assert sum(sim.statuses[first].phases_ms.values()) < waited_ms
    assert waited_ms == pytest.approx((sim.clock.now() - began_s) * 1e3, abs=2.0)
    sim.submit([3], 4)
    # Nothing comes while tp3 serves; its successor's first request is not its own.
    unmet, last = switch(sim, "tp3"), switch(sim, "tp1")
    sim.submit([4], 4)
    sim.run(lambda: last in sim.first_admitted_ms)
    assert unmet not in sim.first_admitted_ms
    sim.run_until_idle()
    sim.check_idle()


def test_a_switch_that_opens_nothing_admits_nothing_first() -> None:
    sim = simulation(layout="tp1+tp1")
    narrower = switch(sim, "tp1")
    sim.submit([1], 4)
    sim.run_until_idle()
    assert sim.statuses[narrower].outcome == "closed"
    assert sim.first_admitted_ms == {}


def test_the_same_id_is_the_same_switch() -> None:
    sim = simulation()
    switch_id = switch(sim, "tp2")
    before = sim.statuses.pop(switch_id)
    sim.core.on_server(SetLayout(switch_id, "tp3"))
    sim.turn()
    assert sim.statuses[switch_id] == before
    assert domain_states(sim) == {"tp2@0,1": "serving"}


def test_the_observed_layout_again_is_no_switch() -> None:
    sim = simulation(layout="tp1+tp1")
    assert sim.statuses[switch(sim, "2*tp1")].outcome == "noop"
    assert sim.statuses[switch(sim, "tp1@0+tp1@1")].outcome == "noop"


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("tp4", "degrees legal here are 1, 2, 3"),
        ("tp2+tp2", "takes 4 devices"),
        ("tp1@3", "beyond 2"),
        ("tp2pp2", "not supported yet"),
        ("other:tp1", "'other' is not served"),
        ("fast", "no shape"),
        ("tp1@0+tp2", "not placed"),
    ],
)
def test_a_layout_that_can_not_be_is_refused_by_name(layout: str, reason: str) -> None:
    sim = simulation()
    status = sim.statuses[switch(sim, layout)]
    assert status.outcome == "failed"
    assert status.error is not None
    assert reason in status.error
    assert domain_states(sim) == {"tp1@0": "serving"}


def test_a_second_switch_is_refused_until_the_first_commits() -> None:
    sim = simulation()
    first = sim.set_layout("tp2")
    second = sim.set_layout("tp3")
    sim.turn()
    assert sim.statuses[second].error == f"switch {first} is in flight"
    sim.run(lambda: sim.statuses[first].outcome == "closed")
    assert sim.statuses[switch(sim, "tp3")].outcome == "closed"


def test_a_cancelled_switch_leaves_everything_as_it_was() -> None:
    sim = simulation()
    stream = sim.submit([1], 60)
    sim.run(lambda: len(stream.tokens) > 3)
    switch_id = sim.set_layout("tp1@1+tp1@2")
    sim.turn()
    assert sorted(domain_states(sim).values()) == ["preparing", "preparing", "serving"]
    sim.core.on_server(CancelSwitch(switch_id))
    sim.run_until_idle()
    sim.check_idle()
    assert sim.statuses[switch_id].outcome == "cancelled"
    assert domain_states(sim) == {"tp1@0": "serving"}
    # Too late: it is only told how it ended.
    sim.core.on_server(CancelSwitch(switch_id))
    sim.core.on_server(CancelSwitch("unknown"))
    sim.turn()


def test_domains_that_stay_are_not_touched() -> None:
    sim = simulation(layout="tp1+tp1")
    before = {str(d.placed): d.epoch for d in sim.core.fleet.domains.values()}
    switch(sim, "3*tp1")
    after = {str(d.placed): d.epoch for d in sim.core.fleet.domains.values()}
    assert after == {**before, "tp1@2": max(after.values())}


def test_until_the_deadline_old_requests_stay_and_new_ones_go_to_the_new_layout() -> None:
    sim = simulation()
    old = sim.submit([1], 30)
    sim.run(lambda: len(old.tokens) > 3)
    switch_id = sim.set_layout("tp2", drain_deadline_s=10.0)
    sim.run(lambda: sim.statuses[switch_id].outcome == "committed")
    new = sim.submit([2], 5)
    sim.run(lambda: new.end is not None)
    assert domain_states(sim) == {"tp1@0": "draining", "tp2@0,1": "serving"}
    sim.run(lambda: sim.statuses[switch_id].outcome == "closed")
    assert (old.end, sim.statuses[switch_id].handovers) == ("length", 0)


def test_domains_that_share_a_device_take_turns_with_one_step_each_in_flight() -> None:
    sim = simulation()
    old = sim.submit([1], 90)
    sim.run(lambda: len(old.tokens) > 3)
    switch_id = sim.set_layout("tp2", drain_deadline_s=0.1)
    sim.run(lambda: sim.statuses[switch_id].outcome == "committed")
    new = sim.submit([2], 90)
    sim.run(lambda: len(new.tokens) > 3)
    mark = len(sim.plans)
    while sim.statuses[switch_id].outcome == "committed":
        depths = [len(domain.in_flight) for domain in sim.core.fleet.live()]
        assert len(depths) == 1 or max(depths) <= 1
        sim.step()
    epochs = [plan.epoch for plan in sim.plans[mark : mark + 20]]
    # A step of tp2 takes two device seconds for one of tp1.
    assert epochs.count(1) >= epochs.count(2) >= 5
    sim.run_until_idle()
    assert sim.statuses[switch_id].handovers == 1


def test_a_draining_domain_of_the_wanted_shape_is_revived_without_opening() -> None:
    sim = simulation()
    old = sim.submit([1], 60)
    sim.run(lambda: len(old.tokens) > 3)
    first = sim.set_layout("tp2", drain_deadline_s=10.0)
    sim.run(lambda: sim.statuses[first].outcome == "committed")
    epoch = min(sim.core.fleet.domains)
    second = switch(sim, "tp1")
    assert sim.statuses[second].outcome == "closed"
    assert [(d.epoch, d.state) for d in sim.core.fleet.domains.values()] == [(epoch, "serving")]
    assert sim.statuses[first].outcome == "closed"
    sim.run_until_idle()
    sim.check_idle()
    assert sim.statuses[first].handovers == 0


def test_returning_to_a_layout_uses_the_parked_communicator() -> None:
    sim = simulation(layout="tp2")
    comm = next(iter(sim.core.fleet.domains.values())).comm
    switch(sim, "tp1")
    switch(sim, "tp2")
    domain = next(iter(sim.core.fleet.domains.values()))
    assert (domain.comm, domain.epoch) == (comm, 3)


def test_slots_that_drains_hold_are_waited_for_and_drains_are_hurried() -> None:
    sim = simulation(comm_slots=2)
    old = sim.submit([1], 90)
    sim.run(lambda: len(old.tokens) > 3)
    sim.set_layout("tp2", drain_deadline_s=1000.0)
    sim.run(lambda: domain_states(sim).get("tp1@0") == "draining")
    status = sim.statuses[switch(sim, "tp3")]
    assert status.outcome == "closed"
    assert old.end is None
    assert sim.statuses[switch(sim, "3*tp1")].error == "no 3 communicator slots are free"


def test_a_narrower_layout_takes_over_what_its_quota_holds_and_recomputes_the_rest() -> None:
    sim = simulation(layout="tp3", arena=ArenaFacts(24 * HEADS, PAGE, "fp32"), max_num_seqs=4)
    streams = [sim.submit([n], 30) for n in range(4)]
    sim.run(lambda: all(len(stream.tokens) >= 8 for stream in streams))
    status = sim.statuses[switch(sim, "tp1")]
    assert (status.handovers, status.recomputes) == (2, 2)
    sim.run_until_idle()
    sim.check_idle()


def test_a_stream_that_a_narrower_layout_does_not_hold_goes_on_though_others_keep_coming() -> None:
    sim = simulation(layout="tp3", arena=ArenaFacts(24 * HEADS, PAGE, "fp32"), max_num_seqs=4)
    smaller = [sim.submit([n], 20) for n in range(2)]
    large = sim.submit([5] * 50, 30)

    def keep_coming() -> None:
        if large.end is None:
            sim.submit([len(sim.streams)], 12)
            sim.at(0.01, keep_coming)

    keep_coming()
    sim.run(lambda: large.tokens != [] and all(len(stream.tokens) > 3 for stream in smaller))
    status = sim.statuses[switch(sim, "tp1")]
    assert (status.handovers, status.recomputes) == (3, 1)
    sim.run(lambda: large.end is not None, within_s=1.0)
    sim.run_until_idle()
    sim.check_idle()


def test_the_advertised_context_is_that_of_the_layout_in_force_or_of_the_widest_legal_one() -> None:
    arena = ArenaFacts(12 * HEADS, PAGE, "fp32")
    static = simulation(arena=arena)
    assert static.ready is not None
    assert static.ready.max_model_len == 4 * PAGE
    switch(static, "tp3")
    assert static.core.snapshot().max_model_len == 12 * PAGE
    dynamic = simulation(arena=arena, mode="dynamic")
    assert dynamic.ready is not None
    assert dynamic.ready.max_model_len == 8 * PAGE  # 70 % of 12 blocks
    alone = simulation(arena=arena, mode="dynamic", devices=1, legal_degrees=(1,))
    assert alone.ready is not None
    assert alone.ready.max_model_len == 12 * PAGE  # nothing to change to


def test_messages_of_a_switch_go_views_then_proof_then_close_in_queue_order() -> None:
    sim = simulation()
    sim.turn()
    sim.set_layout("tp2")
    sim.core.turn()
    opened = [(d, b) for d, b in sim.core.to_workers if isinstance(b, OpenDomain)]
    assert [(device, body.rank, body.members) for device, body in opened] == [(0, 0, (0, 1)), (1, 1, (0, 1))]
    assert opened[0][1].control_slot == opened[0][1].comm.slot
    assert sim.control.words[opened[0][1].comm.slot] == (2, 1)
    assert not any(isinstance(body, ProveDomain | CloseDomain) for _, body in sim.core.to_workers)


def test_a_first_layout_without_slots_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="communicator slots"):
        simulation(layout="3*tp1", comm_slots=2)
    with pytest.raises(ConfigError, match=r"layout tp4: .*degrees legal here"):
        simulation(layout="tp4")


def test_shutdown_waits_for_running_requests_if_told_to() -> None:
    sim = simulation()
    sim.submit([1], 10)
    sim.core.on_server(Shutdown(5.0))
    sim.turn()
    assert not sim.core.finished
    sim.run(lambda: sim.core.finished, within_s=1.0)
    assert sim.streams["r0"].end == "length"
    hurried = simulation()
    hurried.submit([1], 10)
    hurried.core.on_server(Shutdown())
    hurried.turn()
    assert hurried.core.finished
