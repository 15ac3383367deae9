"""Scratch memory of a rank: all there once the domain is open, the system's again once it is closed."""

from __future__ import annotations

import gc
import os

import numpy as np

from dynamictp.testing.native_domain import NativeDomain, Part
from dynamictp.testing.server_process import footprint_of
from tests.kernels.models import make_model

TOKENS = 16_384
SLACK = 1 << 20


def anonymous_bytes() -> int:
    gc.collect()
    return footprint_of(os.getpid())["anonymous_bytes"]


def test_scratch_comes_with_the_domain_and_goes_with_it() -> None:
    model = make_model("llama", "bf16")
    table = np.arange(model.spec.blocks(40) * model.facts.kv_heads, dtype=np.int32)
    part = Part(np.arange(40), 0, table.reshape(-1, model.facts.kv_heads))
    with NativeDomain(model, 1, max_tokens=40) as first:  # tables and threads' stacks are made once
        first.step([part], [39])
    before = anonymous_bytes()
    domain = NativeDomain(model, 1, max_tokens=TOKENS)
    opened = anonymous_bytes()
    residual = TOKENS * model.facts.hidden * 4
    assert residual > 2 * SLACK
    assert opened - before >= residual
    domain.step([part], [39])
    assert anonymous_bytes() - opened < SLACK
    domain.close()
    domain.ranks.clear()
    assert anonymous_bytes() - before < SLACK
