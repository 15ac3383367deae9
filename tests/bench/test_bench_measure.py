"""Figures are exact, say how sure they are, and blame the client where it is to blame."""

from __future__ import annotations

import numpy as np
import pytest

from dynamictp.bench.measure import estimate, group_figures, judge, run_figures, share
from dynamictp.bench.record import ClientFacts, Run, ServerFacts, Slo
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request


def result(
    *chunk_s: float,
    due_s: float = 0.0,
    sent_s: float | None = None,
    failure: FailureKind | None = None,
    tokens: int | None = None,
    name: str = "chat",
    tenant: str = "",
    prompt: tuple[int, int | None] = (10, 10),
) -> Result:
    return Result(
        Request(due_s, "", 100, traffic_class=name, tenant=tenant, prompt_tokens=prompt[0]),
        due_s,
        due_s if sent_s is None else sent_s,
        chunk_s[-1] if chunk_s else due_s,
        chunk_s,
        (1,) * len(chunk_s),
        prompt_tokens=prompt[1],
        completion_tokens=tokens,
        failure=Failure(failure, "x") if failure else None,
    )


def run_of(*results: Result, load_s: float = 10.0, users: int = 0) -> Run:
    facts = ServerFacts("http://s", "m")
    return Run("r", "now", facts, ClientFacts(0.1, "cpu", "3"), load_s, load_s, results, users=users)


def test_percentiles_interpolate_and_a_p99_needs_a_hundred_samples() -> None:
    seen = estimate([None, *range(101)])
    assert seen is not None
    assert seen.p99 is not None
    assert (seen.count, seen.p50.value, seen.p90.value, seen.p95.value, seen.p99.value) == (
        101,
        50,
        90,
        95,
        99,
    )
    few = estimate(range(99))
    assert few is not None
    assert few.p99 is None
    assert estimate([None]) is None


def test_the_interval_is_that_of_a_bootstrap() -> None:
    rng = np.random.default_rng(0)
    sample = rng.lognormal(size=400)
    for q, figure in ((50, "p50"), (95, "p95")):
        seen = getattr(estimate(sample.tolist()), figure)
        drawn = np.percentile(rng.choice(sample, (4000, 400)), q, axis=1)
        low, high = np.percentile(drawn, (2.5, 97.5))
        assert seen.low == pytest.approx(low, rel=0.08)
        assert seen.high == pytest.approx(high, rel=0.08)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        seen = estimate(rng.exponential(size=200).tolist())
        assert seen is not None
        covered += seen.p50.low <= np.log(2) <= seen.p50.high
    assert covered / 400 == pytest.approx(0.95, abs=0.035)


def test_shares_of_nothing_and_of_everything() -> None:
    assert share(0, 0) is None
    whole = share(18, 18)
    assert whole is not None
    assert (whole.value, whole.high) == (1.0, 1.0)
    assert whole.low == pytest.approx(0.824, abs=0.001)
    half = share(50, 100)
    assert half is not None
    assert (half.low, half.high) == (pytest.approx(0.404, abs=1e-3), pytest.approx(0.596, abs=1e-3))


def test_goodput_counts_failures_and_leaves_out_what_was_cut() -> None:
    slo = Slo(ttft_s=2.0, tpot_s=0.1)
    results = [
        result(1.0, 1.05),  # meets both
        result(1.0),  # one token has no TPOT to miss
        result(3.0, 3.05),  # TTFT
        result(1.0, 1.5),  # TPOT
        result(1.0, 1.05, failure=FailureKind.TIMEOUT),
        result(1.0, 1.05, failure=FailureKind.CUT),
    ]
    group = group_figures("all", results, slo, load_s=10.0)
    assert (group.due, group.finished, group.failed, group.cut, group.met) == (6, 4, 1, 1, 2)
    assert group.failures == {"timeout": 1}
    assert group.goodput is not None
    assert group.goodput.value == 2 / 5
    assert group.goodput_per_s == 0.2
    assert group.ttft is not None
    assert group.ttft.count == 4


def test_targets_of_a_tenant_go_before_those_of_its_class() -> None:
    slo = Slo(2.0, 0.1, {"chat": (0.5, 0.1), "gold": (5.0, 0.1)})
    assert not slo.met(result(1.0))
    assert slo.met(result(4.0, tenant="gold"))
    assert slo.met(result(1.0, name="rag"))


def test_throughput_counts_what_came_within_the_load() -> None:
    results = [result(1.0, 2.0, 11.0, prompt=(50, 50)), result(12.0, prompt=(70, 70))]
    group = group_figures("all", results, Slo(), load_s=10.0)
    assert (group.prefill_tokens_per_s, group.decode_tokens_per_s) == (5.0, 0.2)
    assert group.longest_gap_s == 9.0


def test_tpot_divides_by_the_usage() -> None:
    group = group_figures("all", [result(1.0, 2.0, tokens=11)], Slo(), load_s=10.0)
    assert group.tpot is not None
    assert group.tpot.p50.value == 0.1


def test_groups_by_class_and_tenant() -> None:
    run = run_of(result(1.0), result(2.0, name="rag", tenant="gold"), result(3.0, name="rag", tenant="free"))
    seen = run_figures(run, Slo())
    assert [(group.name, group.due) for group in seen.classes] == [("chat", 1), ("rag", 2)]
    assert [(group.name, group.due) for group in seen.tenants] == [("free", 1), ("gold", 1)]


def test_a_client_that_falls_behind_makes_the_run_invalid() -> None:
    prompt = run_of(*(result(i + 1.0, due_s=float(i), sent_s=i + 0.001) for i in range(10)))
    assert judge(prompt).valid
    late = judge(run_of(*(result(i + 1.0, due_s=float(i), sent_s=i + 0.011) for i in range(10))))
    assert not late.valid
    assert "fell behind" in late.problems[0]
    slow = judge(run_of(*(result(2.0 * i + 1, due_s=float(i), sent_s=2.0 * i) for i in range(10))))
    assert slow.delivered == pytest.approx(0.5, abs=0.01)
    assert any("delivered" in problem for problem in slow.problems)


def test_a_run_without_requests_is_invalid_and_a_closed_loop_has_no_rate_to_miss() -> None:
    assert not judge(run_of()).valid
    assert judge(run_of(result(9.0, due_s=8.0), users=1)).delivered == 1.0


def test_prompt_lengths_are_checked_against_the_usage() -> None:
    seen = judge(run_of(result(1.0), result(1.0, prompt=(10, 12)), result(1.0, prompt=(10, None))))
    assert (seen.exact_prompts, seen.counted_prompts) == (1, 2)
