"""Packed panels: their order, and that packed weights are the row-major ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest

from dynamictp.errors import ModelRefused
from dynamictp.facts import DType
from dynamictp.model.load import open_model
from dynamictp.model.panels import pack, unpack
from dynamictp.model.weights import load_weights, plan_weights, view_weight


def test_order_in_a_bf16_panel() -> None:
    rows = np.arange(32 * 6).reshape(32, 6).astype(ml_dtypes.bfloat16)
    target = np.empty_like(rows)
    pack(rows, target)
    panels = target.reshape(2, 3, 16, 2)
    for row, column in ((0, 0), (5, 3), (15, 5), (16, 4), (31, 1)):
        assert panels[row // 16, column // 2, row % 16, column % 2] == rows[row, column]


def test_order_in_an_fp32_panel() -> None:
    rows = np.arange(32 * 5, dtype=np.float32).reshape(32, 5)
    target = np.empty_like(rows)
    pack(rows, target)
    assert np.array_equal(target.reshape(2, 5, 16)[1, 3], rows[16:, 3])
    assert np.array_equal(unpack(target), rows)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("variant", ["llama-untied-bias", "qwen3"])
def test_packed_weights_are_the_same_weights(
    checkpoint: Callable[[str], Path], variant: str, dtype: DType
) -> None:
    source = open_model(str(checkpoint(variant)))
    plans = {layout: plan_weights(source.facts, dtype, layout) for layout in ("rows", "panels")}
    buffers = {layout: np.full(plan.total_bytes, 0xFF, np.uint8) for layout, plan in plans.items()}
    for layout, plan in plans.items():
        for part in range(3):
            load_weights(source, plan, buffers[layout], part=(part, 3))
    for name, entry in plans["panels"].entries.items():
        stored = view_weight(plans["panels"], buffers["panels"], name)
        rows = unpack(stored) if len(entry.shape) == 2 else stored
        assert rows.tobytes() == view_weight(plans["rows"], buffers["rows"], name).tobytes(), name


def test_heads_must_be_whole_panels(checkpoint: Callable[[str], Path]) -> None:
    facts = open_model(str(checkpoint("llama"))).facts
    with pytest.raises(ModelRefused, match="head_dim"):
        plan_weights(msgspec.structs.replace(facts, head_dim=24), "bf16", "panels")
