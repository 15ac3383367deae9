"""Every process lost in every way in every phase of a switch, on fakes and virtual time.

The source layout has domains on devices 0 and 2, the target one on 0 and 1: so worker 2 is of the old side,
worker 1 of the new one, and worker 0 of both. Wherever the fault strikes, streams bring the tokens of an
undisturbed engine (the simulation looks at each), the accounts of the idle engine are right, and the layout
is the last committed one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from dynamictp.messages import (
    CancelSwitch,
    DomainBroken,
    RampSettings,
    WorkerGone,
    WorkerHello,
    WorkerStarted,
)
from tests.engine.engine_simulation import TERMINAL, Simulation, Stream, engine_start

SOURCE, TARGET = "tp1@0+tp1@2", "tp2@0,1"
STEP_S = {"kill": 0.08, "stop": 1.5, "raise": 0.08}
"""A step of the ramp: a worker that is stopped in one is found before the next, as with the usual 2 s."""
WORKERS = {"old": 2, "new": 1, "both": 0}
PHASES = (
    "idle", "step", "prepare", "proof", "probe", "share", "settle", "rollback", "commit", "drain", "close",
)  # fmt: skip
COMMITTED = ("commit", "drain", "close")
"""Phases in which the target is the last committed layout."""
RAMPED = ("probe", "share", "settle", "rollback")


class Scene:
    """A switch that is brought into a phase while short requests keep coming."""

    def __init__(self, phase: str, kind: str = "kill") -> None:
        step_s = STEP_S[kind]
        ramp = RampSettings(
            (0.1, 0.5, 1.0), observe_s=step_s, settle_s=step_s, min_finished=1000, probe_s=3.0
        )
        start = engine_start(layout=SOURCE, ramp=ramp)
        self.sim = Simulation(random.Random(7), start, step_s=lambda plan: 0.004)
        self.streams: list[Stream] = []
        self.switch = ""
        self.sim.run(lambda: self.sim.ready is not None)
        if phase == "idle":
            return
        for number in range(4):
            self.send(number, 80)
        self.until(lambda: all(len(stream.tokens) > 2 for stream in self.streams))
        if phase != "step":
            self._switch(phase)

    def send(self, number: int, tokens: int = 6) -> None:
        self.streams.append(self.sim.submit([number % 40, 1, 2], tokens))

    def until(self, condition: Callable[[], bool]) -> None:
        """With a request every 20 ms."""
        due = self.sim.clock.now()

        def reached() -> bool:
            nonlocal due
            if self.sim.clock.now() >= due and len(self.sim.unfinished) < 12:
                due = self.sim.clock.now() + 0.02
                self.send(len(self.streams))
                self.sim.at(0.02, lambda: None)
            return condition()

        self.sim.run(reached)

    def _switch(self, phase: str) -> None:
        sim = self.sim
        ramp = phase in RAMPED
        deadline_s = 0.2 if phase == "drain" else 0.0
        self.switch = switch = sim.set_layout(TARGET, ramp=ramp, drain_deadline_s=deadline_s)
        sim.turn()
        reached = {
            "prepare": lambda: self.phase == "prepare",
            "proof": lambda: self.phase == "proof",
            "probe": lambda: self.phase == "ramp" and self.share == 0.0,
            "share": lambda: self.share == 0.5,
            "settle": lambda: self.share == 1.0,
            "rollback": lambda: self.share == 0.5,
            "commit": lambda: sim.statuses[switch].outcome == "committed",
            "drain": lambda: "draining" in self.states,
            "close": lambda: "closed" in self.states,
        }[phase]
        self.until(reached)
        if phase == "rollback":
            sim.core.on_server(CancelSwitch(switch))
            sim.turn()
            assert self.phase == "rollback"

    @property
    def phase(self) -> str:
        return self.sim.statuses[self.switch].phase

    @property
    def share(self) -> float:
        return self.sim.statuses[self.switch].ramp_share

    @property
    def states(self) -> set[str]:
        return {domain.state for domain in self.sim.core.fleet.domains.values()}

    # ------------------------------------------------------------ faults

    def strike(self, kind: str, device: int) -> None:
        match kind:
            case "kill":
                self.sim.kill(device)
            case "stop":
                self.sim.stop_worker(device)
            case "raise":
                self.raise_in(device)

    def raise_in(self, device: int) -> None:
        """In the newest domain that the worker is to be in, as it says itself: it lives."""
        domains = [d for d in self.sim.core.fleet.domains.values() if device in d.devices]
        if domains:
            newest = max(domains, key=lambda domain: domain.epoch)
            rank = newest.devices.index(device)
            self.sim.from_worker(device, DomainBroken(newest.epoch, rank, 1, True, "ValueError: injected"))

    def judge(self, phase: str) -> None:
        """Traffic goes on, then quiet: nothing is left behind."""
        sim = self.sim
        after = sim.clock.now() + 0.3
        self.until(lambda: sim.clock.now() >= after)
        sim.run_until_idle()
        sim.turn()
        sim.check_idle()
        assert all(stream.tokens == stream.expected for stream in self.streams)
        if not self.switch:
            assert str(sim.core.layouts.observed.spec) == "tp1+tp1"
            return
        outcome = sim.statuses[self.switch].outcome
        assert outcome in TERMINAL
        committed = outcome == "closed"
        assert committed or phase not in COMMITTED
        assert str(sim.core.layouts.observed.spec) == ("tp2" if committed else "tp1+tp1")


@pytest.mark.parametrize(("phase", "side", "kind"), list(product(PHASES, WORKERS, ("kill", "stop", "raise"))))
def test_a_worker_lost_in_any_phase(phase: str, side: str, kind: str) -> None:
    scene = Scene(phase, kind)
    scene.strike(kind, WORKERS[side])
    scene.judge(phase)
    if side != "old" and phase in ("prepare", "proof", "probe", "share", "settle"):
        assert scene.sim.statuses[scene.switch].outcome in ("failed", "rolled_back")


@pytest.mark.parametrize("ramp", [False, True])
def test_a_switch_to_a_device_whose_worker_is_away_waits_for_the_next_one(ramp: bool) -> None:
    """As the planner's may be commanded while a worker is being replaced."""
    scene = Scene("step")
    sim = scene.sim
    gone = sim.cluster.workers[1]
    sim.core.on_server(WorkerGone(1, gone.incarnation, "exit code -9"))
    sim.cluster.replace(1)
    scene.switch = switch = sim.set_layout(TARGET, ramp=ramp)
    after = sim.clock.now() + 0.5
    scene.until(lambda: sim.clock.now() >= after)
    assert (sim.statuses[switch].phase, sim.statuses[switch].outcome) == ("prepare", "")
    assert all(stream.tokens == stream.expected for stream in scene.streams if stream.end)
    sim.core.on_server(WorkerStarted(1, gone.incarnation + 1))
    sim.from_worker(1, WorkerHello(1, gone.incarnation + 1, 1))
    scene.until(lambda: sim.statuses[switch].outcome == "closed")
    scene.judge("step")


@pytest.mark.parametrize("phase", PHASES)
def test_an_engine_lost_in_any_phase(phase: str) -> None:
    scene = Scene(phase)
    scene.sim.restart_engine()
    scene.judge(phase)
    assert scene.sim.core.start.incarnation == 2


@pytest.mark.parametrize(("phase", "side"), list(product(PHASES, WORKERS)))
def test_an_engine_and_a_worker_lost_together(phase: str, side: str) -> None:
    scene = Scene(phase)
    scene.sim.kill(WORKERS[side])
    scene.sim.restart_engine()
    scene.judge(phase)
