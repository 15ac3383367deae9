"""Rates are what was asked for, bursts as bursty, and the inverse of the cumulated rate is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.bench.workload.arrivals import (
    RateCurve,
    constant_rate,
    day_night,
    draw,
    on_off,
    ramp,
    spikes,
    steps,
)
from dynamictp.errors import ConfigError


def times_of(
    curve: RateCurve, cv: float = 1.0, seed: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(draw(curve, cv, np.random.default_rng(seed)))


def test_without_variation_arrivals_are_even_and_the_first_is_at_once() -> None:
    assert draw(constant_rate(4.0, 1.0), 0.0, np.random.default_rng(0)) == (0.0, 0.25, 0.5, 0.75)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_coefficient_of_variation(cv: float) -> None:
    times = times_of(constant_rate(50.0, 2000.0), cv)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(100_000, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_bursty_arrivals_do_not_start_with_a_burst_on_average() -> None:
    """The first gap is a stationary one: the mean number of arrivals is right from the start."""
    counts = [len(times_of(constant_rate(5.0, 2.0), 3.0, seed)) for seed in range(3000)]
    assert np.mean(counts) == pytest.approx(10.0, rel=0.08)


def test_the_seed_decides_the_arrivals() -> None:
    curve = constant_rate(5.0, 20.0)
    assert times_of(curve, seed=3).tolist() == times_of(curve, seed=3).tolist()
    assert times_of(curve, seed=3).tolist() != times_of(curve, seed=4).tolist()


def test_bursts_have_their_rate_inside_and_the_base_rate_outside() -> None:
    curve = on_off(
        base_per_s=2.0, burst_per_s=40.0, period_s=10.0, burst_s=2.0, duration_s=1000.0, offset_s=-1.0
    )
    times = times_of(curve)
    inside = (times + 1.0) % 10.0 < 2.0
    assert inside.sum() / 200.0 == pytest.approx(40.0, rel=0.05)
    assert (~inside).sum() / 800.0 == pytest.approx(2.0, rel=0.1)


def test_no_requests_come_where_the_rate_is_zero() -> None:
    times = times_of(steps([(0.0, 0.0), (10.0, 20.0), (20.0, 0.0), (30.0, 5.0)], 40.0))
    assert times.size
    assert not np.any((times < 10) | ((times > 20) & (times < 30)))


def test_steps_ramps_spikes_and_days_have_their_rates() -> None:
    levels = steps([(0.0, 1.0), (30.0, 5.0)], 60.0)
    assert [levels.rate_at(t) for t in (0.0, 29.9, 30.0, 59.0)] == [1.0, 1.0, 5.0, 5.0]
    line = ramp([(0.0, 0.0), (10.0, 8.0)], 20.0)
    assert (line.rate_at(5.0), line.rate_at(15.0), line.expected) == (4.0, 8.0, 120.0)
    peaks = spikes(2.0, 10.0, 30.0, 5.0, 60.0)
    assert [peaks.rate_at(t) for t in (0.0, 15.0, 17.5, 20.0, 45.0)] == [2.0, 10.0, 6.0, 2.0, 10.0]
    day = day_night(4.0, 0.5, 60.0, 120.0)
    assert (day.rate_at(0.0), day.rate_at(30.0)) == (2.0, pytest.approx(6.0))
    assert day.expected == pytest.approx(480.0, rel=1e-6)


def test_a_curve_shorter_than_asked_for_repeats_and_a_longer_one_ends() -> None:
    curve = RateCurve((0.0, 10.0), (0.0, 2.0))
    twice = curve.until(15.0)
    assert (twice.duration_s, twice.rate_at(12.5), twice.expected) == (15.0, pytest.approx(0.5), 12.5)
    assert curve.until(5.0).expected == pytest.approx(2.5)
    assert curve.stretched(2.0, 3.0).expected == 15.0


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.0, 20.0)), min_size=2, max_size=8),
    st.floats(0.0, 1.0),
)
def test_the_inverse_reaches_exactly_the_requests_asked_for(
    points: list[tuple[float, float]], share: float
) -> None:
    times = (0.0, *sorted(round(t, 6) for t, _ in points), 60.0)
    rates = (1.0, *(round(r, 2) for _, r in points), 1.0)
    curve = RateCurve(times, rates)
    wanted = share * curve.expected
    (reached_s,) = curve.when(np.array([wanted]))
    assert 0.0 <= reached_s <= 60.0
    kept = [(t, r) for t, r in zip(times, rates, strict=True) if t <= reached_s]
    end = curve.rate_at(float(np.nextafter(reached_s, 0.0)))
    area = float(np.trapezoid([*(r for _, r in kept), end], [*(t for t, _ in kept), reached_s]))
    assert area == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("times", "rates"),
    [((0.0,), (1.0,)), ((1.0, 2.0), (1.0, 1.0)), ((0.0, 2.0, 1.0), (1.0,) * 3), ((0.0, 1.0), (-1.0, 2.0)),
     ((0.0, 1.0), (0.0, 0.0))],
)  # fmt: skip
def test_impossible_curves_are_refused(times: tuple[float, ...], rates: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        RateCurve(times, rates)
    with pytest.raises(ConfigError, match="burst"):
        on_off(base_per_s=1, burst_per_s=2, period_s=5, burst_s=6, duration_s=10)
