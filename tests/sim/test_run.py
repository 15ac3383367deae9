"""Whole simulations: the same bytes again, A/A, grains, conservation, honest accounting."""

from __future__ import annotations

import msgspec
import pytest

from dynamictp.control.route import DomainLoad
from dynamictp.sim.checks import SimulationError, check_integrity
from dynamictp.sim.collect import Balance
from dynamictp.sim.outcome import CaseResult
from dynamictp.sim.pool import SimPool
from dynamictp.sim.report import as_json
from dynamictp.sim.run import arriving, case_of, run_case, simulate
from dynamictp.sim.scenario import Scenario
from tests.sim.scenarios import DYNAMIC, STATIC, small


def result_of(scenario: Scenario, name: str) -> CaseResult:
    (found,) = (c for c in scenario.expanded().configurations if c.label == name)
    return run_case(case_of(scenario, found, 0))


def test_the_same_scenario_gives_the_same_bytes_in_any_number_of_processes() -> None:
    scenario = small(duration_s=60, noise=0.05, seeds=[0, 1])
    once = as_json(simulate(scenario))
    assert once == as_json(simulate(scenario))
    assert once == as_json(simulate(scenario, jobs=2))
    assert once != as_json(simulate(msgspec.structs.replace(scenario, seeds=(2, 3))))


def test_dynamic_with_switching_off_is_static() -> None:
    """A/A: the planner decides every half second and nothing is carried out; or it has nowhere to go."""
    scenario = small(
        configurations=[
            {"name": "static", "layout": "tp2", "memory": "dynamic"},
            {"name": "dry", "layout": "tp2", "mode": "dry-run"},
            {
                "name": "nowhere",
                "layout": "tp2",
                "mode": "dynamic",
                "planner": {"min_devices": 2},
                "degrees": [2],
            },
        ],
        noise=0.05,
    )
    static, dry, nowhere = simulate(scenario).results
    for other in (dry, nowhere):
        assert sum(other.reasons.values()) >= 599, "decisions were made"
        assert other.total == static.total
        assert other.classes == static.classes
        assert other.use == static.use
        assert other.samples == static.samples
        assert not other.switches


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_the_coarse_grain_agrees_with_single_steps(name: str) -> None:
    scenario = small()
    (configuration,) = (c for c in scenario.configurations if c.label == name)
    case = case_of(scenario, configuration, 0)
    coarse = run_case(case)
    fine = run_case(
        msgspec.structs.replace(case, setup=msgspec.structs.replace(case.setup, longest_run_s=0.0))
    )
    assert [(s.to_layout, s.outcome) for s in coarse.switches] == [
        (s.to_layout, s.outcome) for s in fine.switches
    ]
    for old, new in ((coarse.total.ttft, fine.total.ttft), (coarse.total.tpot, fine.total.tpot)):
        assert old.total == pytest.approx(new.total, rel=0.01)
        assert old.quantiles([0.5, 0.95]) == pytest.approx(new.quantiles([0.5, 0.95]), rel=0.02)
    assert coarse.use.busy_s == pytest.approx(fine.use.busy_s, rel=0.005)
    assert coarse.use.flops == pytest.approx(fine.use.flops, rel=0.001)


def test_dynamic_follows_the_load_and_says_why() -> None:
    result = result_of(small(arrivals="steps:0=2,60=14,180=2"), "dynamic")
    assert [s.to_layout for s in result.switches][:1] in (["tp2"], ["tp1+tp1"])
    assert result.switches[0].reason.startswith("grow")
    assert result.switches[-1].to_layout == "tp1"
    assert 1.0 < result.use.devices < 2.0
    assert result.use.busy_s <= result.use.device_s
    assert 0 < result.use.compute < result.use.busy <= 1
    assert result.use.load > 0.1


def test_warm_up_is_played_and_not_counted() -> None:
    plain, trimmed = (result_of(small(warmup_s=warmup), "static") for warmup in (0, 100))
    assert trimmed.requests == plain.requests
    late = sum(request.arrival_s >= 100 for request in arriving(small().workload(0, 8192)))
    assert trimmed.total.due == late < plain.total.due
    assert trimmed.use.span_s == pytest.approx(200)


def test_refused_and_unfinished_requests_count_against_the_targets() -> None:
    scenario = small(arrivals="poisson:80", duration_s=60, drain_s=0, max_wait_s=1.0, devices=1)
    scenario = msgspec.structs.replace(scenario, configurations=scenario.configurations[:1])
    (result,) = simulate(scenario).results
    failures = result.total.failures
    assert failures["refused"] > 0
    assert failures["unfinished"] > 0
    assert result.total.due == result.total.finished + sum(failures.values()) == result.requests
    goodput = result.figures().total.goodput
    assert goodput is not None
    assert goodput.value == result.total.met / result.total.due < 0.9


def test_shared_prefixes_are_computed_once() -> None:
    without, with_ = (
        result_of(small(duration_s=120, **more), "static")
        for more in ({}, {"prefixes": "2:1024", "mix": "chat-rag"})
    )
    assert with_.total.prefilled > without.total.prefilled + 1000 * with_.total.due * 0.8, (
        "prompts are longer"
    )
    assert with_.use.flops < 1.6 * without.use.flops, "which costs little"


def test_seeds_make_intervals() -> None:
    outcome = simulate(small(duration_s=60, seeds=[0, 1, 2]))
    static, _ = outcome.figures()
    assert static.total.due == sum(result.total.due for result in outcome.of("static"))
    assert static.total.ttft is not None
    p95 = static.total.ttft.p95
    assert p95.low < p95.value < p95.high


class TestConservation:
    def pool(self) -> tuple[SimPool, Balance]:
        scenario = small(configurations=[STATIC, DYNAMIC])
        pool = SimPool(case_of(scenario, scenario.configurations[1], 0).setup)
        requests = [r for r in arriving(scenario.workload(0, 8192)) if r.arrival_s < 20]
        outcome = pool.run(requests, 20)
        balance = Balance(arrived=len(requests), finished=len(outcome.finished))
        balance.outputs = sum(request.output for request in outcome.finished)
        return pool, balance

    def test_holds(self) -> None:
        check_integrity(*self.pool())

    def test_sees_a_lost_request(self) -> None:
        pool, balance = self.pool()
        balance.arrived += 1
        with pytest.raises(SimulationError, match="are accounted for"):
            check_integrity(pool, balance)

    def test_sees_a_token_too_many(self) -> None:
        pool, balance = self.pool()
        pool.node.totals.decoded += 1
        with pytest.raises(SimulationError, match="tokens were generated"):
            check_integrity(pool, balance)

    def test_sees_pages_that_nobody_holds(self) -> None:
        pool, balance = self.pool()
        next(iter(pool.node.domains.values())).used += 16
        with pytest.raises(SimulationError, match="accounts for"):
            check_integrity(pool, balance)

    def test_sees_devices_that_do_not_exist(self) -> None:
        pool, balance = self.pool()
        pool.node.totals.device_s += 1000
        with pytest.raises(SimulationError, match="device-seconds"):
            check_integrity(pool, balance)


def test_a_router_that_leaves_a_request_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks run within every simulation."""

    def losing(self: object, request: object, load: DomainLoad | None = None) -> None:
        """Takes the request and forgets it."""

    monkeypatch.setattr("dynamictp.sim.domain.SimDomain.add", losing)
    with pytest.raises(SimulationError):
        simulate(small(duration_s=10))
