"""Exact metrics from given stamps."""

from __future__ import annotations

import pytest

from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.stats import (
    gap_within,
    judge_gaps,
    longest_gap,
    quantiles,
    steady_tokens_per_s,
    summarise,
)


def result(
    *chunk_s: float,
    tokens: tuple[int, ...] | None = None,
    intended_s: float = 10.0,
    sent_s: float = 10.5,
    failure: Failure | None = None,
) -> Result:
    return Result(
        request=Request(0.0, "x", 100),
        intended_s=intended_s,
        sent_s=sent_s,
        end_s=(chunk_s[-1] if chunk_s else sent_s) + 0.25,
        chunk_s=chunk_s,
        chunk_tokens=tokens or (1,) * len(chunk_s),
        failure=failure,
    )


def test_stamps_to_latencies() -> None:
    seen = result(11.0, 11.5, 12.5)
    assert seen.ttft_s == 1.0
    assert seen.ttft_from_sent_s == 0.5
    assert seen.e2e_s == 2.5
    assert seen.tpot_s == 0.75
    assert seen.itl_s == (0.5, 1.0)
    assert seen.longest_gap_s == 1.0


def test_a_chunk_of_several_tokens_counts_as_as_many_gaps_and_the_chunk_gap_is_kept() -> None:
    seen = result(11.0, 12.0, 12.5, tokens=(2, 4, 1))
    assert seen.output_tokens == 7
    assert seen.itl_s == (0.25, 0.25, 0.25, 0.25, 0.5)
    assert seen.longest_gap_s == 1.0
    assert seen.tpot_s == 1.5 / 6


def test_without_tokens_there_is_no_latency() -> None:
    seen = result()
    latencies = (seen.ttft_s, seen.ttft_from_sent_s, seen.e2e_s, seen.tpot_s, seen.longest_gap_s)
    assert latencies == (None,) * 5
    assert result(11.0).tpot_s is None


def test_quantiles_interpolate_and_skip_what_is_missing() -> None:
    seen = quantiles([None, *range(101)])
    assert seen is not None
    assert (seen.count, seen.p50, seen.p90, seen.p95, seen.p99, seen.max) == (101, 50, 90, 95, 99, 100)
    assert quantiles([None]) is None


def test_summary_counts_every_token_but_only_good_latencies() -> None:
    failed = result(11.0, 19.0, failure=Failure(FailureKind.STREAM, "gone"))
    seen = summarise([result(11.0, 12.0), failed, result(failure=Failure(FailureKind.TIMEOUT, "late"))])
    assert (seen.requests, seen.failures) == (3, 2)
    assert seen.failures_by_kind == {"stream": 1, "timeout": 1}
    assert seen.output_tokens == 4
    assert seen.duration_s == 8.5
    assert seen.tokens_per_s == 4 / 8.5
    assert seen.tpot is not None
    assert seen.tpot.max == 1.0
    assert seen.longest_gap_s == 8.0  # a stream that stood still and then broke did stand still


def test_an_empty_run_has_a_summary() -> None:
    seen = summarise([])
    assert (seen.requests, seen.tokens_per_s, seen.ttft, longest_gap([])) == (0, 0.0, None, None)


def test_the_steady_rate_counts_what_comes_while_all_streams_decode() -> None:
    streams = [result(10.0, 11.0, 12.0, 13.0, 14.0), result(11.5, 12.0, 12.5, 13.5, tokens=(1, 1, 2, 3))]
    # From 11.5 to 13.5: two tokens of the first, six of the second.
    assert steady_tokens_per_s(streams) == 8 / 2
    assert steady_tokens_per_s([result(10.0, 11.0), result(11.0, 12.0)]) is None
    assert steady_tokens_per_s([result(10.0), result(9.0, 12.0)]) is None
    assert steady_tokens_per_s([]) is None


def test_gaps_within_a_span_are_those_that_touch_it() -> None:
    seen = result(10.0, 11.0, 13.0, 16.0)
    assert gap_within(seen, 11.5, 12.0) == 2.0  # wholly inside the gap
    assert gap_within(seen, 12.0, 14.0) == 3.0
    assert gap_within(seen, 17.0, 18.0) is None


def test_the_gap_criterion_takes_the_largest_of_its_three_limits() -> None:
    steady = result(*(10.0 + 0.02 * i for i in range(20)), 10.5)  # median 20 ms, last gap 120 ms
    verdict = judge_gaps([steady], 10.0, 11.0, baseline_s=0.0)
    assert verdict is not None
    assert verdict.limit_s == pytest.approx(0.150)
    assert verdict.longest_s == pytest.approx(0.120)
    assert verdict.held

    slow = result(10.0, 10.1, 10.2, 10.3, 10.85)  # median 100 ms: five of them are allowed
    verdict = judge_gaps([slow], 10.0, 11.0, baseline_s=0.1)
    assert verdict is not None
    assert verdict.limit_s == pytest.approx(0.5)
    assert not verdict.held

    verdict = judge_gaps([slow], 10.0, 11.0, baseline_s=0.4)
    assert verdict is not None
    assert verdict.held


def test_the_stream_nearest_its_own_limit_is_reported() -> None:
    slow = result(10.0, 10.2, 10.4, 10.9)  # 500 ms of 1 s
    quick = result(10.0, 10.01, 10.02, 10.16)  # 140 of 150 ms
    verdict = judge_gaps([slow, quick], 10.0, 11.0, baseline_s=0.0)
    assert verdict is not None
    assert verdict.longest_s == pytest.approx(0.14)
    assert verdict.streams == 2
    assert judge_gaps([slow], 20.0, 21.0, baseline_s=0.0) is None
