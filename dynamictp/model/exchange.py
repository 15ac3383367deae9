"""The shared buffers of one domain, as its ranks see them.

Every rank writes its own columns (or rows) of a buffer, then all meet at a barrier, then every rank reads the
whole. Model code knows no more of its peers than this.

A layer has five barriers, and each buffer is written between the same two of them:

```
 ── 5 ──▶ write q, pages ── 1 ──▶ read q, pages; write attn ── 2 ──▶ read attn; write o ── 3 ──▶
          read o; write mlp ── 4 ──▶ read mlp; write down ── 5 ──▶ read down (next layer, or the logits)
```

So between the last read of a buffer and its next write lies at least one barrier, and one copy of each
suffices: q is read before 2 and written again after 5; attn before 3, after 1; o before 4, after 2; mlp
before 5, after 3; down before the next 1, after the next 4. `logits` are written and read between two
barriers of their own; `tokens` are written before the step's last barrier and read after it, and the next
step has barriers of its own before it writes them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dynamictp.facts import DType, ModelFacts
from dynamictp.model.exchange_size import exchange_layout

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "int64": torch.int64}


@dataclass(frozen=True)
class Exchange:
    """Views of the shared payload, T = tokens and R = rows it was sized for, and the way to meet the peers.

    `barrier` returns when every rank has called it, and makes all writes before it visible to all reads after
    it; it raises `CommunicatorBroken`. `on_layer` is told which layer begins.
    """

    q: torch.Tensor
    """fp32 [T, Nq·D], rotated and scaled by 1/√D."""
    attn: torch.Tensor
    """[T, Nq·D]"""
    o: torch.Tensor
    """[T, H]"""
    mlp: torch.Tensor
    """[T, I]"""
    down: torch.Tensor
    """[T, H]"""
    logits: torch.Tensor
    """fp32 [R, V]"""
    tokens: torch.Tensor
    """int64 [R, 1]: the sampled tokens."""
    barrier: Callable[[], None]
    on_layer: Callable[[int], None] = lambda layer: None

    @property
    def max_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def max_rows(self) -> int:
        return self.logits.shape[0]


def open_exchange(
    payload: torch.Tensor,
    facts: ModelFacts,
    dtype: DType,
    *,
    max_tokens: int,
    max_rows: int,
    barrier: Callable[[], None],
    on_layer: Callable[[int], None] = lambda layer: None,
) -> Exchange:
    """Views of `payload` (uint8, at least `exchange_bytes` long, shared by all ranks)."""
    views = {}
    for name, buffer in exchange_layout(facts, dtype, max_tokens, max_rows).items():
        flat = payload[buffer.offset : buffer.offset + buffer.nbytes]
        views[name] = flat.view(TORCH_DTYPE[buffer.dtype]).view(buffer.shape)
    return Exchange(**views, barrier=barrier, on_layer=on_layer)
