"""Queueing formulas against textbook values."""

from __future__ import annotations

import math

import pytest

from dynamictp.cost.queueing import NO_WAIT, Wait, erlang_c, mgc_wait, quantile_of_sum, tail


def test_erlang_c_by_hand() -> None:
    # One server: the probability to wait is the load. Two servers at 1 Erlang: 1/3 (Kleinrock I, 3.5).
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    # Ten servers at 8 Erlang: 0.409 in the tables.
    assert erlang_c(10, 8.0) == pytest.approx(0.409, abs=5e-4)


def test_erlang_c_at_its_ends() -> None:
    assert erlang_c(4, 0.0) == 0
    assert erlang_c(4, 4.0) == 1
    assert erlang_c(2000, 1000.0) == pytest.approx(0, abs=1e-12)


def test_one_server_is_pollaczek_khinchine() -> None:
    # M/D/1 at load 0.8, service 1: W = 0.8 / (2 x 0.2) = 2; M/M/1 twice that.
    assert mgc_wait(0.8, 1.0, 1.0, 1).mean == pytest.approx(2.0)
    assert mgc_wait(0.8, 1.0, 2.0, 1).mean == pytest.approx(4.0)


def test_several_servers_are_exact_for_exponential_service() -> None:
    # M/M/2 with 1 Erlang: C / (c mu - lambda) = (1/3) / 1.
    assert mgc_wait(1.0, 1.0, 2.0, 2).mean == pytest.approx(1 / 3)


def test_several_servers_scale_with_the_variability_of_service() -> None:
    # Lee and Longton 1959: W(M/G/c) = (1 + cv^2) / 2 x W(M/M/c). Constant service halves the 1/3 of M/M/2;
    # cv^2 = 3 doubles it.
    assert mgc_wait(1.0, 1.0, 1.0, 2).mean == pytest.approx(1 / 6)
    assert mgc_wait(1.0, 1.0, 4.0, 2).mean == pytest.approx(2 / 3)


def test_more_load_than_servers_never_ends() -> None:
    assert mgc_wait(2.0, 1.0, 1.0, 2) == Wait(1.0, math.inf)
    assert quantile_of_sum(0.99, [(1.0, 1.0)], [Wait(1.0, math.inf)]) == math.inf


def test_the_variance_of_a_wait() -> None:
    # M/M/1 at load 0.5, service 1: W has P(W > t) = 0.5 exp(-0.5 t); E[W] = 1, E[W^2] = 0.5 x 2 x 4 = 4.
    wait = mgc_wait(0.5, 1.0, 2.0, 1)
    assert wait.mean == pytest.approx(1.0)
    assert wait.variance == pytest.approx(4.0 - 1.0)


def test_quantile_of_a_wait_before_a_constant_service() -> None:
    # P(W > t) = 0.5 exp(-t/2): one in a hundred at 2 ln 50.
    found = quantile_of_sum(0.99, [(1.0, 3.0)], [Wait(0.5, 2.0)])
    assert found == pytest.approx(3 + 2 * math.log(50), rel=1e-4)


def test_quantile_without_wait_is_that_of_the_services() -> None:
    services = [(0.5, 1.0), (0.45, 2.0), (0.05, 9.0)]
    assert quantile_of_sum(0.5, services, [NO_WAIT]) == pytest.approx(1.0, rel=1e-4)
    assert quantile_of_sum(0.9, services, [NO_WAIT]) == pytest.approx(2.0, rel=1e-4)
    assert quantile_of_sum(0.99, services, [NO_WAIT]) == pytest.approx(9.0, rel=1e-4)


def test_tails_add_up_to_at_most_one() -> None:
    assert tail(-1.0, [NO_WAIT]) == 1
    assert tail(0.0, [Wait(0.9, 1.0), Wait(0.9, 1.0)]) == 1
    assert tail(1.0, [Wait(0.5, 1.0)]) == pytest.approx(0.5 / math.e)
