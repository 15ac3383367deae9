"""Windows, averages, bursts, trends and length profiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynamictp.control.config import build_control
from dynamictp.control.traffic import Demand, TrafficState, demand, observe
from dynamictp.control.values import Arrivals, Digest, Outputs, PoolSnapshot, Running, Waiting
from dynamictp.control.windows import ArrivalWindow, OutputWindow, Stream, TrafficWindows, Who, quantile
from tests.control.pools import CPU_LEGAL, config


def look(time_s: float, two: int, ten: int, **values: Any) -> PoolSnapshot:
    return PoolSnapshot(
        time_s, "tp1", 2, 2, CPU_LEGAL, arrivals_2s=Arrivals(2.0, two, 100.0, 150.0),
        arrivals_10s=Arrivals(10.0, ten, 100.0, 150.0), **values,
    )  # fmt: skip


def after(*snapshots: PoolSnapshot, share: float = 0.5) -> tuple[Demand, TrafficState]:
    state = TrafficState()
    for snapshot in snapshots:
        state = observe(state, snapshot, config())
    return demand(state, snapshots[-1], config(), share), state


def test_the_average_forgets_at_its_rate() -> None:
    steady = [look(2.0 * i, 4, 20) for i in range(100)]
    found, state = after(*steady)
    assert found.average == pytest.approx(2.0)
    assert found.slow == pytest.approx(2.0)
    state = observe(state, look(200.0, 12, 28), config())
    assert state.average == pytest.approx(2.0 + 0.25 * 4.0), "alpha is the weight of 2 s"


def test_looks_far_apart_see_what_came_between() -> None:
    """Every ten seconds 15 requests, of which none or six in the last two."""
    _, state = after(*(look(10.0 * i, 6 * (i % 2), 15) for i in range(100)))
    assert state.average == pytest.approx(1.5)
    assert state.slow == pytest.approx(1.5)


def test_poisson_noise_is_no_demand_for_growth() -> None:
    """An hour of 2/s: the demand stays near 2, apart from a rare burst."""
    rng = np.random.default_rng(7)
    times = np.cumsum(rng.exponential(0.5, 7200))
    arrivals, state, demands = ArrivalWindow(0.0), TrafficState(), []
    upcoming = 0
    for tick in range(1, 7000):
        now = tick / 2
        while times[upcoming] <= now:
            arrivals.add(float(times[upcoming]), 100)
            upcoming += 1
        snapshot = PoolSnapshot(
            now, "tp1", 2, 2, CPU_LEGAL,
            arrivals_2s=arrivals.view(now, 2.0), arrivals_10s=arrivals.view(now, 10.0),
        )  # fmt: skip
        state = observe(state, snapshot, config())
        demands.append(demand(state, snapshot, config(), 0.5).growth)
    assert np.mean(demands) == pytest.approx(1.85, abs=0.25)
    assert sum(value > 3.0 for value in demands) <= 10


def test_a_ramp_is_seen_ahead() -> None:
    """Rising by 3/s each second: the forecast is above the average, which lags."""

    def count(now: float, window: float) -> int:
        return round(window * (20 + 3 * (now - window / 2)))

    rising = [look(t / 2, count(t / 2, 2), count(t / 2, 10)) for t in range(20, 80)]
    found, _ = after(*rising)
    assert found.forecast > 1.05 * found.average
    assert found.forecast <= 1.25 * found.now


def test_a_step_that_is_over_is_not_extrapolated() -> None:
    before = [look(t / 2, 20, 100) for t in range(60)]
    up = [look(30 + t / 2, min(20 + 15 * t, 80), min(100 + 15 * t, 400)) for t in range(1, 25)]
    found, _ = after(*before, *up)
    assert found.growth <= 1.25 * 40 + 1e-9


def test_waiting_work_counts_by_its_length() -> None:
    quiet = [look(t / 2, 2, 10) for t in range(60)]
    short, _ = after(*quiet, look(30, 2, 10, waiting=Waiting(10, 1000)))
    long, _ = after(*quiet, look(30, 2, 10, waiting=Waiting(10, 5000)))
    assert short.backlog == pytest.approx(1.0, rel=0.05)
    assert long.backlog == pytest.approx(3.0, rel=0.05)


def test_outputs_are_at_least_as_long_as_those_that_run() -> None:
    running = Running(10, 900.0, 700.0)
    _, state = after(*(look(t / 2, 4, 20, running=running) for t in range(10)))
    assert state.profile is not None
    assert state.profile.output_mean == pytest.approx(700, rel=0.12)
    few = [look(t / 2, 4, 20, running=running, outputs=Outputs(5, 40.0, 60.0)) for t in range(100)]
    _, state = after(*few)
    assert state.profile is not None
    assert state.profile.output_mean > 60, "only short ones have finished so far"


def test_a_profile_lasts_while_lengths_only_wobble() -> None:
    state, seen = TrafficState(), set()
    for tick in range(400):
        outputs = Outputs(60, 60.0 + 4 * (tick % 3 - 1), 110.0)
        state = observe(state, look(tick / 2, 4, 20, outputs=outputs), config())
        seen.add(state.profile)
    assert len(seen) <= 2


# ---------------------------------------------------------------- windows


def test_arrival_window() -> None:
    window = ArrivalWindow(0.0)
    for tick in range(30):
        window.add(float(tick), 100 + tick)
    assert window.view(29.5, 2.0) == Arrivals(2.0, 2, 128.5, 129.0)
    assert window.view(29.5, 10.0).requests == 10
    assert window.view(100.0, 10.0) == Arrivals(10.0)
    assert ArrivalWindow(5.0).view(6.0, 2.0).window_s == 1.0


def test_output_window_keeps_a_few_old_ones() -> None:
    window = OutputWindow()
    assert window.view(0.0) == Outputs()
    for tick in range(100):
        window.add(float(tick), tick)
    assert window.view(1000.0).requests == 20
    assert window.view(1000.0).tokens_mean == pytest.approx(89.5)


def windows(**values: Any) -> TrafficWindows:
    return TrafficWindows(0.0, build_control({"slo": {"ttft_p99_s": 2.0, "tpot_p99_ms": 100.0}, **values}))


def test_ratios_of_before_the_commit_and_old_ones_do_not_count() -> None:
    seen = windows()
    seen.first_token(10.0, Who(0.0, 5))
    seen.first_token(20.0, Who(18.0, 5))
    assert seen.view(30.0, (), ()).ttft.count == 2
    seen.committed(18.0)
    assert seen.view(30.0, (), ()).ttft == Digest(1, 1.0, 1.0, 1.0)
    seen.committed(19.0)
    assert seen.view(30.0, (), ()).ttft.count == 0, "it arrived before the commit"
    seen.first_token(25.0, Who(21.0, 5))
    assert seen.view(84.9, (), ()).ttft.p99 == 2.0
    assert seen.view(85.0, (), ()).ttft.count == 0, "feedback_window_s"


def test_a_stream_counts_by_its_first_token_and_running_ones_from_32_tokens_on() -> None:
    seen = windows()
    seen.committed(10.0)
    who = Who(9.0, 5)
    seen.finished(12.0, Stream(who, 11, 9.5, 12.0))
    seen.finished(13.0, Stream(who, 11, 10.5, 12.5))
    seen.finished(13.0, Stream(who, 1, 12.9, 12.9))
    assert seen.view(14.0, (), ()).outputs.requests == 3
    assert seen.view(14.0, (), ()).tpot == Digest(1, 2.0, 2.0, 2.0)
    running = [Stream(who, 32, 11.0, 14.1), Stream(who, 31, 11.0, 14.0), Stream(who, 40, 9.0, 14.0)]
    digest = seen.view(14.1, (), running).tpot
    assert (digest.count, digest.p50) == (2, pytest.approx(1.0))


def test_each_request_is_measured_against_its_own_targets() -> None:
    seen = windows(
        slo={
            "ttft_p99_s": 2.0,
            "ttft_per_token_ms": 10.0,
            "tpot_p99_ms": 100.0,
            "classes": {"long": {"ttft_p99_s": 10.0}},
            "tenants": {"batch": {"ttft_p99_s": 50.0, "tpot_p99_ms": 500.0}},
        }
    )
    kinds = [Who(0.0, 100), Who(0.0, 1000, "long"), Who(0.0, 1000, "long", "batch")]
    assert [seen.view(6.0, [who], ()).worst_ttft_ratio for who in kinds] == [2.0, 0.3, 0.1]
    for who in kinds:
        seen.first_token(6.0, who)
        seen.finished(7.0, Stream(who, 11, 6.0, 7.0))
    digests = seen.view(7.0, (), ())
    assert (digests.ttft.p50, digests.ttft.p99) == (0.3, 2.0)
    assert (digests.tpot.count, digests.tpot.p50) == (3, 1.0)


def test_those_who_wait_count_with_the_time_since_the_commit() -> None:
    seen = windows()
    waiting = [Who(0.0, 5), Who(28.0, 5)]
    assert seen.view(30.0, waiting, ()).worst_ttft_ratio == 15.0
    seen.committed(29.0)
    assert seen.view(30.0, waiting, ()).worst_ttft_ratio == 0.5


def test_a_replaced_configuration_holds_from_the_next_sample_on() -> None:
    seen = windows()
    seen.first_token(2.0, Who(0.0, 5))
    seen.config = build_control({"slo": {"ttft_p99_s": 4.0}})
    seen.first_token(2.0, Who(0.0, 5))
    assert (seen.view(3.0, (), ()).ttft.p50, seen.view(3.0, (), ()).ttft.p99) == (0.5, 1.0)


def test_quantile_is_the_nearest_rank() -> None:
    assert [quantile([1, 2, 3, 4], q) for q in (0.0, 0.25, 0.5, 0.51, 0.9, 1.0)] == [1, 1, 2, 3, 4, 4]
