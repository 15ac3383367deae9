"""Small parts: queue order, routing, communicators, step times, states of a domain."""

from __future__ import annotations

import pytest

from dynamictp.clock import ManualClock
from dynamictp.control.route import DomainLoad, RequestNeed, RouteState, route
from dynamictp.engine.comms import CommunicatorPool
from dynamictp.engine.domain import Domain, PlanRecord
from dynamictp.engine.request import Request
from dynamictp.engine.snapshot import StepLedger
from dynamictp.engine.steptime import StepTimes
from dynamictp.engine.waiting import WaitingQueue
from dynamictp.layout import PlacedShape, Shape
from dynamictp.messages import CommHandle, SamplingParams, StepResult, StepTotals, SubmitRequest, pack_tokens


def request(name: str, age: int, *, arrival_s: float = 0.0, priority: int = 0) -> Request:
    message = SubmitRequest(
        name, 1, pack_tokens([1, 2, 3]), 3, SamplingParams(0, 4), arrival_s, priority=priority
    )
    return Request(message, age, 100)


def test_waiting_order_is_resumed_then_priority_then_arrival() -> None:
    queue = WaitingQueue(ManualClock(4.0))
    late, early = request("late", 1, arrival_s=2.0), request("early", 2, arrival_s=1.0)
    urgent, resumed = request("urgent", 3, arrival_s=3.0, priority=1), request("resumed", 4, arrival_s=9.0)
    resumed.resumed = True
    for each in (late, early, urgent, resumed):
        queue.add(each)
    assert [r.id for r in queue] == ["resumed", "urgent", "early", "late"]
    queue.remove(early)
    assert [r.id for r in queue] == ["resumed", "urgent", "late"]
    with pytest.raises(KeyError):
        queue.remove(early)


def load(epoch: int, devices: int, running: int, blocks_free: int = 10, rows_free: int = 1) -> DomainLoad:
    return DomainLoad(epoch, devices, running, rows_free, blocks_free)


def chosen(domains: list[DomainLoad], need: int = 1, routed: int = 0) -> int | None:
    found = route(RequestNeed([need] * len(domains)), domains, RouteState(routed))
    return None if found is None else found.epoch


def test_route_takes_the_least_load_per_device_that_has_room() -> None:
    assert chosen([load(1, 1, 2), load(2, 2, 3)]) == 2
    assert chosen([load(1, 1, 2), load(2, 2, 3, blocks_free=0)]) == 1
    assert chosen([load(1, 1, 2), load(2, 2, 3, rows_free=0)]) == 1
    assert chosen([load(1, 1, 2, blocks_free=5), load(2, 1, 2, blocks_free=9)]) == 2
    assert chosen([load(1, 1, 0)], need=11) is None
    assert chosen([]) is None


def test_equal_domains_take_turns() -> None:
    domains = [load(1, 1, 0), load(2, 1, 0), load(3, 1, 0)]
    assert [chosen(domains, routed=n) for n in range(4)] == [1, 2, 3, 1]


def test_a_parked_communicator_is_used_again_by_the_same_members_only() -> None:
    pool = CommunicatorPool(2)
    key = ((0, 1), (1, 1))
    first = pool.get(key)
    assert first is not None
    pool.park(first)
    other = pool.get(((1, 1), (0, 1)))
    assert other is not None
    assert other.id != first.id
    assert pool.get(key) == first
    assert pool.get(((0, 1),)) is None
    pool.check_integrity({0, 1})


def test_the_longest_parked_communicator_gives_way_and_ids_are_never_reused() -> None:
    pool = CommunicatorPool(2)
    handles = [pool.get(((device, 1),)) for device in range(2)]
    for handle in handles:
        assert handle is not None
        pool.park(handle)
    third = pool.get(((7, 1),))
    assert third is not None
    assert handles[0] is not None
    assert (third.id, third.slot) == (3, handles[0].slot)
    assert pool.get(((1, 1),)) == handles[1]


def test_a_lost_worker_takes_its_parked_communicators_along() -> None:
    pool = CommunicatorPool(1)
    handle = pool.get(((0, 1), (1, 1)))
    assert handle is not None
    pool.park(handle)
    pool.forget(1)
    again = pool.get(((0, 1), (1, 2)))
    assert again is not None
    assert again == CommHandle(2, 0)
    pool.discard(again)
    assert pool.room == 1


def test_step_times_learn_medians_and_keep_stalls_out() -> None:
    times = StepTimes()
    for ms in (8.0, 8.2, 7.9, 90.0, 8.1):
        times.measured(1, 1, 0, ms)
    assert times.decode_ms(1, 1) == pytest.approx(8.1)
    assert times.decode_ms(1, 0) == 0.0
    for _ in range(3):
        times.measured(1, 1, 100, 8.1 + 120.0)
    assert times.prefill_ms(1, 100) == pytest.approx(120.0)
    assert times.prefill_tokens(1, 1, 100.0) == int((100.0 - 8.1) / 1.2)
    assert times.prefill_tokens(1, 1, 1.0) == 0
    # The nearest measured size stands in for one that was never tried.
    times.measured(1, 32, 0, 47.0)
    assert times.decode_ms(1, 60) == pytest.approx(47.0)


def make_domain() -> Domain:
    return Domain(7, PlacedShape(Shape(2), (0, 1)), CommHandle(1, 0), (1, 1), 2, 10)


def test_the_life_of_a_domain_allows_a_revive_and_nothing_after_its_end() -> None:
    domain = make_domain()
    for state in ("ready", "serving", "draining", "serving", "draining", "closed"):
        domain.become(state)
    with pytest.raises(RuntimeError, match="from closed to serving"):
        domain.become("serving")
    with pytest.raises(RuntimeError, match="from preparing to serving"):
        make_domain().become("serving")
    assert domain.id == "d7"


def test_rows_are_given_back_and_announced_only_if_the_workers_know_them() -> None:
    domain = make_domain()
    known, unknown = request("known", 1), request("unknown", 2)
    domain.attach(known)
    domain.attach(unknown)
    assert (domain.free_rows, known.row, unknown.row) == (0, 0, 1)
    known.sent_blocks = 0
    domain.release(known)
    domain.release(unknown)
    assert (domain.gone, domain.free_rows) == ([0], 2)
    domain.check_integrity()


def test_the_ledger_of_steps_keeps_degrees_and_phases_apart_and_no_idleness() -> None:
    ledger = StepLedger()
    wide = Domain(1, PlacedShape(Shape(2), (0, 1)), CommHandle(1, 0), (1, 1), 4, 8)
    narrow = Domain(2, PlacedShape(Shape(1), (0,)), CommHandle(2, 1), (1,), 4, 8)

    def add(domain: Domain, *, busy: bool, alone: bool = True, prefill: int = 0) -> None:
        domain.busy = busy
        record = PlanRecord(1, (), 1, prefill, 1.0, alone)
        result = StepResult(domain.epoch, 1, (), 0.5, 0.125, weights_s=0.25, attention_s=0.0625, gap_s=8.0)
        ledger.add(domain, record, result)

    add(wide, busy=False, prefill=5)  # after a rest
    add(wide, busy=True)
    add(wide, busy=True, alone=False)  # the gap was another domain's step
    add(narrow, busy=True)
    assert ledger.totals == (
        StepTotals(2, "prefill", 1, 0.5, 0.25, 0.0625, 0.125, 0.0),
        StepTotals(2, "decode", 2, 1.0, 0.5, 0.125, 0.25, 8.0),
        StepTotals(1, "decode", 1, 0.5, 0.25, 0.0625, 0.125, 8.0),
    )
