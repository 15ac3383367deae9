"""The simulation core: time, batching, pages, switches; and that nothing gets lost."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from dynamictp.control.traffic import Profile
from dynamictp.cost.batching import Replica
from dynamictp.cost.steps import StepModel
from dynamictp.layout import PlacedShape, Shape
from dynamictp.messages import CancelSwitch, SetLayout
from dynamictp.sim.loop import EventLoop
from dynamictp.sim.node import Node
from dynamictp.sim.pool import SimPool
from dynamictp.sim.requests import SimRequest
from tests.control.pools import config, cpu_facts, cpu_setup, traffic


def test_events_happen_in_order_and_cancelled_ones_do_not() -> None:
    loop, seen = EventLoop(), []
    loop.at(2.0, lambda: seen.append("b"))
    loop.at(1.0, lambda: seen.append("a"))
    loop.at(2.0, lambda: seen.append("c"))
    loop.after(1.5, lambda: seen.append("never")).cancel()
    loop.every(1.0, lambda: seen.append(f"tick {loop.now():g}"))
    loop.run(2.0)
    assert seen == ["a", "tick 1", "b", "c", "tick 2"]
    assert loop.now() == 2.0
    with pytest.raises(ValueError, match="is over"):
        loop.at(1.0, lambda: None)


def node(layout: str = "tp1", kv_tokens: float = 40_000) -> tuple[EventLoop, Node]:
    loop = EventLoop()
    facts = msgspec.structs.replace(cpu_facts(), kv_tokens_per_device=kv_tokens)
    made = Node(loop, facts, 2, config=config())
    shape = Shape(int(layout[2:]))
    made.serve(made.open(PlacedShape(shape, tuple(range(shape.tp)))))
    return loop, made


def test_one_request_takes_what_the_cost_model_says() -> None:
    loop, one = node()
    request = SimRequest("r", 0.0, prompt=200, output=50)
    one.submit(request)
    loop.run(60)
    model = StepModel(cpu_facts().domain(1, 1, None))
    assert request.ttft_s == pytest.approx(model.prompt(200, 512).total_s, rel=0.02)
    assert request.tpot_s == pytest.approx(model.decode(1, 225).total_s, rel=0.02)


def test_a_batch_shares_its_steps() -> None:
    loop, one = node()
    requests = [SimRequest(f"r{i}", 0.0, prompt=20, output=100) for i in range(16)]
    for request in requests:
        one.submit(request)
    loop.run(60)
    model = StepModel(cpu_facts().domain(1, 1, None))
    tpot = sum(request.tpot_s for request in requests) / 16
    assert tpot == pytest.approx(model.decode(16, 70).total_s, rel=0.1)


def test_throughput_agrees_with_the_mean_field_of_the_cost_model() -> None:
    """At half of the capacity TPOT is that of the batch at which Little's law holds."""
    profile = Profile(100, 155, 60, 87)
    replica = Replica(
        StepModel(cpu_facts().domain(1, 1, None)), profile.workload(), cpu_facts().limits, 40_000
    )
    rate = 0.5 * replica.capacity()
    pool = SimPool(cpu_setup("tp1", mode="static", noise=0.0))
    outcome = pool.run(traffic(f"poisson:{rate}", 400, prompt=(100, 180), output=(60, 100)), 400)
    late = [r for r in outcome.finished if r.arrival_s > 60 and r.output > 8]
    tpot = sum(r.tpot_s for r in late) / len(late)
    assert tpot == pytest.approx(replica.steady(rate).tpot_s, rel=0.25)
    assert len(outcome.unfinished) < 20


def test_little_memory_preempts_and_loses_nobody() -> None:
    loop, small = node(kv_tokens=2500)
    requests = [SimRequest(f"r{i}", 0.0, prompt=100, output=200 + 10 * i) for i in range(24)]
    finished: list[SimRequest] = []
    small.on_finish = lambda domain, request: finished.append(request)
    for request in requests:
        small.submit(request)
    loop.run(600)
    assert small.totals.preemptions > 0
    assert len(finished) == 24
    assert all(request.generated == request.output for request in requests)
    (domain,) = small.domains.values()
    assert domain.used == pytest.approx(0.0)
    assert domain.running == 0


def test_a_cut_run_ends_at_the_next_step() -> None:
    loop, one = node()
    one.submit(SimRequest("long", 0.0, prompt=10, output=2000))
    loop.run(1.0)
    late = SimRequest("late", 1.0, prompt=10, output=5)
    one.submit(late)
    loop.run(3.0)
    assert late.ttft_s < 0.06, "it waits for a step, not for a run of them"


def command(pool: SimPool, *, layout: str, forced: bool = False) -> None:
    pool.switcher.send(SetLayout(f"to {layout}", layout, ramp=True, forced=forced))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_switch_under_load_keeps_every_token(shared_memory: bool) -> None:
    facts = cpu_facts()
    device = msgspec.structs.replace(facts.device, shared_memory=shared_memory)
    setup = cpu_setup("tp1", facts=msgspec.structs.replace(facts, device=device), mode="static")
    pool = SimPool(setup)
    layouts = ["tp2", "tp1+tp1", "tp1", "tp2", "tp1"]
    moves = [(4.0 + 3 * i, partial(command, layout=layout, forced=True)) for i, layout in enumerate(layouts)]
    requests = traffic("poisson:3", 20)
    outcome = pool.run(requests, 120, at=moves)
    assert [s.outcome for s in outcome.switches] == ["committed"] * 5
    assert len(outcome.finished) == len(requests)
    assert all(r.generated == r.output for r in requests)
    assert max(len(r.degrees) for r in requests) > 1
    recomputed = sum(r.recomputes for r in requests)
    assert (recomputed == 0) == shared_memory, "pages stay where they are on one memory"
    assert all(domain.used == pytest.approx(0) for domain in pool.node.domains.values())


def test_a_cancelled_ramp_leaves_the_old_layout() -> None:
    pool = SimPool(cpu_setup("tp1", mode="static"))
    moves = [
        (2.0, partial(command, layout="tp2")),
        (4.0, lambda p: p.switcher.send(CancelSwitch("to tp2"))),
    ]
    requests = traffic("poisson:3", 10)
    outcome = pool.run(requests, 60, at=moves)
    assert [(s.to_layout, s.outcome) for s in outcome.switches] == [("tp2", "cancelled")]
    assert str(pool.switcher.observed) == "tp1"
    assert len(outcome.finished) == len(requests)
    assert any(2 in r.degrees for r in requests)
