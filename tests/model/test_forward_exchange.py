"""The exchange payload: buffers apart, aligned, and as large as said."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dynamictp.facts import DType
from dynamictp.model.exchange import open_exchange
from dynamictp.model.exchange_size import exchange_bytes, exchange_layout
from dynamictp.testing.harness import TINY


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (64, 5), (513, 64)])
def test_buffers_lie_apart(dtype: DType, tokens: int, rows: int) -> None:
    buffers = sorted(exchange_layout(TINY, dtype, tokens, rows).values())
    for one, following in pairwise(buffers):
        assert one.offset + one.nbytes <= following.offset
    assert all(buffer.offset % 64 == 0 for buffer in buffers)
    size = exchange_bytes(TINY, dtype, tokens, rows)
    payload = torch.zeros(size, dtype=torch.uint8)
    exchange = open_exchange(payload, TINY, dtype, max_tokens=tokens, max_rows=rows, barrier=lambda: None)
    assert exchange.max_tokens >= max(tokens, 4)
    assert exchange.max_rows == max(rows, 4)
    assert exchange.logits.shape == (max(rows, 4), TINY.vocab)
    exchange.tokens.fill_(-1)
    exchange.q.fill_(1.0)
    assert exchange.tokens.eq(-1).all()
    assert exchange.logits.eq(0).all()
