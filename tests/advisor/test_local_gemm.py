"""The measurement of a core's arithmetic, on a clock of its own."""

from __future__ import annotations

import pytest

from dynamictp.advisor import local_gemm


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_the_first_product_does_not_count(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = 0.0
    durations = iter([0.44, 0.03, 0.02, *[0.025] * 100])

    def product(*_: object, **__: object) -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(local_gemm.np, "matmul", product)
    monkeypatch.setattr(local_gemm.time, "perf_counter", lambda: now)
    assert local_gemm.gemm_flops(seconds) == pytest.approx(2 * 1024**3 / 0.02)
