"""Who hangs: progress words against what was sent."""

from __future__ import annotations

import pytest

from dynamictp.engine.domain import Domain, PlanRecord
from dynamictp.engine.watch import LOOK_S, Watch
from dynamictp.layout import PlacedShape, Shape
from dynamictp.messages import CommHandle
from tests.engine.engine_simulation import ControlRecord

IDLE, COMPUTING, WAITING = range(3)
HANG_S = 2.0


class Scene:
    """A watch that looks regularly at two workers and what they do."""

    def __init__(self, *domains: Domain) -> None:
        self.control = ControlRecord()
        self.core_wait_s = {0: 0.0, 1: 0.0}
        """By process id, which is the device's number."""
        self.starved: dict[int, float] = {}
        """Share of the time in which a process waits for a core."""
        self.watch = Watch(self.control, HANG_S, lambda pid: self.core_wait_s[pid])
        self.domains = domains
        self.now = 50.0
        for device in (0, 1):
            self.watch.on_hello(device, device)

    def stand(self, device: int, begun: int, state: int) -> None:
        """From now on the word stands still."""
        self.control.progress_words[device] = (begun, 0, state, 0.0)

    def look(self, seconds: float) -> list[tuple[float, int]]:
        """Time passes; (when, device) of the first worker found."""
        start = self.now
        while self.now < start + seconds:
            self.now += LOOK_S
            for pid, share in self.starved.items():
                self.core_wait_s[pid] += share * LOOK_S
            for device, (begun, layer, state, age) in self.control.progress_words.items():
                self.control.progress_words[device] = (begun, layer, state, age + LOOK_S)
            verdict = self.watch.look(self.domains, self.now)
            if verdict.lost or verdict.stuck:
                return [(self.now - start, device) for device, _ in verdict.lost] or [(self.now - start, -1)]
        return []


def domain(*devices: int) -> Domain:
    made = Domain(1, PlacedShape(Shape(len(devices)), devices), CommHandle(1, 0), (1,) * len(devices), 4, 10)
    made.become("ready")
    made.become("serving")
    return made


def test_an_idle_worker_that_owes_nothing_may_rest_for_ever() -> None:
    scene = Scene(domain(0, 1))
    scene.watch.sent(0)
    scene.stand(0, 1, IDLE)
    assert scene.look(60.0) == []


@pytest.mark.parametrize(("begun", "state"), [(1, COMPUTING), (0, IDLE)])
def test_a_worker_that_does_not_get_on_is_found_in_time(begun: int, state: int) -> None:
    scene = Scene(domain(0, 1))
    scene.stand(0, begun, state)
    scene.stand(1, 0, IDLE)
    scene.watch.sent(0)
    ((after_s, device),) = scene.look(10.0)
    assert device == 0
    assert HANG_S < after_s <= HANG_S + 3 * LOOK_S


def test_a_long_step_is_no_hang() -> None:
    tp1 = domain(0)
    tp1.in_flight.append(PlanRecord(1, (), 0, 500, 900.0, True))
    scene = Scene(tp1)
    scene.stand(0, 1, COMPUTING)
    scene.watch.sent(0)
    assert scene.look(8.0) == []
    ((_, device),) = scene.look(2.0)
    assert device == 0


def test_the_peer_that_waits_is_not_to_blame() -> None:
    scene = Scene(domain(0, 1))
    for device in (0, 1):
        scene.watch.sent(device)
    scene.stand(0, 1, WAITING)
    scene.stand(1, 1, COMPUTING)
    ((_, device),) = scene.look(10.0)
    assert device == 1


def test_when_all_wait_the_domain_fails_and_who_stays_is_lost() -> None:
    tp2 = domain(0, 1)
    scene = Scene(tp2)
    for device in (0, 1):
        scene.watch.sent(device)
        scene.stand(device, 1, WAITING)
    ((after_s, device),) = scene.look(10.0)
    assert (device, after_s <= HANG_S + 3 * LOOK_S) == (-1, True)
    tp2.become("failed")
    tp2.retired_s = scene.now
    tp2.closed_by.add(0)
    scene.stand(0, 2, IDLE)
    ((_, device),) = scene.look(2.0)
    assert device == 1


def test_after_a_pause_of_the_whole_machine_the_clock_begins_anew() -> None:
    scene = Scene(domain(0))
    scene.stand(0, 1, COMPUTING)
    scene.watch.sent(0)
    assert scene.look(1.5) == []
    scene.now += 3600.0
    scene.control.progress_words[0] = (1, 0, COMPUTING, 3600.0)
    assert scene.look(1.5) == []
    assert scene.look(2.0)


def test_a_worker_that_is_forgotten_owes_nothing() -> None:
    scene = Scene(domain(0))
    scene.stand(0, 1, COMPUTING)
    scene.watch.sent(0)
    scene.watch.forget(0)
    scene.watch.sent(0)
    assert scene.look(10.0) == []


@pytest.mark.parametrize("state", [COMPUTING, IDLE])
def test_a_worker_without_a_core_does_not_hang_however_long(state: int) -> None:
    scene = Scene(domain(0))
    scene.stand(0, 1 if state else 0, state)
    scene.watch.sent(0)
    scene.starved[0] = 1.0
    assert scene.look(60.0) == []
    scene.starved[0] = 0.0
    assert scene.look(10.0)


def test_a_worker_that_loops_on_a_share_of_a_core_is_found_after_as_much_of_it() -> None:
    scene = Scene(domain(0))
    scene.stand(0, 1, COMPUTING)
    scene.watch.sent(0)
    scene.starved[0] = 0.75
    ((after_s, device),) = scene.look(60.0)
    assert device == 0
    assert 4 * HANG_S - 2 < after_s <= 4 * HANG_S + 1


def test_what_a_worker_waited_before_it_stood_still_is_no_excuse() -> None:
    scene = Scene(domain(0))
    scene.starved[0] = 1.0
    for begun in range(1, 40):
        scene.watch.sent(0)
        scene.stand(0, begun, COMPUTING)
        assert scene.look(1.0) == []
    scene.starved[0] = 0.0
    scene.watch.sent(0)
    scene.stand(0, 40, COMPUTING)
    ((after_s, _),) = scene.look(10.0)
    assert after_s <= HANG_S + 3 * LOOK_S


def test_members_that_wait_for_one_without_a_core_are_not_stuck() -> None:
    scene = Scene(domain(0, 1))
    for device in (0, 1):
        scene.watch.sent(device)
        scene.stand(device, 1, WAITING)
    scene.starved[1] = 1.0
    assert scene.look(30.0) == []
