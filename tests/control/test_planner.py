"""Single decisions: each reason, each gate, on snapshots made by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from dynamictp.control.capacity import CostBook
from dynamictp.control.config import ControlConfig
from dynamictp.control.planner import decide
from dynamictp.control.state import PlannerState
from dynamictp.control.values import (
    Alarm,
    Arrivals,
    Bar,
    Decision,
    Digest,
    Outputs,
    PoolSnapshot,
    Reason,
    Running,
    StepSample,
    SwitchView,
    Waiting,
)
from tests.control.pools import CPU_LEGAL, CPU_SLO, GPU_LEGAL, config, cpu_facts, gpu_facts

GOOD = Digest(200, 0.1, 0.2, 0.3)
BAD = Digest(200, 0.5, 0.9, 1.4)


def snapshot(time_s: float, rate: float, layout: str = "tp1", **values: Any) -> PoolSnapshot:
    """Steady arrivals of chat requests on two cores."""
    defaults: dict[str, Any] = {
        "devices_total": 2, "devices_available": 2, "legal": CPU_LEGAL,
        "arrivals_2s": Arrivals(2.0, round(2 * rate), 100.0, 150.0),
        "arrivals_10s": Arrivals(10.0, round(10 * rate), 100.0, 150.0),
        "outputs": Outputs(50, 60.0, 100.0), "running": Running(2, 130.0, 30.0), "ttft": GOOD, "tpot": GOOD,
    }  # fmt: skip
    return PoolSnapshot(time_s, layout, **{**defaults, **values})


class Planner:
    """A planner that is shown snapshots one after the other."""

    def __init__(self, parameters: ControlConfig | None = None, *, gpu: bool = False) -> None:
        self.config = parameters or config()
        self.cost = CostBook(gpu_facts() if gpu else cpu_facts())
        self.state = PlannerState()

    def see(self, *snapshots: PoolSnapshot) -> Decision:
        """Decide on each; the last decision."""
        return self.all(*snapshots)[-1]

    def all(self, *snapshots: PoolSnapshot) -> list[Decision]:
        """Decide on each; all decisions."""
        decisions = []
        for one in snapshots:
            decision, self.state = decide(one, self.state, self.config, self.cost)
            decisions.append(decision)
        return decisions


def steady(until_s: float, rate: float, layout: str = "tp1", **values: Any) -> Iterable[PoolSnapshot]:
    return [snapshot(0.5 * tick, rate, layout, **values) for tick in range(int(2 * until_s))]


def calm(rate: float = 1.5, layout: str = "tp1", **values: Any) -> Planner:
    """A planner after a quiet minute."""
    planner = Planner()
    assert planner.see(*steady(60, rate, layout, **values)).target is None
    return planner


def test_moderate_load_is_left_alone() -> None:
    planner = Planner()
    decision = planner.see(*steady(120, 1.5))
    assert (decision.target, decision.reason, decision.devices) == (None, Reason.HOLD, 1)
    assert 0.2 < decision.figures["load"] < 0.45
    assert decision.alarms == ()


def test_a_burst_grows_at_once_and_an_overload_is_forced() -> None:
    decision = calm().see(snapshot(60, 4.0, arrivals_2s=Arrivals(2.0, 8, 100.0, 150.0)))
    assert (decision.target, decision.forced) == (None, False), "within the scatter of 1.5/s"
    decision = calm().see(snapshot(60, 8.0))
    assert (decision.target, decision.reason, decision.forced) == ("tp2", Reason.GROW_PREDICTED, True)


def test_longer_prompts_in_a_burst_count_for_more() -> None:
    short = calm().see(snapshot(60, 8.0)).figures["load"]
    long = calm().see(snapshot(60, 8.0, arrivals_2s=Arrivals(2.0, 16, 400.0, 600.0))).figures["load"]
    assert long > 1.5 * short


def test_a_backlog_grows() -> None:
    decision = calm().see(snapshot(60, 1.5, waiting=Waiting(40, 4000, 1.0, 0.4)))
    assert (decision.target, decision.reason) == ("tp2", Reason.GROW_PREDICTED)
    assert decision.figures["backlog"] == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("missed", ["ttft", "tpot"])
def test_a_missed_latency_grows_when_it_is_seen_twice(missed: str) -> None:
    planner = calm()
    first = planner.see(snapshot(60, 1.5, **{missed: BAD}))
    assert (first.target, first.reason) == (None, Reason.SUSTAIN)
    second = planner.see(snapshot(60.5, 1.5, **{missed: BAD}))
    assert (second.target, second.reason, second.forced) == ("tp2", Reason.GROW_FEEDBACK, True)
    assert second.figures["gain"] >= 0.1


def test_few_samples_say_nothing_and_p90_stands_for_p99() -> None:
    for digest in (Digest(9, 2.0, 2.0, 2.0), Digest(99, 0.1, 0.7, 3.0)):
        planner = calm()
        assert planner.see(*(snapshot(60 + i / 2, 1.5, tpot=digest) for i in range(3))).target is None


def test_waiting_requests_are_censored_samples() -> None:
    stuck = Waiting(1, 100, 30.0, 15.0)
    planner = calm()
    assert planner.see(*(snapshot(60 + i / 2, 1.5, waiting=stuck) for i in range(2))).target == "tp2"


def test_what_would_not_help_is_not_done() -> None:
    planner = calm(layout="tp2")
    missing = [snapshot(60 + i / 2, 1.5, "tp2", tpot=BAD) for i in range(4)]
    decision = planner.see(*missing)
    assert (decision.target, decision.reason) == (None, Reason.SLO_INFEASIBLE)
    assert Alarm.SLO_INFEASIBLE in decision.alarms
    decision = calm(layout="tp2").see(snapshot(60, 20.0, "tp2"))
    assert (decision.target, decision.reason) == (None, Reason.NO_GAIN)


def test_a_request_that_fits_only_wider_grows() -> None:
    decision = calm().see(snapshot(60, 1.5, waiting=Waiting(1, 7000, 0.2, 0.1, needs_devices=2)))
    assert (decision.target, decision.reason, decision.forced) == ("tp2", Reason.GROW_ONLY_WIDER, True)


def test_leased_devices_are_not_counted_and_are_asked_back() -> None:
    decision = calm(devices_available=1).see(snapshot(60, 8.0, devices_available=1))
    assert (decision.target, decision.reason, decision.reserve) == (None, Reason.NO_DEVICES, 2)


def test_a_layout_without_its_devices_is_left() -> None:
    decision = calm(layout="tp2").see(snapshot(60, 1.5, "tp2", devices_available=1))
    assert (decision.target, decision.reason) == ("tp1", Reason.DEVICES_LOST)
    barred = calm(layout="tp2").see(
        snapshot(60, 1.5, "tp2", devices_available=1, barred=(Bar("tp1", 100.0),))
    )
    assert (barred.target, barred.reason) == ("tp1", Reason.DEVICES_LOST), "a bar is no reason to keep them"


def test_a_bar_does_not_hide_that_devices_are_away() -> None:
    waiting = Waiting(1, 7000, 0.2, 0.1, needs_devices=2)
    values: dict[str, Any] = {"devices_available": 1, "barred": (Bar("tp1+tp1", 100.0),)}
    decision = calm(devices_available=1).see(snapshot(60, 1.5, waiting=waiting, **values))
    assert (decision.target, decision.reason, decision.reserve) == (None, Reason.NO_DEVICES, 2)


def test_a_barred_target_is_respected_until_the_bar_ends() -> None:
    bars = (Bar("tp2", 100.0), Bar("tp1+tp1", 100.0))
    planner = calm()
    decision = planner.see(snapshot(60, 8.0, barred=bars))
    assert (decision.target, decision.reason) == (None, Reason.BARRED)
    assert planner.see(snapshot(61, 8.0, barred=bars[:1])).target == "tp1+tp1", "the second best"
    assert planner.see(snapshot(101, 8.0, barred=bars)).target == "tp2"


def test_a_draining_domain_is_taken_back_first() -> None:
    planner = Planner(gpu=True)
    values: dict[str, Any] = {
        "devices_total": 8, "devices_available": 8, "legal": GPU_LEGAL, "outputs": Outputs(50, 200.0, 300.0),
        "arrivals_10s": Arrivals(10.0, 2, 1000.0, 2000.0), "arrivals_2s": Arrivals(2.0, 0),
    }  # fmt: skip
    planner.see(*(snapshot(i / 2, 0.2, "tp4", **values) for i in range(40)))
    values |= {"waiting": Waiting(20, 20_000, 0.5, 0.3)}
    plain = planner.see(snapshot(20, 0.2, "tp4", **values))
    assert plain.reason is Reason.GROW_PREDICTED
    revived = planner.see(snapshot(20.5, 0.2, "tp4", draining=("tp4",), **values))
    assert (revived.target, revived.reason) == ("tp4+tp4", Reason.REVIVE)


# ---------------------------------------------------------------- shrinking


def low(until_s: float, layout: str = "tp2", **values: Any) -> Iterable[PoolSnapshot]:
    return steady(until_s, 0.5, layout, **values)


def test_a_shrink_must_have_been_possible_all_the_time() -> None:
    planner = Planner()
    assert planner.see(*low(299)).reason is Reason.SUSTAIN
    planner.see(snapshot(299.5, 0.5, "tp2", tpot=BAD))
    assert planner.see(*(snapshot(300 + i / 2, 0.5, "tp2") for i in range(600))).target is None
    decision = planner.see(snapshot(600.5, 0.5, "tp2"))
    assert (decision.target, decision.reason, decision.forced) == ("tp1", Reason.SHRINK, False)


def test_load_that_the_smaller_layout_would_not_hold_keeps_the_devices() -> None:
    planner = Planner()
    decision = planner.see(*steady(700, 2.0, "tp2"))
    assert decision.figures["slow_load"] < 0.4
    assert decision.target is None, "0.24 of tp2 is 0.43 of tp1"


def test_a_regretted_shrink_makes_the_next_one_wait_longer() -> None:
    planner = Planner(config(shrink_after_s=20.0))
    assert planner.see(*low(20.5)).target == "tp1"
    grown = planner.see(snapshot(31, 9.0, last_commit_s=20.6))
    assert (grown.target, planner.state.shrink_backoff) == ("tp2", 1)
    later = [snapshot(32 + i / 2, 0.5, "tp2", last_commit_s=31.1) for i in range(200)]
    shrinks = [d.time_s for d in (planner.see(one) for one in later) if d.reason is Reason.SHRINK]
    quiet_s = shrinks[0] - 32
    assert quiet_s > 40


def test_devices_taken_away_are_no_shrink_to_regret() -> None:
    planner = Planner(config(shrink_after_s=20.0))
    planner.see(*steady(10, 0.5, "tp2"))
    lost = planner.see(snapshot(10, 0.5, "tp2", devices_available=1))
    assert (lost.target, lost.reason) == ("tp1", Reason.DEVICES_LOST)
    grown = planner.see(snapshot(21, 9.0, last_commit_s=10.1))
    assert (grown.target, planner.state.shrink_backoff) == ("tp2", 0)


def test_a_peak_keeps_a_shrink_back_once_and_not_for_ever() -> None:
    planner = Planner(config(shrink_after_s=20.0))
    planner.see(*low(10))
    held = planner.state.shrink
    assert held is not None
    planner.state = msgspec.structs.replace(planner.state, shrink=msgspec.structs.replace(held, peak=1e3))
    later = [snapshot(10 + i / 2, 0.0, "tp2") for i in range(120)]
    shrinks = [d.time_s for d in (planner.see(one) for one in later) if d.reason is Reason.SHRINK]
    assert shrinks[0] == pytest.approx(held.since_s + 2 * 20.0, abs=1.0)


def test_without_traffic_a_layout_that_holds_no_request_will_do() -> None:
    """tp1 misses the target with a single stream: one request keeps tp2, none at all does not. The slow
    average of what was there fades, and is never zero."""
    planner = Planner(config(slo={**CPU_SLO, "tpot_p99_ms": 13.0}, shrink_after_s=20.0))
    nothing = {"arrivals_2s": Arrivals(2.0), "arrivals_10s": Arrivals(10.0), "running": Running()}
    quiet = [snapshot(400 + i / 2, 0, "tp2", **nothing) for i in range(121)]
    assert not [d for d in planner.all(*steady(400, 0.5, "tp2")) if d.target]
    assert planner.see(snapshot(400, 0.5)).figures["load"] > 1e6
    ((when, target),) = [(d.time_s, d.target) for d in planner.all(*quiet) if d.target]
    assert target == "tp1"
    assert 420 < when < 450


@pytest.mark.parametrize(
    ("tpot_ms", "running", "stays"),
    [
        (13.0, Running(1, 800.0, 700.0), True),
        (13.0, Running(), False),
        (100.0, Running(1, 800.0, 700.0), False),
        (100.0, Running(60, 300.0, 200.0), True),
        (100.0, Running(8, 6000.0, 5000.0), True),
    ],
    ids=["too fast for tp1", "nobody", "fits", "too many", "too long"],
)
def test_streams_that_run_keep_the_layout_that_holds_them(
    tpot_ms: float, running: Running, stays: bool
) -> None:
    """They outlive the arrivals that they came with by far."""
    planner = Planner(config(slo={**CPU_SLO, "tpot_p99_ms": tpot_ms}, shrink_after_s=20.0))
    planner.see(*steady(10, 0.5, "tp2"))
    nothing = {"arrivals_2s": Arrivals(2.0), "arrivals_10s": Arrivals(10.0), "running": running}
    later = (snapshot(time_s, 0, "tp2", **nothing) for time_s in range(10, 1000))
    targets = {decision.target for decision in planner.all(*later)}
    assert targets == ({None} if stays else {None, "tp1"})


# ---------------------------------------------------------------- gates


def test_unforced_switches_keep_their_distance_and_forced_ones_do_not() -> None:
    planner = calm(1.0, last_commit_s=59.0)
    backlog = Waiting(18, 1800, 0.3, 0.2)
    decision = planner.see(snapshot(60, 1.0, waiting=backlog, last_commit_s=59.0))
    assert (decision.target, decision.reason, decision.wanted) == (None, Reason.MIN_INTERVAL, "tp2")
    decision = planner.see(snapshot(60.5, 8.0, last_commit_s=59.0))
    assert (decision.target, decision.forced) == ("tp2", True)


def test_the_budget_of_unforced_switches_ends_and_comes_back() -> None:
    planner = calm(1.0)
    planner.state = msgspec.structs.replace(planner.state, unforced=tuple(float(i) for i in range(10)))
    backlog = Waiting(18, 1800, 0.3, 0.2)
    decision = planner.see(snapshot(60, 1.0, waiting=backlog))
    assert (decision.target, decision.reason, decision.alarms) == (None, Reason.BUDGET, (Alarm.FLAPPING,))
    assert planner.see(snapshot(3600.5, 1.0, waiting=backlog)).target == "tp2"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"pinned": True}, Reason.PINNED),
        ({"mode": "dry-run"}, Reason.DRY_RUN),
        ({"switch": SwitchView("s1", "tp2")}, Reason.IN_FLIGHT),
    ],
)
def test_what_stands_against_a_switch_is_the_reason(values: dict[str, Any], reason: Reason) -> None:
    planner = calm()
    before = planner.state.unforced
    decision = planner.see(snapshot(60, 8.0, **values))
    assert (decision.target, decision.reason) == (None, reason)
    assert (decision.wanted, decision.wanted_reason) == ("tp2", Reason.GROW_PREDICTED)
    assert planner.state.unforced == before, "no budget is used"
    assert decision.forced == (reason is Reason.IN_FLIGHT), "the ramp under way is urgent"


def test_a_shrink_under_way_is_taken_back_when_the_devices_are_needed() -> None:
    planner = calm(1.0, layout="tp2")
    decision = planner.see(snapshot(60, 8.0, "tp2", switch=SwitchView("s1", "tp1")))
    assert (decision.target, decision.cancel) == ("tp2", True)


# ---------------------------------------------------------------- shapes, objectives, bounds


def test_two_narrow_domains_become_one_wide_one_after_half_a_minute() -> None:
    planner = Planner()
    assert planner.see(*steady(30, 3.0, "tp1+tp1")).reason is Reason.SUSTAIN
    decision = planner.see(snapshot(30, 3.0, "tp1+tp1"))
    assert (decision.target, decision.reason) == ("tp2", Reason.SIDEWAYS)
    assert decision.figures["gain"] >= 0.15


def test_a_missed_latency_moves_sideways_only_when_the_gain_has_lasted() -> None:
    """No growth: not forced, and the interval since the last commit binds it."""
    planner = calm(layout="tp1+tp1", last_commit_s=-60.0)
    missing = [
        snapshot(60 + i / 2, 1.5, "tp1+tp1", tpot=BAD, last_commit_s=59.0 if i < 61 else 85.0)
        for i in range(70)
    ]
    decisions = planner.all(*missing[:61])
    assert all(d.target is None for d in decisions[:-1])
    assert (decisions[-1].time_s, decisions[-1].target, decisions[-1].forced) == (90.0, "tp2", False)
    assert decisions[-1].reason is Reason.SIDEWAYS
    again = planner.all(*missing[61:])
    assert all(d.target is None for d in again), "a commit begins it anew"


def test_more_devices_mend_a_latency_before_another_shape_does() -> None:
    planner = Planner(gpu=True)
    values = {"legal": GPU_LEGAL, "devices_total": 8, "devices_available": 8}
    planner.see(*steady(60, 0.5, "tp2+tp2", **values))
    decision = planner.see(*(snapshot(60 + i / 2, 0.5, "tp2+tp2", tpot=BAD, **values) for i in range(2)))
    assert (decision.reason, decision.forced) == (Reason.GROW_FEEDBACK, True)
    assert decision.devices > 4


def test_objectives_choose_differently() -> None:
    fast = Planner(config(objective="latency"))
    assert fast.see(*steady(30.5, 0.5)).target == "tp2", "devices are not saved"
    frugal = Planner(config(objective="efficiency"))
    assert frugal.see(*steady(31, 0.5)).target is None


def test_bounds_are_kept() -> None:
    bounded = Planner(config(max_devices=1))
    bounded.see(*steady(60, 1.5))
    assert bounded.see(snapshot(60, 8.0)).reason is Reason.NO_GAIN
    least = Planner(config(min_devices=2, shrink_after_s=5.0))
    assert least.see(*low(60)).target is None


@pytest.mark.parametrize("rate", [0.0, 0.5, 3.0])
def test_a_layout_outside_the_bounds_is_left(rate: float) -> None:
    """Whatever the load: it was there at the start, or the bounds are new, or a device came back."""
    grown = Planner(config(min_devices=2)).see(snapshot(0, rate))
    assert (grown.target, grown.reason, grown.reserve) == ("tp2", Reason.BOUNDS, 2)
    shrunk = Planner(config(max_devices=1)).see(snapshot(0, rate, "tp2"))
    assert (shrunk.target, shrunk.reason) == ("tp1", Reason.BOUNDS)
    away = Planner(config(min_devices=2)).see(snapshot(0, rate, devices_available=1))
    assert (away.target, away.reserve) == (None, 2), "the other one is called back"
    barred = Planner(config(min_devices=2)).see(
        snapshot(0, rate, barred=(Bar("tp2", 9.0), Bar("tp1+tp1", 9.0)))
    )
    assert barred.target is None


def test_calibration_changes_the_verdict_and_pegged_is_an_alarm() -> None:
    planner = calm()
    model = planner.cost.steps(1, 1)
    slow = StepSample(1, 6 * model.decode(4, 130.0).total_s, 4, 130.0)
    decision = planner.see(snapshot(60, 1.5, steps=(slow,) * 12))
    assert decision.figures["load"] > 0.9
    assert (decision.target, decision.alarms) == ("tp2", ()), "a second of noise is no wrong description"
    decision = planner.see(snapshot(60.5, 1.5, steps=(slow,) * 19))
    assert decision.alarms == (Alarm.CALIBRATION_PEGGED,)
    assert planner.see(snapshot(61, 1.5, "tp2")).alarms == (), "tp1 does not run any more"
    honest = StepSample(1, model.decode(4, 130.0).total_s, 4, 130.0)
    for tick in range(8):
        decision = planner.see(snapshot(61.5 + tick / 2, 1.5, steps=(honest,) * 4))
    assert decision.alarms == ()


def test_steps_beside_other_domains_teach_nothing() -> None:
    planner = calm()
    model = planner.cost.steps(1, 1)
    seconds = 6 * model.decode(4, 130.0).total_s
    crowded = StepSample(1, seconds, 4, 130.0, exclusive=False)
    decision = planner.see(snapshot(60, 1.5, steps=(crowded,) * 40))
    assert (planner.state.online.ratios, decision.alarms) == ((), ())


def test_a_latency_near_its_target_that_nothing_mends_is_no_alarm_yet() -> None:
    near = Digest(200, 0.5, 0.7, 0.9)
    planner = calm(layout="tp2")
    decision = planner.see(*(snapshot(60 + i / 2, 1.5, "tp2", tpot=near) for i in range(3)))
    assert (decision.reason, decision.alarms) == (Reason.SLO_INFEASIBLE, ())


def test_no_traffic_at_all() -> None:
    planner = Planner()
    nothing = {"arrivals_2s": Arrivals(2.0), "arrivals_10s": Arrivals(10.0), "outputs": Outputs()}
    quiet = [
        snapshot(i / 2, 0, "tp2", running=Running(), ttft=Digest(), tpot=Digest(), **nothing)
        for i in range(602)
    ]
    decisions = [d for d in planner.all(*quiet) if d.target]
    assert [(d.time_s, d.target) for d in decisions] == [(300.0, "tp1")]


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="tp3"):
        Planner().see(snapshot(0, 1.0, "tp3"))
