"""Two models on one pool of eight devices, with the real engine and fake workers: 6 + 2 and back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count

import pytest

from dynamictp.control.arbitration import Demand
from dynamictp.control.reconciler import Observed, Reconciler, Target
from dynamictp.control.sharing import Held, allowance, deadlocked, divide, reach
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


def test_named_devices_are_left_to_whoever_named_them() -> None:
    demands = [Demand("a", 1), Demand("b", 2, least=2, at=frozenset({0, 1}))]
    assert divide(demands, range(3), {}, {}) == {"a": frozenset({2}), "b": frozenset({0, 1})}
    # What another one uses is waited for; what it only holds is taken.
    held = {"a": frozenset({0, 1}), "b": frozenset({2})}
    used = {"a": frozenset({0}), "b": frozenset({2})}
    assert divide(demands, range(3), held, used) == {"a": frozenset({0}), "b": frozenset({1, 2})}


def test_equal_demands_leave_a_device_where_it_is() -> None:
    """Whoever stands first among equals gets it, and the caller lets the holder stand first."""
    held = {"a": frozenset({0}), "b": frozenset({1, 2})}
    assert divide([Demand("b", 2), Demand("a", 2)], range(3), held, held) == held


def test_reach_is_what_a_model_could_have_at_once() -> None:
    held = {"a": frozenset({0, 1}), "b": frozenset({2})}
    low, high = Demand("a", 2), Demand("b", 2, priority=1)
    assert reach(Demand("a", 3), [low, Demand("b", 1)], 4, held, 1) == 3
    assert reach(Demand("a", 3), [low, high], 3, held, 0) == 1
    assert reach(Demand("b", 3, priority=1), [low, high], 3, held, 0) == 1
    assert reach(Demand("b", 3, priority=1), [low, high], 4, held, 1) == 2


@pytest.mark.parametrize(
    ("wanted", "stuck"),
    [
        ({"a": {3}, "b": {0, 1}}, ()),
        ({"a": {2}, "b": {0, 1}}, ("a", "b")),
        ({"a": {1, 2}, "b": {0}}, ("a", "b")),
        ({"a": {0}, "b": {1, 2}}, ()),
        ({"b": {0}}, ("b",)),
    ],
)
def test_models_that_would_wait_for_each_other_for_ever(
    wanted: dict[str, set[int]], stuck: tuple[str, ...]
) -> None:
    held = {"a": frozenset({0, 1}), "b": frozenset({2})}
    found = deadlocked({model: frozenset(devices) for model, devices in wanted.items()}, held, {3})
    assert found == stuck


@pytest.mark.parametrize("seed", range(20))
def test_divisions_are_disjoint_and_keep_what_is_used(seed: int) -> None:
    chance = random.Random(seed)
    names = ["a", "b", "c"]
    held: Held = dict.fromkeys(names, frozenset())
    for _ in range(50):
        devices = frozenset(chance.sample(range(8), chance.randrange(3, 9)))
        used = {n: frozenset(d for d in held[n] & devices if chance.random() < 0.5) for n in names}
        demands = [Demand(n, chance.randrange(1, 8), chance.randrange(2)) for n in names]
        divided = divide(demands, devices, held, used)
        assert sum(map(len, divided.values())) == len(frozenset().union(*divided.values()))
        assert all(used[n] <= divided[n] <= devices for n in names)
        held = divided
