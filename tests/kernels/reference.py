"""A plain decoder in fp32, without pages, ranks or panels: what the native path is compared with."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dynamictp.facts import ModelFacts
from dynamictp.model.rope import RopeTable, rotate
from dynamictp.model.weights import WeightIndex
from dynamictp.testing.harness import view_fp32


def reference_logits(
    facts: ModelFacts, index: WeightIndex, weights: NDArray[np.uint8], tokens: NDArray[np.int64]
) -> NDArray[np.float32]:
    """[T, V] of one sequence, from row-major weights."""

    def weight(name: str) -> torch.Tensor:
        return torch.from_numpy(view_fp32(index, weights, name).copy())

    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + facts.norm_eps) * scale

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ weight(name).T
        return out + weight(f"{name}_bias") if f"{name}_bias" in index.entries else out

    count, dim, queries, keys = len(tokens), facts.head_dim, facts.query_heads, facts.kv_heads
    cos, sin = RopeTable(facts).rows(torch.arange(count))
    causal = torch.full((count, count), -torch.inf).triu(1)
    x = weight("embed")[torch.from_numpy(tokens)]
    for layer in range(facts.layers):
        at = f"layers.{layer}."
        qkv = linear(norm(x, weight(f"{at}attn_norm")), f"{at}qkv").view(count, -1, dim)
        q, k, v = qkv.split((queries, keys, keys), 1)
        if facts.qk_norm:
            q, k = norm(q, weight(f"{at}q_norm")), norm(k, weight(f"{at}k_norm"))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(facts.group, 1), v.repeat_interleave(facts.group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5 + causal
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
        x = x + linear(attended, f"{at}o")
        normed = norm(x, weight(f"{at}mlp_norm"))
        gated = torch.nn.functional.silu(linear(normed, f"{at}gate")) * linear(normed, f"{at}up")
        x = x + linear(gated, f"{at}down")
    logits = norm(x, weight("final_norm")) @ weight("embed" if facts.tied_head else "head").T
    return logits.numpy()
