"""Plans in windows, and day and night with spikes."""

from __future__ import annotations

import numpy as np
import pytest

from dynamictp.bench.workload.arrivals import RateCurve, day_night, with_spikes
from dynamictp.bench.workload.classes import MIXES, Workload
from dynamictp.bench.workload.plan import make_plan, plan_windows
from dynamictp.bench.workload.spec import OpenArrivals, parse_arrivals
from dynamictp.errors import ConfigError


def test_a_workload_of_one_window_is_its_plan() -> None:
    workload = Workload(arrivals="poisson:3", duration_s=60)
    assert list(plan_windows(workload, 60)) == [make_plan(workload)]


def test_a_longer_one_has_the_same_rates_and_classes() -> None:
    workload = Workload(MIXES["peak-giants"], "steps:0=2,200=20,300=2", 600, seed=1)
    plans = list(plan_windows(workload, 100))
    assert len(plans) == 6
    requests = [request for plan in plans for request in plan.requests]
    times = [request.intended_s for request in requests]
    assert times == sorted(times)
    assert len({request.name for request in requests}) == len(requests)
    counts = np.histogram(times, bins=6, range=(0, 600))[0]
    assert counts[2] == pytest.approx(2000, rel=0.1)
    assert counts[[0, 1, 3, 4, 5]] == pytest.approx(200, rel=0.3)
    giants = [request.intended_s for request in requests if request.traffic_class == "giant"]
    assert giants
    assert all(200 <= t < 300 for t in giants), "the peak is that of the whole workload"
    assert plans == list(plan_windows(workload, 100)), "same seed, same plans"


def test_windows_without_requests_and_closed_loops() -> None:
    quiet = Workload(arrivals="steps:0=0,100=5", duration_s=200)
    (only,) = plan_windows(quiet, 100)
    assert only.requests[0].intended_s >= 100
    with pytest.raises(ConfigError, match="closed loop"):
        list(plan_windows(Workload(arrivals="closed:users=2"), 10))


def test_rates_of_many_times_are_those_of_each() -> None:
    curve = RateCurve((0.0, 10.0, 10.0, 30.0), (1.0, 2.0, 8.0, 0.0))
    times = [0.0, 3.3, 10.0, 11.5, 29.999, 30.0]
    assert curve.rates_at(times).tolist() == [curve.rate_at(t) for t in times]


def test_a_part_of_a_curve_has_its_rates() -> None:
    curve = RateCurve((0.0, 10.0, 10.0, 30.0), (1.0, 2.0, 8.0, 0.0))
    part = curve.part(5.0, 20.0)
    assert part is not None
    assert part.duration_s == 15.0
    for t in (0.0, 2.0, 5.0, 12.0):
        assert part.rate_at(t) == pytest.approx(curve.rate_at(5.0 + t))
    whole = sum(p.expected for start in (0, 10, 20) if (p := curve.part(start, start + 10)))
    assert whole == pytest.approx(curve.expected)


def test_spikes_stand_on_the_curve_and_fade() -> None:
    base = day_night(4.0, 0.5, 200.0, 400.0)
    curve = with_spikes(base, 20.0, 100.0, 10.0)
    for start in (50, 150, 250, 350):
        assert curve.rate_at(start) == pytest.approx(20.0)
        assert curve.rate_at(start + 10) == pytest.approx(base.rate_at(start + 10))
        assert curve.rate_at(start + 5) == pytest.approx((20.0 + base.rate_at(start + 10)) / 2)
        assert curve.rate_at(start - 1) == pytest.approx(base.rate_at(start - 1), rel=0.02)
    with pytest.raises(ConfigError, match="does not fit"):
        with_spikes(base, 20.0, 10.0, 20.0)
    parsed = parse_arrivals("daynight:mean=4,day=200,swing=0.5,spike=20,every=100,for=10", 400.0)
    assert isinstance(parsed, OpenArrivals)
    assert parsed.curve == curve
