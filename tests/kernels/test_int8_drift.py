"""int8 weights against bf16 ones, on the embedded model and English text, teacher-forced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamictp.facts import WeightType
from dynamictp.kernels.bench import load, tables
from dynamictp.kernels.select import kernel_level
from dynamictp.model.load import open_model
from dynamictp.testing.native_domain import NativeDomain, Part
from tests.kernels import models  # noqa: F401  (skips without the extension)

TOKENS = 640
CHUNK = 64


def logprobs(tokens: NDArray[np.int64], weights: WeightType) -> NDArray[np.float64]:
    """[T, V] at every token."""
    loaded = load("demo", "bf16", kernel_level(), len(tokens), weights)
    table = tables(loaded, 1)[0]
    parts = []
    with NativeDomain(loaded.model, 1, max_tokens=CHUNK, max_rows=CHUNK) as domain:
        for start in range(0, len(tokens), CHUNK):
            part = Part(tokens[start : start + CHUNK], start, table)
            logits = domain.compute([part], range(len(part.tokens)))[0].astype(np.float64)
            top = logits.max(1, keepdims=True)
            parts.append(logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True)))
    return np.concatenate(parts)


def test_log_probabilities_drift_little() -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()[:6000]
    encoded = open_model("demo").tokenizer().encode(text, add_special_tokens=True)
    tokens = np.array(encoded[:TOKENS], np.int64)
    assert len(tokens) == TOKENS
    plain, int8 = logprobs(tokens, ""), logprobs(tokens, "int8")
    places = np.arange(TOKENS - 1)
    drift = np.abs(plain - int8)[places, tokens[1:]]
    same = (plain.argmax(1) == int8.argmax(1)).mean()
    divergence = (np.exp(plain) * (plain - int8)).sum(1).mean()
    print(
        f"over {len(drift)} tokens: mean |d log p| {drift.mean():.4f}, P99 {np.quantile(drift, 0.99):.3f}, "
        f"max {drift.max():.3f}; KL {divergence:.2e}; same arg-max {same:.1%}; "
        f"perplexity {np.exp(-plain[places, tokens[1:]].mean()):.3f} and "
        f"{np.exp(-int8[places, tokens[1:]].mean()):.3f}"
    )
    assert drift.mean() <= 0.06
    assert drift.max() <= 1.0
    assert same >= 0.95
