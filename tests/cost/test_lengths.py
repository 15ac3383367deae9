"""Length distributions: moments against closed forms and samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dynamictp.cost.lengths import Lengths, RequestClass, Workload


def workload(prompt: Lengths, output: Lengths) -> Workload:
    return Workload("test", (RequestClass("test", prompt, output),))


def test_mean_and_p95_are_those_asked_for() -> None:
    lengths = Lengths(1500, 4000)
    assert lengths.mean == pytest.approx(1500)
    assert lengths.quantile(0.95) == pytest.approx(4000)
    assert sum(node.weight for node in lengths.nodes) == pytest.approx(1)


def test_sigma_of_a_log_normal_by_hand() -> None:
    # P95 / mean = exp(z s - s^2 / 2), z = 1.645. Mean 100, P95 250:
    # s = 1.645 - sqrt(1.645^2 - 2 ln 2.5) = 0.7107, and the median is 100 exp(-s^2 / 2) = 77.7.
    lengths = Lengths(100, 250)
    assert lengths.sigma == pytest.approx(0.7107, abs=2e-4)
    assert lengths.median == pytest.approx(77.7, abs=0.05)


def test_the_median_of_a_log_normal() -> None:
    lengths = Lengths(100, 250)
    assert lengths.median == pytest.approx(100 * math.exp(-(lengths.sigma**2) / 2))
    assert lengths.quantile(0.5) == pytest.approx(lengths.median)


def test_equal_mean_and_p95_is_a_constant() -> None:
    nodes = Lengths(64, 64).nodes
    assert [(node.weight, node.tokens) for node in nodes] == [(1.0, 64)]


@pytest.mark.parametrize(("mean", "p95"), [(0.5, 2), (100, 50), (100, 400)])
def test_impossible_lengths_are_refused(mean: float, p95: float) -> None:
    with pytest.raises(ValueError, match="log-normal"):
        Lengths(mean, p95)


def test_running_requests_are_seen_in_proportion_to_their_length() -> None:
    # Constant prompt 100 and outputs: E[n (p + n/2)] / E[n] = 100 + E[n^2] / (2 E[n]).
    output = Lengths(300, 800)
    second = 300**2 * math.exp(output.sigma**2)
    exact = 100 + second / 600
    assert workload(Lengths(100, 100), output).running_context == pytest.approx(exact, rel=0.02)
    assert exact > 100 + 150, "a mean alone would miss a third of it"


def test_running_context_and_variance_against_samples() -> None:
    rng = np.random.default_rng(0)
    prompt, output = Lengths(1500, 4000), Lengths(300, 800)
    n = rng.lognormal(math.log(output.median), output.sigma, 400_000)
    p = rng.lognormal(math.log(prompt.median), prompt.sigma, 400_000)
    seen = p + rng.random(len(n)) * n
    mean = np.average(seen, weights=n)
    variance = np.average((seen - mean) ** 2, weights=n)
    found = workload(prompt, output)
    assert found.running_context == pytest.approx(mean, rel=0.02)
    assert found.running_context_variance == pytest.approx(variance, rel=0.1)


def test_a_mix_weighs_its_classes() -> None:
    a = RequestClass("a", Lengths(100, 100), Lengths(10, 10), weight=3)
    b = RequestClass("b", Lengths(1000, 1000), Lengths(50, 50), weight=1)
    mix = Workload("mix", (a, b))
    assert mix.mean_prompt == 325
    assert mix.mean_output == 20
    # 30 of 80 running token-steps belong to a: (30 x 105 + 50 x 1025) / 80.
    assert mix.running_context == pytest.approx((30 * 105 + 50 * 1025) / 80)


def test_lengths_stay_inside_the_context() -> None:
    capped = workload(Lengths(1500, 4000), Lengths(300, 800)).capped(1024)
    assert capped.longest <= 1024 * 1.5
    assert all(node.tokens <= 1024 for node in capped.prompts)
    assert capped.mean_output < 300


def test_scaling_scales_all_lengths() -> None:
    scaled = Lengths(100, 250).scaled(0.1)
    assert scaled.mean == pytest.approx(10, rel=0.01)
    assert scaled.quantile(0.95) == pytest.approx(25)
