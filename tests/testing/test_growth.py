"""What the soak calls growth."""

from __future__ import annotations

import random

import pytest

from dynamictp.testing.soak.growth import Bound, slope, trends

BOUNDS = {"MB": Bound(4.0, 0.02), "threads": Bound(0.5)}


def samples(*values: float, name: str = "server: MB") -> list[tuple[float, dict[str, float]]]:
    return [(5.0 * number, {name: value}) for number, value in enumerate(values)]


def test_the_slope_is_that_of_most_pairs() -> None:
    line = [(float(x), 3.0 + 0.5 * x) for x in range(40)]
    assert slope(line) == pytest.approx(0.5)
    line[7] = (7.0, 900.0)
    line[30] = (30.0, -900.0)
    assert slope(line) == pytest.approx(0.5, abs=0.01)
    assert slope(line[:1]) == slope([]) == 0.0


def test_a_leak_grows_and_noise_does_not() -> None:
    rng = random.Random(3)
    noise = [100.0 + rng.uniform(-5.0, 5.0) for _ in range(180)]
    (flat,) = trends(samples(*noise), BOUNDS)
    assert not flat.grows
    leak = [value + 0.05 * number for number, value in enumerate(noise)]
    (grown,) = trends(samples(*leak), BOUNDS)
    assert grown.grows
    assert grown.growth == pytest.approx(9.0, abs=1.5)
    assert "GROWS" in grown.line()


def test_what_climbs_grows_and_what_comes_and_goes_does_not() -> None:
    (comes,) = trends(samples(*[6.0, 6.0, 6.0, 9.0] * 20, name="server: threads"), BOUNDS)
    assert not comes.grows
    climbing = [6.0 + number // 20 for number in range(80)]
    (climbs,) = trends(samples(*climbing, name="server: threads"), BOUNDS)
    assert climbs.grows


def test_what_is_not_there_all_the_time_or_has_no_bound_is_left_out() -> None:
    some = samples(*[1.0] * 10)
    for number in range(8):
        some[number][1]["worker 7: MB"] = 5.0
        some[number][1]["server: moons"] = 5.0
    assert [trend.name for trend in trends(some, BOUNDS)] == ["server: MB"]
    assert trends([], BOUNDS) == []
