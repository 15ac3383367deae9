"""The planner on virtual time: whole hours of traffic against what must hold (C5, H1, H2).

Real time is not measured anywhere; every run is deterministic.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import msgspec
import pytest

from dynamictp.bench.workload.classes import Workload
from dynamictp.bench.workload.plan import make_plan
from dynamictp.control.config import build_control
from dynamictp.control.values import Alarm, Reason
from dynamictp.layout import LayoutSpec
from dynamictp.sim.pool import PoolOutcome, SimPool
from dynamictp.sim.requests import requests_of
from dynamictp.sim.values import Faults
from tests.control.pools import (
    config,
    cpu_facts,
    cpu_setup,
    gpu_setup,
    simulate,
    traffic,
)

HOUR_S = 3600.0


def moves(outcome: PoolOutcome) -> list[tuple[str, str]]:
    return [(switch.to_layout, switch.outcome) for switch in outcome.switches]


def all_served(outcome: PoolOutcome) -> None:
    """Nobody was lost: whoever is unfinished came in the last seconds."""
    late = [r for r in outcome.unfinished if r.arrival_s < outcome.duration_s - 30]
    assert not late


@cache
def square_wave() -> PoolOutcome:
    """tp1 holds 1/s and not 8/s, tp2 holds both."""
    setup = cpu_setup("tp1", config=config(shrink_after_s=60))
    return simulate(setup, traffic("steps:0=1,120=8,240=1", 720), 720)


@pytest.mark.parametrize(
    ("before", "after", "lengths", "seconds"),
    [
        (4, 25, ((40, 60), (12, 20)), 1.0),
        (0.5, 40, ((40, 60), (12, 20)), 1.0),
        # With few requests a second, chance and a step look alike for a second.
        (1, 8, ((100, 200), (60, 120)), 2.0),
    ],
)
def test_growth_is_decided_within_a_second_of_the_step_that_needs_it(
    before: float, after: float, lengths: tuple[tuple[float, float], ...], seconds: float
) -> None:
    prompt, output = lengths
    for seed in range(4):
        requests = traffic(f"steps:0={before},60={after}", 70, prompt=prompt, output=output, seed=seed)
        outcome = simulate(cpu_setup("tp1"), requests, 70)
        grown = next(d for d in outcome.decisions if d.target)
        assert 60 < grown.time_s <= 60 + seconds
        assert (grown.target, grown.reason) == ("tp2", Reason.GROW_PREDICTED)
        first = next(r for r in outcome.finished if 2 in r.degrees)
        assert first.arrival_s <= grown.time_s + 2.0, "decision to first request on the new domain"


def test_a_square_wave_grows_once_and_shrinks_once() -> None:
    outcome = square_wave()
    assert moves(outcome) == [("tp2", "committed"), ("tp1", "committed")]
    shrunk = outcome.switches[1]
    assert shrunk.began_s >= 240 + 60, "low load for shrink_after_s"
    all_served(outcome)


def test_the_square_wave_is_served_about_as_well_as_by_two_devices_for_less() -> None:
    requests = traffic("steps:0=1,120=8,240=1", 720)
    wide = simulate(cpu_setup("tp2", mode="static"), requests, 720)
    dynamic, slo = square_wave(), config()
    for since, until in ((0, 120), (120, 240), (240, 720)):
        assert dynamic.goodput(slo, since, until) >= 0.95 * wide.goodput(slo, since, until)
    assert dynamic.device_s < 0.75 * wide.device_s


def test_a_fast_square_wave_does_not_flap() -> None:
    requests = traffic("onoff:base=0.8,burst=6,every=120,for=40,offset=60", 700)
    outcome = simulate(cpu_setup("tp1"), requests, 700)
    assert moves(outcome) == [("tp2", "committed")]


@pytest.mark.parametrize(
    ("arrivals", "layout"),
    [
        pytest.param("poisson:1.2", "tp1", marks=pytest.mark.soak),
        ("poisson:0.9", "tp1"),
        pytest.param("gamma:1.2,cv=1.2", "tp1", marks=pytest.mark.soak),
        pytest.param("poisson:3", "tp2", marks=pytest.mark.soak),
    ],
)
def test_a_noisy_flat_hour_moves_once_at_most(arrivals: str, layout: str) -> None:
    outcome = simulate(cpu_setup(layout), traffic(arrivals, HOUR_S), HOUR_S)
    assert len(outcome.switches) <= 1
    all_served(outcome)


def test_a_ramp_is_followed_before_it_hurts() -> None:
    setup = cpu_setup("tp1", config=config(shrink_after_s=60))
    outcome = simulate(setup, traffic("ramp:0=0.5,240=6,300=6,420=0.5", 600), 600)
    assert moves(outcome) == [("tp2", "committed"), ("tp1", "committed")]
    assert outcome.goodput(config()) > 0.99


def test_a_single_spike_costs_one_growth_and_one_shrink() -> None:
    outcome = simulate(cpu_setup("tp1"), traffic("steps:0=1,120=12,130=1", 600), 600)
    assert moves(outcome) == [("tp2", "committed"), ("tp1", "committed")]
    all_served(outcome)


def test_day_and_night() -> None:
    """A day of twenty minutes: two devices by day, one by night, a switch each way."""
    setup = cpu_setup("tp1", config=config(shrink_after_s=100))
    outcome = simulate(setup, traffic("daynight:mean=2.4,day=1200,swing=0.9", 1200), 1200)
    assert moves(outcome) == [("tp2", "committed"), ("tp1", "committed")]
    assert outcome.layout_at(600) == "tp2"
    assert outcome.goodput(config()) > 0.995
    assert outcome.device_s < 0.9 * 2 * 1200


def test_hovering_at_the_crossing_of_two_shapes() -> None:
    """Between one wide domain (sooner when quiet) and two narrow ones (more throughput), load to and fro."""
    setup = gpu_setup("tp8", config=build_control({"min_devices": 8}))
    requests = traffic(
        "daynight:mean=3.2,day=240,swing=0.5", 720, prompt=(1000, 2000), output=(200, 400), scale=1.0
    )
    outcome = simulate(setup, requests, 720)
    assert outcome.switches_per_hour(forced=False) <= 10
    assert len(outcome.switches) <= 3
    sideways = [d for d in outcome.decisions if d.target and d.reason is Reason.SIDEWAYS]
    assert all(d.figures["gain"] >= 0.15 for d in sideways if not d.forced)


def test_an_overload_after_a_growth_does_not_swing_between_two_shapes() -> None:
    """Whatever is missed meanwhile: a shape must be better for half a minute since the last commit."""
    requests = traffic("steps:0=0.5,60=9", 200, prompt=(1000, 2000), output=(200, 400), seed=0)
    outcome = simulate(gpu_setup("tp4"), requests, 200)
    assert moves(outcome)[0] == ("tp8", "committed")
    assert len(outcome.switches) <= 2
    assert all(
        not move.forced and move.began_s >= 30 + (last.committed_s or 0)
        for last, move in pairwise(outcome.switches)
    )


@pytest.mark.parametrize("slo", [{"tpot_p99_ms": 1.0}, {"ttft_p99_s": 0.002}])
def test_an_unreachable_target_grows_only_for_a_gain_and_raises_an_alarm(slo: dict[str, float]) -> None:
    outcome = simulate(cpu_setup("tp1", config=config(slo=slo)), traffic("poisson:2", 400), 400)
    grown = [d for d in outcome.decisions if d.target]
    assert all(d.figures["gain"] >= 0.1 for d in grown)
    assert len(grown) <= 1
    assert Alarm.SLO_INFEASIBLE in outcome.alarms
    assert outcome.decisions[-1].reason is Reason.SLO_INFEASIBLE


def test_an_overload_in_which_nothing_finishes_is_seen() -> None:
    outcome = simulate(cpu_setup("tp1"), traffic("poisson:12", 120, output=(2000, 2400)), 120)
    assert not [r for r in outcome.finished if r.arrival_s > 10]
    grown = next(d for d in outcome.decisions if d.target == "tp2")
    assert grown.time_s < 5
    assert outcome.switches_per_hour(forced=False) <= 1 * 3600 / 120
    assert outcome.decisions[-1].figures["ttft_ratio"] > 1, "by the age of those who wait"
    assert Alarm.SLO_INFEASIBLE in outcome.alarms


@pytest.mark.parametrize(
    ("replay", "scale"),
    [("replay:azure-conv,keep=0.6", 0.1), ("replay:azure-code,keep=0.5", 0.1)],
)
def test_recorded_arrivals(replay: str, scale: float) -> None:
    """Ten minutes of each trace, lengths scaled to the machine."""
    requests = requests_of(make_plan(Workload(arrivals=replay, duration_s=600, scale=scale)))
    outcome = simulate(cpu_setup("tp1"), requests, 600)
    assert len([switch for switch in outcome.switches if not switch.forced]) <= 2
    assert len(outcome.switches) <= 3
    all_served(outcome)


def test_eight_devices_follow_a_day() -> None:
    """Many legal layouts: fewest devices that hold the target, without a zigzag."""
    requests = traffic(
        "daynight:mean=1.2,day=1200,swing=0.9", 1200, prompt=(800, 1600), output=(150, 300), seed=3
    )
    parameters = build_control({"drain_deadline_s": 5, "shrink_after_s": 150})
    outcome = simulate(gpu_setup("tp2", config=parameters), requests, 1200)
    assert outcome.layout_at(0) == "tp2"
    assert outcome.goodput(build_control({})) > 0.97
    assert outcome.device_s < 0.8 * 8 * 1200
    assert len(outcome.switches) <= 8
    devices = [LayoutSpec.parse(layout).devices for _, layout in outcome.timeline]
    assert max(devices) >= 6
    assert devices[-1] < max(devices)
    all_served(outcome)


# ---------------------------------------------------------------- revive, faults, wrong models


def test_a_draining_domain_is_revived() -> None:
    """Load comes back while the domains of the wider layout still drain."""
    values = {"drain_deadline_s": 60, "shrink_after_s": 10, "sideways_gain": 10, "min_devices": 4}
    parameters = build_control(values)
    requests = traffic("steps:0=0.4,14=8,22=0.2", 60, prompt=(800, 1600), output=(600, 900), seed=2)
    outcome = simulate(gpu_setup("tp4+tp4", config=parameters), requests, 140)
    assert [switch.reason for switch in outcome.switches[:2]] == [Reason.SHRINK, Reason.REVIVE]
    assert outcome.switches[1].revived >= 1
    assert outcome.switches[1].committed_s is not None
    all_served(outcome)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_failing_new_domain_is_rolled_back_with_no_failed_request(hidden: bool) -> None:
    """By the shadow probe, or by the first step of a request where the probe did not notice."""
    setup = cpu_setup("tp1", faults=Faults(failing=frozenset({"tp2"}), hidden=hidden))
    requests = traffic("ramp:0=1,40=1,100=3.8", 120, seed=4)
    outcome = simulate(setup, requests, 300)
    first = outcome.switches[0]
    assert (first.to_layout, first.outcome, first.forced) == ("tp2", "rolled_back", False)
    assert outcome.layout_at(290) != "tp2"
    assert len(outcome.finished) == len(requests)
    assert any(r.recomputes for r in outcome.finished) == hidden
    barred = [d for d in outcome.decisions if first.began_s + 5 < d.time_s < first.began_s + 55 and d.target]
    assert all(d.target != "tp2" for d in barred), "barred for a minute"


@pytest.mark.parametrize(("rate", "hidden", "most"), [(8.5, True, 90), (40, False, 0)])
def test_a_slow_new_domain_is_rolled_back_at_the_first_step(rate: float, hidden: bool, most: int) -> None:
    """Ten times too slow: by the shadow probe, or by the latency gate of the ramp's first step."""
    setup = cpu_setup("tp1", faults=Faults(slow={"tp2": 10.0}, hidden=hidden))
    parameters = msgspec.structs.replace(setup.config, ramp_observe_s=45.0)
    requests = traffic(f"steps:0=4,60={rate}", 120, prompt=(40, 60), output=(12, 20), seed=5)
    outcome = simulate(msgspec.structs.replace(setup, config=parameters), requests, 260)
    first = outcome.switches[0]
    assert (first.to_layout, first.outcome) == ("tp2", "rolled_back")
    assert len(outcome.finished) == len(requests)
    others = [switch.began_s for switch in outcome.switches[1:] if switch.to_layout == "tp2"]
    assert all(began >= first.began_s + 60 for began in others), "barred for a minute"
    on_it = [r for r in outcome.finished if 2 in r.degrees and r.arrival_s < first.began_s + 60]
    assert len(on_it) <= most


def test_the_online_calibration_finds_a_model_that_is_wrong() -> None:
    """The device is 1.8 times slower than its data sheet says: growth comes at its real capacity."""
    honest = cpu_setup("tp1", facts=cpu_facts(slower=1.8))
    misled = msgspec.structs.replace(honest, believed=cpu_facts())
    requests = traffic("steps:0=0.5,60=1.8", 180)
    both = [simulate(setup, requests, 180) for setup in (honest, misled)]
    grown = [next(s.began_s for s in outcome.switches) for outcome in both]
    assert grown[1] == pytest.approx(grown[0], abs=10)
    capacities = [outcome.decisions[100].figures["capacity"] for outcome in both]
    assert capacities[1] == pytest.approx(capacities[0], rel=0.15)


def test_dry_run_and_static_leave_the_layout_alone() -> None:
    requests = traffic("steps:0=1,30=8", 90)
    dry = simulate(cpu_setup("tp1", mode="dry-run"), requests, 90)
    assert not dry.switches
    assert {d.wanted for d in dry.decisions} >= {"tp1", "tp2"}
    static = simulate(cpu_setup("tp1", mode="static"), requests, 90)
    assert not static.decisions


def test_a_lease_is_not_used_and_is_asked_back() -> None:
    """One of two devices is away until it is asked for."""
    pool = SimPool(cpu_setup("tp1"))
    pool.available = 1

    def hand_back(pool: SimPool) -> None:
        pool.available = 2

    outcome = pool.run(traffic("steps:0=1,60=8", 120), 120, at=[(66.0, hand_back)])
    before = [d for d in outcome.decisions if 61.5 < d.time_s < 66]
    assert all(d.target is None and d.reserve == 2 for d in before)
    assert outcome.switches[0].began_s == pytest.approx(66.0, abs=0.6)
