"""Target against observed on virtual time, with an engine that loses messages, fails and restarts."""

from __future__ import annotations

import random
from itertools import count, pairwise

import msgspec
import pytest

from dynamictp.clock import ManualClock
from dynamictp.control.config import ControlConfig
from dynamictp.control.reconciler import (
    AGAIN_S,
    PROBE_ONLY,
    Observed,
    Reconciler,
    Target,
    ramp_settings,
    reached,
    target_of,
)
from dynamictp.control.values import Decision, Reason
from dynamictp.messages import CancelSwitch, SetLayout, SwitchStatus


class Engine:
    """Carries switches out, one at a time; `sent` keeps every command."""

    def __init__(self) -> None:
        self.sent: list[SetLayout | CancelSwitch] = []
        self.layout = "tp1"
        self.running: SetLayout | None = None
        self.reachable = True
        self.known: dict[str, SwitchStatus] = {}

    def send(self, command: SetLayout | CancelSwitch) -> bool:
        if self.reachable:
            self.sent.append(command)
        return self.reachable

    def begin(self, command: SetLayout) -> SwitchStatus:
        assert self.running is None
        self.running = command
        return self.status("")

    def end(self, outcome: str) -> SwitchStatus:
        status = self.status(outcome)
        self.known[status.switch_id] = status
        if outcome == "committed":
            assert self.running is not None
            self.layout = self.running.layout
        self.running = None
        return status

    def status(self, outcome: str) -> SwitchStatus:
        assert self.running is not None
        return SwitchStatus(self.running.switch_id, self.layout, self.running.layout, "prepare", outcome)  # type: ignore[arg-type]

    def observed(self, available: int = 4) -> Observed:
        flight = (self.running.switch_id, self.running.layout) if self.running else None
        return Observed(self.layout, available, flight)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10.0)


@pytest.fixture
def loop(engine: Engine, clock: ManualClock) -> Reconciler:
    ids = count(1)
    return Reconciler(clock, engine, lambda: f"s{next(ids)}")


def test_one_command_leads_to_the_target(loop: Reconciler, engine: Engine) -> None:
    loop.want(Target("tp2", "grow_predicted", drain_deadline_s=0.5))
    loop.step(engine.observed())
    command = engine.sent[0]
    assert command == SetLayout(
        "s1", "tp2", ramp=True, drain_deadline_s=0.5, reason="grow_predicted", forced=False
    )
    assert isinstance(command, SetLayout)
    loop.on_status(engine.begin(command))
    loop.step(engine.observed())
    assert loop.in_flight == "s1"
    loop.on_status(engine.end("committed"))
    loop.step(engine.observed())
    assert (len(engine.sent), loop.in_flight) == (1, "")


def test_a_lost_command_is_sent_again_under_its_id(
    loop: Reconciler, engine: Engine, clock: ManualClock
) -> None:
    engine.reachable = False
    loop.want(Target("tp2", "x"))
    loop.step(engine.observed())
    engine.reachable = True
    loop.step(engine.observed())
    loop.step(engine.observed())
    clock.advance(AGAIN_S)
    loop.step(engine.observed())
    assert [command.switch_id for command in engine.sent] == ["s1", "s1"]


def decision(target: str | None, reason: Reason, *, forced: bool = False) -> Decision:
    return Decision(0.0, target, reason, target or "tp2", reason, 1, forced=forced)


def test_a_switch_that_becomes_urgent_is_commanded_again(
    loop: Reconciler, engine: Engine, clock: ManualClock
) -> None:
    loop.follow(decision(None, Reason.IN_FLIGHT, forced=True), ControlConfig())
    loop.step(engine.observed())
    assert not engine.sent, "there is nothing to hurry"
    loop.follow(decision("tp2", Reason.GROW_PREDICTED), ControlConfig())
    loop.step(engine.observed())
    command = engine.sent[0]
    assert isinstance(command, SetLayout)
    assert (command.ramp, command.forced) == (True, False)
    loop.on_status(engine.begin(command))
    loop.follow(decision(None, Reason.IN_FLIGHT), ControlConfig())
    loop.step(engine.observed())
    assert len(engine.sent) == 1
    engine.reachable = False
    loop.follow(decision(None, Reason.IN_FLIGHT, forced=True), ControlConfig())
    loop.step(engine.observed())
    engine.reachable = True
    loop.step(engine.observed())
    loop.step(engine.observed())
    assert engine.sent[1:] == [msgspec.structs.replace(command, forced=True)]
    loop.on_status(engine.status(""))
    clock.advance(AGAIN_S)
    loop.step(engine.observed())
    assert len(engine.sent) == 2
    loop.on_status(engine.end("committed"))
    assert loop.in_flight == ""


def test_a_shrink_has_a_shadow_probe_and_no_ramp() -> None:
    shrink = target_of(decision("tp1", Reason.SHRINK), ControlConfig())
    assert (shrink.ramp, shrink.forced, shrink.settings) == (True, False, PROBE_ONLY)
    sideways = target_of(decision("tp1+tp1", Reason.SIDEWAYS), ControlConfig())
    assert (sideways.ramp, sideways.settings) == (True, ramp_settings(ControlConfig()))


def test_another_target_takes_the_switch_back_first(
    loop: Reconciler, engine: Engine, clock: ManualClock
) -> None:
    loop.want(Target("tp2", "x"))
    loop.step(engine.observed())
    command = engine.sent[0]
    assert isinstance(command, SetLayout)
    loop.on_status(engine.begin(command))
    loop.want(Target("2*tp1", "y"))
    for _ in range(3):
        loop.step(engine.observed())
    assert engine.sent[1:] == [CancelSwitch("s1")]
    clock.advance(AGAIN_S)
    loop.step(engine.observed())
    assert engine.sent[2:] == [CancelSwitch("s1")]
    loop.on_status(engine.end("cancelled"))
    loop.step(engine.observed())
    last = engine.sent[-1]
    assert isinstance(last, SetLayout)
    assert (last.switch_id, last.layout) == ("s2", "2*tp1")


def test_a_rolled_back_target_is_barred_longer_each_time(
    loop: Reconciler, engine: Engine, clock: ManualClock
) -> None:
    loop.want(Target("tp2", "x"))
    for length in (60.0, 120.0, 240.0):
        sent = len(engine.sent)
        loop.step(engine.observed())
        command = engine.sent[sent]
        assert isinstance(command, SetLayout)
        loop.on_status(engine.begin(command))
        loop.on_status(engine.end("rolled_back"))
        (bar,) = loop.bars()
        assert (bar.layout, bar.until_s - clock.now()) == ("tp2", length)
        clock.advance(length - 0.5)
        loop.step(engine.observed())
        assert len(engine.sent) == sent + 1
        clock.advance(0.5)
    assert loop.bars() == ()
    loop.want(Target("tp1+tp1", "y"))
    loop.step(engine.observed())
    assert len(engine.sent) == 4


def test_a_bar_does_not_keep_devices_that_are_to_be_left(loop: Reconciler, engine: Engine) -> None:
    engine.layout = "tp2"
    loop.on_status(SwitchStatus("by-hand", "tp2", "tp1", "rollback", "rolled_back"))
    loop.want(Target("tp1", Reason.SHRINK.value))
    loop.step(engine.observed())
    assert engine.sent == []
    loop.want(Target("tp1", Reason.DEVICES_LOST.value))
    loop.step(engine.observed())
    assert [command.layout for command in engine.sent if isinstance(command, SetLayout)] == ["tp1"]


def test_the_closing_report_of_a_rollback_does_not_bar_again(loop: Reconciler, engine: Engine) -> None:
    status = SwitchStatus("by-hand", "tp1", "tp2@0,1", "rollback", "rolled_back")
    loop.on_status(status)
    before = loop.bars()
    assert [bar.layout for bar in before] == ["tp2"]
    loop.on_status(SwitchStatus("by-hand", "tp1", "tp2@0,1", "rollback", "rolled_back", {"rollback": 1.0}))
    assert loop.bars() == before


def test_a_long_forgotten_bar_starts_from_the_beginning(
    loop: Reconciler, engine: Engine, clock: ManualClock
) -> None:
    status = SwitchStatus("a", "tp1", "tp2", "rollback", "rolled_back")
    loop.on_status(status)
    clock.advance(61.0)
    loop.on_status(status)
    assert loop.bars()[0].until_s == clock.now() + 120.0
    clock.advance(120.0 + 4 * 120.0 + 1.0)
    loop.on_status(status)
    assert loop.bars()[0].until_s == clock.now() + 60.0


def test_failures_back_off(loop: Reconciler, engine: Engine, clock: ManualClock) -> None:
    loop.want(Target("tp2", "x"))
    times: list[float] = []
    for _ in range(200):
        sent = len(engine.sent)
        loop.step(engine.observed())
        if len(engine.sent) > sent:
            times.append(clock.now())
            command = engine.sent[-1]
            assert isinstance(command, SetLayout)
            loop.on_status(engine.begin(command))
            loop.on_status(engine.end("failed"))
        clock.advance(0.5)
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_it_waits_for_devices_and_for_switches_of_others(loop: Reconciler, engine: Engine) -> None:
    loop.want(Target("tp2", "x"))
    loop.step(engine.observed(available=1))
    assert not engine.sent
    loop.step(Observed("tp1", 2, ("by-hand", "tp1+tp1")))
    assert not engine.sent
    loop.step(engine.observed(available=2))
    assert len(engine.sent) == 1


def test_no_target_means_hands_off(loop: Reconciler, engine: Engine) -> None:
    loop.step(engine.observed())
    loop.want(Target("tp2", "x"))
    loop.step(engine.observed())
    command = engine.sent[0]
    assert isinstance(command, SetLayout)
    loop.on_status(engine.begin(command))
    loop.want(None)
    loop.step(engine.observed())
    assert len(engine.sent) == 1
    loop.cancel()
    assert engine.sent[1:] == [CancelSwitch("s1")]


def test_placed_targets_are_compared_by_device() -> None:
    assert reached("tp2", "tp2@1,0")
    assert reached("tp1@1", "tp1")
    assert not reached("tp1@1", "tp1@0")
    assert not reached("tp2", "tp1+tp1")


@pytest.mark.parametrize("seed", range(20))
def test_it_gets_there_whatever_happens(seed: int, engine: Engine, clock: ManualClock) -> None:
    """Random targets, losses, failures and restarts; in the end the last target is observed."""
    rng, ids = random.Random(seed), count(1)
    loop = Reconciler(clock, engine, lambda: f"s{next(ids)}", bar_s=1.0)
    taken = 0

    def tick(trouble: float) -> None:
        nonlocal taken
        if rng.random() < trouble:
            engine.reachable = not engine.reachable
        if trouble == 0.0:
            engine.reachable = True
        loop.step(engine.observed())
        for command in engine.sent[taken:]:
            if rng.random() < trouble:
                continue  # lost on the way
            if isinstance(command, CancelSwitch):
                if engine.running is not None and engine.running.switch_id == command.switch_id:
                    loop.on_status(engine.end("cancelled"))
            elif engine.running is None and command.switch_id not in engine.known:
                status = engine.begin(command)
                engine.known[command.switch_id] = status
                if rng.random() > trouble:
                    loop.on_status(status)
        taken = len(engine.sent)
        if engine.running is not None and rng.random() < 0.3:
            outcome = rng.choice(("committed", "failed", "rolled_back")) if trouble else "committed"
            status = engine.end(outcome)
            if rng.random() > trouble:
                loop.on_status(status)
        if rng.random() < trouble / 4:
            engine.running = None
            loop.engine_lost()
        clock.advance(0.5)

    for _ in range(150):
        if rng.random() < 0.1:
            loop.want(Target(rng.choice(("tp1", "tp2", "tp1+tp1", "tp3")), "x"))
        tick(0.2)
    loop.want(Target("tp3", "x"))
    for _ in range(400):
        tick(0.0)
    assert engine.layout == "tp3"
    assert len({c.switch_id for c in engine.sent if isinstance(c, SetLayout)}) < 60
