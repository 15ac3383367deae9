"""Two models on one pool of eight devices, with the real engine and fake workers: 6 + 2 and back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count

import pytest

from dynamictp.control.arbitration import Demand
from dynamictp.control.reconciler import Observed, Reconciler, Target
from dynamictp.control.sharing import allowance, divide
from dynamictp.layout import Layout
from dynamictp.messages import ArenaFacts, CancelSwitch, SetDevices, SetLayout, SwitchStatus
from tests.engine.engine_simulation import HEADS, PAGE, Simulation, Stream, engine_start

DEVICES = frozenset(range(8))


def test_a_model_keeps_what_it_uses_until_it_has_left_it() -> None:
    demands = [Demand("big", 4), Demand("small", 4)]
    held = {"big": frozenset(range(6)), "small": frozenset({6, 7})}
    still = divide(demands, DEVICES, held, {"big": frozenset(range(6)), "small": frozenset({6})})
    assert still == held
    left = divide(demands, DEVICES, held, {"big": frozenset({0, 1, 4, 5}), "small": frozenset({6})})
    assert left == {"big": frozenset({0, 1, 4, 5}), "small": frozenset({2, 3, 6, 7})}
    assert allowance(demands, 8, held) == {"big": 4, "small": 2}


def test_what_is_idle_goes_first_from_the_far_end() -> None:
    held = {"a": frozenset({0, 1, 2, 3}), "b": frozenset[int]()}
    demands = [Demand("a", 2), Demand("b", 1, priority=1)]
    divided = divide(demands, frozenset(range(4)), held, {"a": frozenset({1})})
    assert divided == {"a": frozenset({0, 1}), "b": frozenset({2})}


def test_devices_leased_to_others_are_no_ones() -> None:
    held = {"a": frozenset({0, 1, 2, 3})}
    assert divide([Demand("a", 4)], {0, 2}, held, {"a": frozenset()}) == {"a": frozenset({0, 2})}


@dataclass
class Model:
    """One model: its engine on virtual time, and who leads its layout."""

    name: str
    layout: str
    allowed: frozenset[int]
    sim: Simulation = field(init=False)
    loop: Reconciler = field(init=False)
    streams: list[Stream] = field(default_factory=list)
    _seen: dict[str, SwitchStatus] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start = engine_start(
            devices=8,
            legal_degrees=tuple(range(1, 9)),
            layout=self.layout,
            arena=ArenaFacts(64 * HEADS, PAGE, "fp32"),
            comm_slots=20,
            leased=tuple(sorted(DEVICES - self.allowed)),
        )
        self.sim = Simulation(random.Random(self.name), start, latency_s=0.0)
        self.sim.run(lambda: self.sim.ready is not None)
        ids = count(1)
        self.loop = Reconciler(self.sim.clock, self, lambda: f"{self.name}{next(ids)}")

    def send(self, command: SetLayout | CancelSwitch) -> bool:
        self.sim.core.on_server(command)
        return True

    @property
    def used(self) -> frozenset[int]:
        if self.loop.in_flight:
            return self.allowed
        domains = self.sim.core.fleet.domains.values()
        in_domains = {device for domain in domains for device in domain.devices}
        return self.placed.devices | in_domains

    @property
    def placed(self) -> Layout:
        return self.sim.core.layouts.observed

    def allow(self, devices: frozenset[int]) -> None:
        self.allowed = devices
        self.sim.core.on_server(SetDevices(tuple(sorted(DEVICES - devices))))

    def step(self, available: int) -> None:
        """Some virtual time, then the reconciler's turn; its target is as wide as it may be."""
        until = self.sim.clock.now() + 0.05
        self.sim.at(0.05, lambda: None)
        self.sim.run(lambda: self.sim.clock.now() >= until)
        for switch_id, status in self.sim.statuses.items():
            if self._seen.get(switch_id) is not status:
                self._seen[switch_id] = status
                self.loop.on_status(status)
        self.loop.want(Target(f"tp{available}", "test", ramp=False))
        current = self.loop.in_flight
        flight = (current, f"tp{available}") if current else None
        self.loop.step(Observed(str(self.placed), len(self.allowed), flight))
        if len(self.streams) < 40 and len(self.sim.unfinished) < 6:
            self.streams.append(self.sim.submit([len(self.streams) % 40, 3], 20))


def run(models: dict[str, Model], demands: list[Demand], turns: int = 60) -> None:
    for _ in range(turns):
        held = {name: model.allowed for name, model in models.items()}
        used = {name: model.used for name, model in models.items()}
        divided = divide(demands, DEVICES, held, used)
        # First those that give devices up, as a server has to.
        for name in sorted(models, key=lambda name: len(divided[name]) - len(held[name])):
            if divided[name] != held[name]:
                models[name].allow(divided[name])
        grants = allowance(demands, len(DEVICES), divided)
        for name, model in models.items():
            model.step(grants[name])
        taken = [device for model in models.values() for device in model.used if device in model.allowed]
        assert len(taken) == len(set(taken))
        for name, model in models.items():
            others = frozenset().union(*(other.allowed for n, other in models.items() if n != name))
            assert not model.placed.devices & others


@pytest.mark.parametrize("priority", [0, 1])
def test_six_and_two_become_four_and_four_and_come_back(priority: int) -> None:
    models = {
        "big": Model("big", "tp6", frozenset(range(6))),
        "small": Model("small", "tp2", frozenset({6, 7})),
    }
    assert str(models["small"].placed) == "tp2@6,7"
    run(models, [Demand("big", 4), Demand("small", 4, priority=priority)])
    assert {name: str(model.placed.spec) for name, model in models.items()} == {"big": "tp4", "small": "tp4"}
    run(models, [Demand("big", 7, priority=1), Demand("small", 4, least=2)])
    assert {name: str(model.placed.spec) for name, model in models.items()} == {"big": "tp6", "small": "tp2"}
    for model in models.values():
        model.sim.run_until_idle()
        model.sim.check_idle()
        assert all(stream.tokens == stream.expected for stream in model.streams)
        assert len(model.streams) == 40
