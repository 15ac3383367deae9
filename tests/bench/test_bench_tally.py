"""Streaming figures agree with those of kept results."""

from __future__ import annotations

import numpy as np
import pytest

from dynamictp.bench.measure import estimate, group_figures
from dynamictp.bench.record import Slo
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.tally import Digest, Tally


def samples(count: int, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).lognormal(-1.0, 1.2, count).tolist()


def digest_of(values: list[float]) -> Digest:
    digest = Digest()
    for value in values:
        digest.add(value)
    return digest


@pytest.mark.parametrize("count", [1, 2, 57, 5000])
def test_a_digest_estimates_as_the_samples_do(count: int) -> None:
    values = samples(count)
    exact, streamed = estimate(values), digest_of(values).estimate()
    assert exact is not None
    assert streamed is not None
    assert (streamed.count, streamed.max) == (exact.count, exact.max)
    assert streamed.mean == pytest.approx(exact.mean)
    assert (streamed.p99 is None) == (exact.p99 is None) == (count < 100)
    if count > 1000:
        for name in ("p50", "p90", "p95", "p99"):
            one, other = getattr(streamed, name), getattr(exact, name)
            assert one.value == pytest.approx(other.value, rel=0.006)
            assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=0.03)


def test_memory_is_bounded_and_parts_add_up() -> None:
    values = samples(20_000)
    whole = digest_of(values)
    assert len(whole.buckets) < 3000
    halves = digest_of(values[:10_000])
    halves.merge(digest_of(values[10_000:]))
    assert halves.buckets == whole.buckets
    assert (halves.count, halves.most) == (whole.count, whole.most)
    rising, shares = whole.curve()
    assert rising == sorted(rising)
    assert shares[-1] == 1.0


def test_nothing_has_no_figures() -> None:
    assert Digest().estimate() is None
    with pytest.raises(ValueError, match="no quantiles"):
        Digest().quantiles([0.5])


def test_a_tally_counts_as_the_benchmark_does() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.02)
    tally, results = Tally(), []
    for i, (first, gap) in enumerate(zip(samples(200), samples(200, 1), strict=True)):
        request = Request(float(i), "x", 8, prompt_tokens=50)
        if i % 20 == 0:
            failure = Failure(FailureKind.REFUSED, "full")
            results.append(Result(request, float(i), float(i), float(i), failure=failure))
            tally.fail("refused")
            continue
        stamps = tuple(i + first + k * gap / 20 for k in range(8))
        result = Result(request, float(i), float(i), stamps[-1], stamps, (1,) * 8, prompt_tokens=50)
        results.append(result)
        assert result.ttft_s is not None
        assert result.e2e_s is not None
        tally.add(
            prompt=50, output=8, ttft_s=result.ttft_s, tpot_s=result.tpot_s, e2e_s=result.e2e_s,
            met=slo.met(result),
        )  # fmt: skip
    exact, streamed = group_figures("all", results, slo, 1000.0), tally.group("all", 1000.0)
    for name in ("due", "finished", "failed", "met", "failures", "goodput", "goodput_per_s",
                 "prefill_tokens_per_s", "decode_tokens_per_s"):  # fmt: skip
        assert getattr(streamed, name) == getattr(exact, name), name
    assert streamed.tpot is not None
    assert exact.tpot is not None
    assert streamed.tpot.mean == pytest.approx(exact.tpot.mean)
