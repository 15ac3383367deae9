"""Failed domains: streams go on, pages wait in quarantine, lost workers are reported."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dynamictp.clock import ManualClock
from dynamictp.engine.core import EngineCore
from dynamictp.errors import FatalError, ProtocolError
from dynamictp.messages import (
    DomainBroken,
    DomainClosed,
    OpenDomain,
    Snapshot,
    StepPlan,
    StepResult,
    WorkerHello,
    WorkerLost,
)
from tests.engine.engine_simulation import Simulation, engine_start


def simulation(**changes: Any) -> Simulation:
    sim = Simulation(random.Random(1), engine_start(**changes), step_s=lambda plan: 0.002, latency_s=0.0)
    sim.run(lambda: sim.ready is not None)
    return sim


def fail(sim: Simulation) -> None:
    domain = next(sim.core.fleet.live())
    sim.core.on_worker(domain.devices[0], DomainBroken(domain.epoch, 0, 1, True, "boom"))


def test_streams_survive_a_broken_domain_and_it_is_built_again() -> None:
    sim = simulation(layout="tp2")
    streams = [sim.submit([n], 30) for n in range(3)]
    sim.run(lambda: all(len(stream.tokens) > 5 for stream in streams))
    fail(sim)
    assert sim.control.words[0] == (1, 2)
    sim.run_until_idle()
    sim.check_idle()
    assert {stream.end for stream in streams} == {"length"}
    assert [domain.epoch for domain in sim.core.fleet.domains.values()] == [2]
    assert sim.lost == []


def test_pages_of_a_failed_domain_are_free_only_when_every_member_has_left() -> None:
    sim = simulation(layout="tp2")
    sim.submit([1] * 9, 30)
    sim.turn()
    total = sim.core.pool.total
    assert sim.core.pool.available == total - 3
    sim.core.on_worker(1, DomainBroken(1, 1, 0, False, "peer is gone"))
    sim.core.turn()
    sim.core.on_worker(0, DomainClosed(1, 0))
    assert sim.core.pool.available == total - 3
    sim.core.check_integrity()
    sim.core.on_worker(1, DomainClosed(1, 1))
    assert sim.core.pool.available == total
    sim.core.check_integrity()


def test_results_of_a_failed_domain_do_not_count() -> None:
    sim = simulation()
    stream = sim.submit([1], 10)
    sim.turn()
    fail(sim)
    sim.core.on_worker(0, StepResult(1, 1, (), 0.1))
    sim.core.on_worker(0, StepResult(99, 1, (), 0.1))
    sim.run_until_idle()
    assert stream.end == "length"


def test_a_result_out_of_order_fails_the_domain_only() -> None:
    sim = simulation()
    stream = sim.submit([1], 10)
    sim.turn()
    sim.core.on_worker(0, StepResult(1, 7, (), 0.1))
    sim.run_until_idle()
    assert stream.end == "length"
    assert [domain.epoch for domain in sim.core.fleet.domains.values()] == [2]


def test_a_replaced_worker_fails_its_domains_only() -> None:
    sim = simulation(layout="tp1+tp1")
    streams = [sim.submit([n], 40) for n in range(4)]
    sim.run(lambda: all(len(stream.tokens) > 3 for stream in streams))
    sim.kill(1)
    sim.run_until_idle()
    sim.check_idle()
    assert sorted(domain.epoch for domain in sim.core.fleet.domains.values()) == [1, 3]


def test_a_member_that_does_not_leave_is_reported_lost_once() -> None:
    sim = simulation(layout="tp2")
    fail(sim)
    sim.core.on_worker(0, DomainClosed(1, 0))
    sim.core.turn()
    sim.clock.advance(5.1)
    for _ in range(2):
        sim.core.turn()
    lost = [body for body in sim.core.to_server if isinstance(body, WorkerLost)]
    assert [(body.device, body.incarnation) for body in lost] == [(1, 1)]
    assert sim.core.next_deadline() > sim.clock.now()
    # Its successor is proof that it is dead.
    sim.core.on_worker(1, WorkerHello(1, 2, 1))
    assert sim.core.fleet.domains == {}


def test_a_broken_link_means_a_lost_worker() -> None:
    sim = simulation(layout="tp2")
    stream = sim.submit([1], 5)
    sim.turn()
    sim.core.on_worker_gone(1, "message 7 is missing")
    sim.core.on_worker_gone(1, "message 7 is missing")
    sim.turn()
    assert [(body.device, body.reason) for body in sim.lost] == [(1, "message 7 is missing")]
    sim.kill(1)
    sim.run_until_idle()
    assert stream.end == "length"


def test_a_switch_whose_new_domain_breaks_is_taken_back() -> None:
    sim = simulation()
    stream = sim.submit([1], 60)
    sim.run(lambda: len(stream.tokens) > 3)
    switch_id = sim.set_layout("tp2")
    sim.turn()
    sim.core.on_worker(1, DomainBroken(2, 1, 0, True, "no memory for views"))
    sim.run_until_idle()
    status = sim.statuses[switch_id]
    assert (status.outcome, status.error) == ("failed", "rank 1 of tp2@0,1: no memory for views")
    assert {str(d.placed): d.epoch for d in sim.core.fleet.domains.values()} == {"tp1@0": 1}
    assert stream.end == "length"


def test_a_request_that_fails_every_domain_ends_with_an_error() -> None:
    sim = simulation()
    stream = sim.submit([1], 10)
    stream.cancelled = True
    for _ in range(3):
        sim.run(lambda: any(domain.in_flight for domain in sim.core.fleet.live()))
        fail(sim)
    sim.run_until_idle()
    assert (stream.end, stream.tokens) == ("error", [])


def test_a_first_layout_that_does_not_open_ends_the_engine() -> None:
    clock = ManualClock()
    core = EngineCore(engine_start(devices=1, legal_degrees=(1,)), clock)
    core.on_worker(0, WorkerHello(0, 1, 1))

    def play() -> None:
        for _ in range(3):
            core.turn()
            opened = [body for _, body in core.to_workers if isinstance(body, OpenDomain)]
            core.to_workers.clear()
            core.on_worker(0, DomainBroken(opened[0].epoch, 0, -1, True, "no kernel"))
            core.on_worker(0, DomainClosed(opened[0].epoch, 0))
            clock.advance(core.next_deadline() - clock.now() + 1.0)

    with pytest.raises(FatalError, match="no kernel"):
        play()


def test_messages_from_the_wrong_side_are_refused() -> None:
    core = EngineCore(engine_start(), ManualClock())
    with pytest.raises(ProtocolError):
        core.on_server(WorkerHello(0, 1, 1))
    with pytest.raises(ProtocolError):
        core.on_worker(0, StepPlan(1, 0, ()))
    core.turn()
    assert isinstance(core.to_server[0], Snapshot)
