"""The loop of the control plane over a fake engine: look, decide, act; modes, pins, parameters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from dynamictp.clock import ManualClock
from dynamictp.control.config import ControlConfig, build_control
from dynamictp.control.journal import parse_journal, replay
from dynamictp.control.reconciler import BACKOFF_S
from dynamictp.control.values import Decision, PoolSnapshot, Reason
from dynamictp.layout import LayoutSpec, place
from dynamictp.messages import RampSettings, SetLayout, SwitchStatus
from dynamictp.server import control_plane
from dynamictp.server.control_plane import ControlPlane
from tests.server.planned_stack import CONFIG, planned
from tests.server.server_stack import Stack

Say = Callable[..., None]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Have the policy say what the test wants; it has tests of its own."""
    wanted: dict[str, Any] = {"target": None}

    def decide(seen: PoolSnapshot, state: Any, config: Any, cost: Any) -> tuple[Decision, Any]:
        target = None if wanted["target"] == seen.layout else wanted["target"]
        reason = Reason.GROW_PREDICTED if target else Reason.HOLD
        return Decision(
            seen.time_s, target, reason, target or seen.layout, reason, 1,
            reserve=wanted.get("reserve", 1), forced=wanted.get("forced", False), figures={"load": 0.7},
        ), state  # fmt: skip

    monkeypatch.setattr(control_plane, "decide", decide)
    return lambda target=None, **more: wanted.update(more, target=target)


def commands(stack: Stack) -> list[SetLayout]:
    return [body for body in stack.engine.received if isinstance(body, SetLayout)]


def last_snapshot(plane: ControlPlane) -> PoolSnapshot:
    return plane.journal.last(1)[0].snapshot


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_decision_becomes_a_ramped_switch_and_is_journaled(says: Say) -> None:
    async with planned() as (stack, plane):
        says("tp2")
        await plane.tick()
        await until(lambda: stack.service.observed == "tp2")
        await plane.tick()
        (command,) = commands(stack)
        assert (command.layout, command.ramp, command.reason) == ("tp2", True, "grow_predicted")
        assert command.settings == RampSettings(observe_s=0.25)
        answer = (await stack.http.get("/admin/decisions?last=5")).json()["decisions"]
        assert [entry["target"] for entry in answer] == [None, "tp2"]
        assert answer[1]["figures"] == {"load": 0.7}
        assert time.time() - 60 < answer[1]["decided_at"] <= answer[0]["decided_at"] <= time.time()
        with_snapshots = (await stack.http.get("/admin/decisions?last=1&snapshots=1")).json()["decisions"]
        assert with_snapshots[0]["snapshot"]["layout"] == "tp2"
        switches = (await stack.http.get("/admin/switches")).json()["switches"]
        assert [(s["to"], s["reason"], s["outcome"]) for s in switches] == [
            ("tp2", "grow_predicted", "closed")
        ]
        assert switches[0]["began_at"] <= switches[0]["committed_at"] <= switches[0]["ended_at"]
        metrics = (await stack.http.get("/metrics")).text
        assert 'dtp_decisions_total{reason="grow_predicted"} 1.0' in metrics
        assert (
            'dtp_tp_switches_total{from="tp1",outcome="committed",reason="grow_predicted",to="tp2"}'
            in metrics
        )


async def test_forced_growth_skips_the_ramp(says: Say) -> None:
    async with planned() as (stack, plane):
        says("tp2", forced=True)
        await plane.tick()
        await until(lambda: commands(stack))
        assert (commands(stack)[0].forced, commands(stack)[0].ramp) == (True, False)


async def test_a_switch_that_becomes_urgent_is_commanded_again_as_forced(says: Say) -> None:
    async with planned() as (stack, plane):
        says("tp2")
        stack.engine.hold_switches = True
        await plane.tick()
        await until(lambda: commands(stack))
        says(None, forced=True)
        await plane.tick()
        await until(lambda: len(commands(stack)) == 2)
        first, second = commands(stack)
        assert (first.switch_id, first.forced) == (second.switch_id, False)
        assert (second.layout, second.forced) == ("tp2", True)
        await plane.tick()
        stack.engine.release_switches()
        await until(lambda: stack.service.observed == "tp2")
        assert len(commands(stack)) == 2


async def test_dry_run_decides_and_does_nothing(says: Say) -> None:
    async with planned("dry-run") as (stack, plane):
        says("tp2", reserve=2)
        await stack.http.post("/admin/leases", json={"devices": 1})
        for _ in range(3):
            await plane.tick()
        assert not commands(stack)
        assert len(plane.journal.last(10)) == 3
        assert stack.service.desk.pool.leases[0].state == "active"


async def test_a_pinned_layout_stays_whatever_the_planner_says(says: Say) -> None:
    async with planned() as (stack, plane):
        says("tp2")
        await stack.http.put("/admin/layout", json={"layout": "tp1+tp1", "wait": "closed"})
        await plane.tick()
        assert (await stack.http.get("/admin/layout")).json()["pinned"] is True
        assert [command.layout for command in commands(stack)] == ["tp1+tp1"]
        assert last_snapshot(plane).pinned
        await stack.http.put("/admin/layout", json={"layout": "auto"})
        await plane.tick()
        await until(lambda: stack.service.observed == "tp2")
        assert [command.reason for command in commands(stack)] == ["admin", "grow_predicted"]


async def test_a_pinned_layout_is_led_to_again_when_the_engine_lost_it(says: Say) -> None:
    async with planned() as (stack, plane):
        stack.engine.hold_switches = True
        await stack.http.put("/admin/layout", json={"layout": "tp2", "wait": "none"})
        stack.service.engine_lost()
        stack.engine._held.clear()
        await plane.tick()
        await until(lambda: len(commands(stack)) == 2)
        assert (commands(stack)[1].layout, commands(stack)[1].reason) == ("tp2", "pinned")


@pytest.mark.parametrize("committed", [False, True])
async def test_an_engine_lost_during_the_planner_s_switch_ends_in_the_last_committed_layout(
    says: Say, committed: bool
) -> None:
    """The next engine is given that layout; then the planner goes on from there, after a pause."""
    clock = ManualClock(100.0)
    async with planned(clock=clock) as (stack, plane):
        stack.engine.hold_switches = True
        says("tp2")
        await plane.tick()
        await until(lambda: commands(stack))
        (first,) = commands(stack)
        board = stack.service.switches
        if committed:
            stack.engine.link.send(SwitchStatus(first.switch_id, "tp1", "tp2", "drain", "committed"))
            await until(lambda: board.get(first.switch_id).outcome)
        stack.engine._held.clear()
        stack.service.engine_lost()
        assert stack.service.client.layout == ("tp2" if committed else "tp1")
        assert board.get(first.switch_id).outcome == ("closed" if committed else "failed")
        assert board.in_flight is None
        assert plane.reconciler.in_flight == ""
        # The fake engine stands for the next one, which begins with the layout it is given.
        stack.engine._layout = place(LayoutSpec.parse(stack.service.client.layout), 2, ())
        stack.engine.hold_switches = False
        stack.engine.link.send(stack.engine.snapshot())
        await until(lambda: stack.service.observed == stack.service.client.layout)
        clock.advance(BACKOFF_S)
        await plane.tick()
        await until(lambda: stack.service.observed == "tp2")
        assert len(commands(stack)) == (1 if committed else 2)
        assert len({command.switch_id for command in commands(stack)}) == len(commands(stack))


async def test_the_loop_goes_on_while_the_engine_is_away(says: Say) -> None:
    async with planned() as (stack, plane):
        says("tp2")
        stack.service.client.detach()
        stack.service.engine_lost()
        for _ in range(3):
            assert await plane.tick() is None
        assert commands(stack) == []


async def test_a_switch_taken_back_by_hand_is_not_begun_again(says: Say) -> None:
    async with planned() as (stack, plane):
        stack.engine.hold_switches = True
        switch = (await stack.http.put("/admin/layout", json={"layout": "tp2", "wait": "none"})).json()
        await stack.http.delete(f"/admin/switches/{switch['switch']['id']}")
        await plane.tick()
        await asyncio.sleep(0.01)
        assert len(commands(stack)) == 1
        assert stack.service.switches.pinned


async def test_a_rolled_back_target_is_barred_and_the_planner_sees_it(says: Say) -> None:
    async with planned() as (stack, plane):
        says("tp2")
        stack.engine.hold_switches = True
        await plane.tick()
        await until(lambda: commands(stack))
        switch_id = plane.reconciler.in_flight
        stack.engine.link.send(
            SwitchStatus(switch_id, "tp1", "tp2", "rollback", "rolled_back", error="slower")
        )
        await until(plane.reconciler.bars)
        await plane.tick()
        assert [bar.layout for bar in last_snapshot(plane).barred] == ["tp2"]
        assert len(commands(stack)) == 1
        shown = (await stack.http.get("/admin/layout")).json()["barred"]
        assert (shown[0]["layout"], 50 < shown[0]["for_s"] <= 60) == ("tp2", True)


async def test_a_ramp_ordered_by_hand_is_a_ramp_at_every_try(says: Say) -> None:
    clock = ManualClock(100.0)
    async with planned(clock=clock) as (stack, plane):
        stack.engine.hold_switches = True
        order = {"layout": "tp2", "wait": "none", "ramp": True, "drain_deadline_s": 7}
        await stack.http.put("/admin/layout", json=order)
        for tries, bar_s in ((1, 60.0), (2, 120.0), (3, 240.0)):
            await plane.tick()
            while len(commands(stack)) < tries:  # noqa: ASYNC110
                await asyncio.sleep(0)
            again = commands(stack)[-1]
            assert (again.layout, again.ramp, again.drain_deadline_s) == ("tp2", True, 7.0)
            assert again.settings == RampSettings(observe_s=0.25)
            stack.engine.link.send(
                SwitchStatus(again.switch_id, "tp1", "tp2", "rollback", "rolled_back", error="slower")
            )
            await until(plane.reconciler.bars)
            (bar,) = plane.reconciler.bars()
            assert bar.until_s - clock.now() == bar_s
            clock.advance(bar_s - 1.0)
            await plane.tick()
            await asyncio.sleep(0.01)
            assert len(commands(stack)) == tries
            clock.advance(1.0)


async def test_a_ramp_ordered_by_hand_goes_by_the_parameters_in_force() -> None:
    async with planned() as (stack, _):
        await stack.http.put("/admin/config", json={"ramp_observe_s": 1.5, "ramp_gate_samples": 3})
        for order in ({"layout": "tp2", "ramp": True}, {"layout": "tp1"}):
            await stack.http.put("/admin/layout", json=order)
        assert [command.settings for command in commands(stack)] == [
            RampSettings(observe_s=1.5, min_finished=3),
            None,
        ]


async def test_what_the_planner_needs_is_called_back_from_leases(says: Say) -> None:
    # The next turn is due in a minute: the returned device alone must bring the decision about.
    async with planned(config=ControlConfig(interval_s=60)) as (stack, plane):
        await stack.http.post("/admin/leases", json={"devices": 1})
        says("tp2", reserve=2)
        await plane.tick()
        assert last_snapshot(plane).devices_available == 1
        (lease,) = stack.service.desk.pool.leases
        assert (lease.state, lease.reason) == ("revoking", "the planner wants tp2 (grow_predicted)")
        await plane.tick()
        assert not commands(stack)
        running = asyncio.create_task(plane.run())
        decided = len(plane.journal.last(100))
        await until(lambda: len(plane.journal.last(100)) > decided)
        await stack.http.delete(f"/admin/leases/{lease.id}")
        await until(lambda: commands(stack))
        running.cancel()


async def test_a_decision_that_fails_does_not_stop_the_loop(
    says: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with planned() as (_, plane):
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            ticks += 1
            if ticks == 1:
                raise ValueError("broken")

        monkeypatch.setattr(plane, "tick", tick)
        plane.reload(build_control({"shrink_after_s": 20}))
        running = asyncio.create_task(plane.run())
        while ticks < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        running.cancel()


async def test_the_real_planner_runs_on_what_the_server_sees() -> None:
    async with planned() as (stack, plane):
        await stack.complete(max_tokens=12)
        stack.engine.hold_tokens = True
        waiting = [asyncio.create_task(stack.complete(max_tokens=4)) for _ in range(3)]
        await until(lambda: stack.service.client.live == 3)
        decision = await plane.tick()
        assert decision is not None
        seen = last_snapshot(plane)
        assert (seen.layout, seen.legal, seen.devices_total) == ("tp1", ("tp1", "tp2", "tp1+tp1"), 2)
        assert (seen.arrivals_10s.requests, seen.arrivals_10s.prompt_tokens_mean) == (4, 2.0)
        assert (seen.outputs.requests, seen.outputs.tokens_mean) == (1, 12.0)
        assert (seen.ttft.count, seen.tpot.count, seen.waiting.worst_ttft_ratio > 0) == (1, 1, True)
        stack.engine.hold_tokens = False
        stack.engine.arrived()
        await asyncio.gather(*waiting)


async def test_the_real_planner_spans_a_pool_of_many_devices_and_takes_any_layout_set_by_hand() -> None:
    async with planned(devices=16, degrees=(1, 2, 3, 4, 5, 6, 7, 8)) as (stack, plane):
        assert await plane.tick() is not None
        listed = last_snapshot(plane).legal
        assert {LayoutSpec.parse(text).devices for text in listed} == set(range(1, 17))
        odd = "tp8+tp5+tp2+tp1"
        assert odd not in listed
        for layout in ("tp8+tp8", odd):
            answer = await stack.http.put("/admin/layout", json={"layout": layout, "wait": "closed"})
            assert answer.status_code == 200
            decision = await plane.tick()
            assert decision is not None
            assert decision.reason is Reason.PINNED or decision.target is None
            assert last_snapshot(plane).layout == layout


async def test_a_pinned_layout_with_the_models_name_is_led_to_once() -> None:
    async with planned() as (stack, plane):
        answer = await stack.http.put("/admin/layout", json={"layout": "tiny:tp2", "wait": "closed"})
        assert answer.json()["switch"]["to"] == "tp2"
        for _ in range(3):
            await plane.tick()
        assert (await stack.http.get("/admin/layout")).json()["target"] == "tp2"
        assert len((await stack.http.get("/admin/switches")).json()["switches"]) == 1


async def test_parameters_can_be_replaced_while_it_runs() -> None:
    async with planned() as (stack, plane):
        answer = await stack.http.put(
            "/admin/config", json={"shrink_after_s": 20, "slo": {"tpot_p99_ms": 50}}
        )
        assert answer.status_code == 200
        assert (plane.config.shrink_after_s, plane.config.slo.tpot_p99_ms) == (20, 50)
        assert plane.config.slo.ttft_p99_s == 2.0
        assert plane.config.ramp_observe_s == 0.25
        shown = (await stack.http.get("/admin/config")).json()["config"]
        assert shown["slo"]["tpot_p99_ms"] == 50
        for wrong, name in (
            ({"interval_s": 1}, "interval_s"),
            ({"no_such": 1}, "no_such"),
            ({"shrink_load": 0.9}, "shrink_load"),
            ({"shrink_after_s": None}, "shrink_after_s: expected a value"),
            ({"slo": None}, "slo: expected a value"),
            ({"slo": {"tpot_p99_ms": None}}, "slo.tpot_p99_ms: expected a value"),
            ({"max_devices": 3}, "max_devices 3 is more than the pool has: 2"),
            ({"min_devices": 3}, "min_devices 3 is more than the pool has: 2"),
        ):
            refused = await stack.http.put("/admin/config", json=wrong)
            assert refused.status_code == 400
            assert name in refused.json()["error"]["message"]
        assert plane.config.shrink_load == CONFIG.shrink_load
        assert plane.config.max_devices == CONFIG.max_devices
        assert (await stack.http.put("/admin/config", json={"max_devices": 2})).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/history"),
        ("GET", "/admin/journal"),
        ("GET", "/admin/decisions"),
        ("GET", "/admin/config"),
        ("GET", "/admin/layout"),
        ("GET", "/admin/leases"),
        ("GET", "/admin/switches"),
        ("GET", "/admin/switches/s1"),
        ("PUT", "/admin/layout"),
    ],
)
async def test_a_parameter_of_the_query_that_means_nothing_is_refused(method: str, path: str) -> None:
    async with planned() as (stack, _):
        refused = await stack.http.request(method, f"{path}?wait=closed", json={"layout": "tp2"})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("wait", "unknown_field")
        assert stack.service.observed == "tp1"


async def test_the_journal_replays_over_a_reload_of_parameters() -> None:
    async with planned() as (stack, plane):
        await stack.complete(max_tokens=12)
        await plane.tick()
        await stack.http.put("/admin/config", json={"target_utilisation": 0.6})
        await plane.tick()
        text = (await stack.http.get("/admin/journal")).content
        lines = list(parse_journal(text.splitlines(keepends=True)))
        assert [type(line).__name__ for line in lines] == ["Head", "Entry", "Head", "Entry"]
        assert all(recorded == again for recorded, again in replay(lines))


async def test_without_a_planner_there_is_nothing_to_ask(stack: Stack) -> None:
    for path in ("/admin/decisions", "/admin/config"):
        answer = await stack.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_planner")
    async with planned() as (other, _):
        assert (await other.http.get("/admin/decisions?last=x")).status_code == 400
