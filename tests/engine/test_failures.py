"""Failed domains: streams go on, pages wait in quarantine, lost workers are reported."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dynamictp.clock import ManualClock
from dynamictp.engine.core import EngineCore
from dynamictp.errors import FatalError, ProtocolError
from dynamictp.messages import (
    NO_TOKEN,
    DomainBroken,
    DomainClosed,
    OpenDomain,
    SetLayout,
    Snapshot,
    StepPlan,
    StepResult,
    WorkerGone,
    WorkerHello,
    WorkerLost,
    WorkerStarted,
)
from dynamictp.testing import fake_worker
from dynamictp.worker.comm.control import WorkerState
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


def let_pass(sim: Simulation, seconds: float) -> None:
    """Turns as an idle engine has them: one for every snapshot."""
    for _ in range(int(seconds / 0.25)):
        sim.clock.advance(0.25)
        sim.turn()


def hang(sim: Simulation, device: int, state: WorkerState) -> None:
    """The worker's progress word stands still, before the messages that it is sent from now on."""
    sim.control.progress_words[device] = (0, 0, state, 1e9)


def test_a_member_that_does_not_leave_is_reported_lost_once() -> None:
    sim = simulation(layout="tp2")
    hang(sim, 1, WorkerState.IDLE)
    fail(sim)
    let_pass(sim, 5.0)
    assert [(body.device, body.incarnation) for body in sim.lost] == [(1, 1)]
    sim.core.on_worker(0, DomainClosed(1, 0))
    # Its successor is proof that it is dead.
    sim.core.on_worker(1, WorkerHello(1, 2, 1))
    assert 1 not in sim.core.fleet.domains


def test_a_worker_that_computes_for_ever_is_the_only_one_lost() -> None:
    sim = simulation(layout="tp2+tp1")
    streams = [sim.submit([n], 20) for n in range(4)]
    sim.turn()
    hang(sim, 0, WorkerState.COMPUTING)
    hang(sim, 1, WorkerState.WAITING)
    sim.cluster.replace(0)
    hold(sim, 1)
    let_pass(sim, 1.5)
    assert sim.lost == []
    let_pass(sim, 1.0)
    assert [(lost.device, lost.incarnation) for lost in sim.lost] == [(0, 1)]
    assert "no progress" in sim.lost[0].reason
    sim.control.progress_words.clear()
    sim.kill(0)
    sim.run_until_idle()
    sim.check_idle()
    assert {stream.end for stream in streams} == {"length"}
    assert len(sim.lost) == 1


def hold(sim: Simulation, device: int) -> None:
    """What was sent to the device so far is of no consequence: its peer is stopped."""
    sim.cluster._queues[device].clear()


def test_when_all_members_wait_the_one_that_does_not_leave_is_lost() -> None:
    sim = simulation(layout="tp2")
    stream = sim.submit([1], 20)
    sim.turn()
    sim.cluster.replace(1)
    hold(sim, 0)
    for device in (0, 1):
        hang(sim, device, WorkerState.WAITING)
    let_pass(sim, 2.5)
    assert sim.lost == []
    assert sim.control.words[0] == (1, 2)
    # Released, rank 0 leaves; rank 1 is stopped inside its wait.
    del sim.control.progress_words[0]
    let_pass(sim, 1.5)
    assert [(lost.device, lost.incarnation) for lost in sim.lost] == [(1, 1)]
    sim.control.progress_words.clear()
    sim.kill(1)
    sim.run_until_idle()
    sim.check_idle()
    assert stream.end == "length"


def test_a_reaped_worker_fails_its_domains_and_frees_their_pages() -> None:
    sim = simulation(layout="tp1+tp1")
    streams = [sim.submit([n] * 9, 40) for n in range(4)]
    sim.run(lambda: all(len(stream.tokens) > 3 for stream in streams))
    sim.cluster.replace(1)
    sim.core.on_server(WorkerGone(1, 1, "exit code -9"))
    assert sim.core.fleet.incarnations == {0: 1, 2: 1}
    assert [domain.epoch for domain in sim.core.fleet.domains.values()] == [1]
    assert not any(domain.quarantine for domain in sim.core.fleet.domains.values())
    # Streams go on at once beside those of the other domain.
    before = sum(len(stream.tokens) for stream in streams)
    sim.run(lambda: sum(len(stream.tokens) for stream in streams) > before + 20)
    sim.core.on_server(WorkerStarted(1, 3))
    sim.core.on_server(WorkerGone(1, 1, "late news"))
    sim.cluster.workers[1].incarnation = 3
    sim.from_worker(1, WorkerHello(1, 3, 1))
    sim.run_until_idle()
    sim.check_idle()
    assert sim.core.fleet.incarnations[1] == 3
    assert {stream.end for stream in streams} == {"length"}
    assert sim.lost == []


def test_nothing_meant_for_dead_workers_reaches_their_successors() -> None:
    """News of two deaths and both successors may be there in one go, without a turn in between."""
    sim = simulation(layout="tp2")
    stream = sim.submit([1], 20)
    sim.run(lambda: len(stream.tokens) > 3)
    for device in (0, 1):
        sim.cluster.replace(device)
        sim.core.on_server(WorkerGone(device, 1, "exit code -9"))
    for device in (0, 1):
        sim.core.on_server(WorkerStarted(device, 2))
    assert [device for device, _ in sim.core.to_workers if device in (0, 1)] == []
    for device in (0, 1):
        sim.from_worker(device, WorkerHello(device, 2, 1))
    # Late news of the lives before takes nothing from these.
    sim.run(lambda: len(sim.core.fleet.incarnations) == 3)
    sim.core.turn()
    queued = list(sim.core.to_workers)
    sim.core.on_server(WorkerGone(0, 1, "late news"))
    assert sim.core.to_workers == queued
    sim.run_until_idle()
    sim.check_idle()
    assert stream.end == "length"


def test_a_worker_that_never_says_hello_is_lost() -> None:
    sim = simulation()
    sim.core.on_server(WorkerGone(2, 1, "exit code -9"))
    sim.core.on_server(WorkerStarted(2, 2))
    let_pass(sim, 29.0)
    assert sim.lost == []
    let_pass(sim, 2.0)
    assert [(lost.device, lost.incarnation) for lost in sim.lost] == [(2, 2)]


def test_a_restarted_engine_opens_nothing_beside_workers_it_has_not_heard() -> None:
    clock = ManualClock()
    core = EngineCore(engine_start(incarnation=2, workers=(3, 1, 0)), clock)
    core.on_worker(0, WorkerHello(0, 3, 1))
    core.on_server(SetLayout("s", "tp1@0"))
    core.turn()
    # Worker 1 may still write pages for the engine before this one; there is none on device 2.
    assert core.to_workers == []
    core.on_worker(1, WorkerHello(1, 1, 1))
    core.turn()
    ((device, opened),) = core.to_workers
    assert isinstance(opened, OpenDomain)
    assert (device, opened.epoch > 1 << 20) == (0, True)


def test_a_worker_that_does_not_greet_a_restarted_engine_is_lost() -> None:
    clock = ManualClock(5000.0)
    core = EngineCore(engine_start(incarnation=2, workers=(3, 1, 1)), clock)
    core.on_worker(0, WorkerHello(0, 3, 1))
    core.on_worker(2, WorkerHello(2, 1, 1))
    for _ in range(30):
        clock.advance(0.25)
        core.turn()
    lost = [body for body in core.to_server if isinstance(body, WorkerLost)]
    assert [(body.device, body.incarnation) for body in lost] == [(1, 1)]


def test_a_broken_link_means_a_lost_worker() -> None:
    sim = simulation(layout="tp2")
    stream = sim.submit([1], 5)
    sim.turn()
    sim.core.lose_worker(1, "message 7 is missing")
    sim.core.lose_worker(1, "message 7 is missing")
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
    """The third time it runs alone, so that those that were in its steps go on."""
    sim = simulation()
    poison = sim.submit([1], 10)
    poison.cancelled = True
    others = [sim.submit([n], 30) for n in (2, 3)]

    def poisoned() -> bool:
        return any(
            work.request.id == poison.id
            for domain in sim.core.fleet.live()
            for record in domain.in_flight
            for work in record.rows
        )

    rows = []
    while poison.end is None:
        sim.run(lambda: poisoned() or poison.end is not None)
        if poisoned():
            rows.append(len(sim.plans[-1].rows))
            fail(sim)
            sim.turn()
    assert rows == [3, 3, 1]
    sim.run_until_idle()
    assert (poison.end, poison.tokens) == ("error", [])
    assert {stream.end for stream in others} == {"length"}


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


def test_a_request_without_finite_numbers_ends_alone_and_leaves_nothing_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = fake_worker._sample
    poison = 666

    def sample(hashes: bytes, heads: int, seed: int, vocab: int) -> int:
        return NO_TOKEN if seed == poison else honest(hashes, heads, seed, vocab)

    sim = simulation()
    others = [sim.submit([n] * 9, 12) for n in range(2)]
    bad = sim.submit(list(range(9)), 12, seed=poison)
    bad.cancelled = True
    monkeypatch.setattr(fake_worker, "_sample", sample)
    sim.run_until_idle()
    sim.turn()
    sim.check_idle()
    assert bad.end == "error"
    assert bad.tokens == []
    assert [stream.end for stream in others] == ["length"] * 2
    assert [domain.id for domain in sim.core.fleet.live()] == ["d1"]
    before = sim.core.snapshot().prefix_hits
    again = sim.submit(list(range(9)), 3)
    sim.run_until_idle()
    assert again.end == "length"
    assert sim.core.snapshot().prefix_hits == before
