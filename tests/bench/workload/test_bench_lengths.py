from __future__ import annotations

import numpy as np
import pytest

from dynamictp.bench.workload.lengths import Lengths
from dynamictp.errors import ConfigError


@pytest.mark.parametrize(("mean", "p95"), [(100, 250), (1500, 4000), (40, 100), (300, 800)])
def test_samples_have_the_mean_and_the_95th_percentile(mean: float, p95: float) -> None:
    sample = Lengths(mean, p95).sample(np.random.default_rng(0), 200_000)
    assert sample.mean() == pytest.approx(mean, rel=0.02)
    assert np.percentile(sample, 95) == pytest.approx(p95, rel=0.02)
    assert sample.min() >= 1


def test_scale_multiplies_the_distribution() -> None:
    sample = Lengths(300, 800).sample(np.random.default_rng(0), 100_000, scale=0.5)
    assert sample.mean() == pytest.approx(150, rel=0.02)
    assert np.percentile(sample, 95) == pytest.approx(400, rel=0.03)


def test_fixed_lengths_do_not_vary() -> None:
    assert set(Lengths.parse("64").sample(np.random.default_rng(0), 100).tolist()) == {64}


def test_text_forms_read_back() -> None:
    for text in ("64", "100/250", "1500/4000"):
        assert str(Lengths.parse(text)) == text


@pytest.mark.parametrize("text", ["", "x", "100/", "100/50", "100/500", "0.5", "-3", "nan", "100/nan"])
def test_impossible_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Lengths.parse(text)
