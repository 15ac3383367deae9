"""The forward pass of one rank: plain functions over weight views, pages and the exchange.

It knows no rank and no group: it computes the rows its views hold, writes them into shared buffers, and meets
the peers at barriers (see `exchange`). Nothing is summed over ranks; the residual stream is fp32 and whole on
every rank. Every output element is computed by one operation of one form whatever the batch and the cut, so
its bits are the same at every degree (design 4).
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from dynamictp.facts import ModelFacts
from dynamictp.model.attention import attend
from dynamictp.model.batch import StepBatch
from dynamictp.model.exchange import Exchange
from dynamictp.model.exchange_size import MIN_ROWS
from dynamictp.model.pages import KVArena, Scratch
from dynamictp.model.rope import RopeTable, rotate
from dynamictp.model.views import HeadUnits, LayerViews, Linear, ModelViews

HEAD_ROWS = 2048
"""Rows of the LM head widened to fp32 at a time (measured: 8.7 ms for 49,152 × 576 at 4 rows)."""


class Forward:
    """One rank's computation in one domain. Holds views and scratch memory, no state between steps."""

    def __init__(
        self,
        facts: ModelFacts,
        views: ModelViews,
        heads: HeadUnits,
        *,
        exchange: Exchange,
        arena: KVArena,
        rope: RopeTable,
    ) -> None:
        self._facts = facts
        self._dtype = views.embed.dtype
        self._views = views
        self._heads = heads
        self._exchange = exchange
        self._arena = arena
        self._rope = rope
        self._scratch = Scratch()
        self._scale = 1 / math.sqrt(facts.head_dim)

    @torch.inference_mode()
    def hidden(self, batch: StepBatch) -> torch.Tensor:
        """Run all layers; fp32 [padded T, H] before the final norm, the same on every rank.

        Writes the pages of the batch's tokens. Meets the peers five times a layer; after the last of them
        every rank is done with the pages. Raises `ValueError` for more tokens than the exchange holds.
        """
        exchange = self._exchange
        rows = len(batch.tokens)
        if rows > exchange.max_tokens:
            raise ValueError(f"a step of {batch.count} tokens; the exchange holds {exchange.max_tokens}")
        rotation = self._rope.rows(batch.positions)
        dim = self._facts.head_dim
        q, attn = exchange.q.view(-1, dim), exchange.attn.view(-1, dim)
        x = self._views.embed[batch.tokens].float()
        for number, layer in enumerate(self._views.layers):
            exchange.on_layer(number)
            self._project(number, layer, x, batch, rotation)
            exchange.barrier()
            for bucket in batch.buckets:
                attend(bucket, number, q=q, out=attn, arena=self._arena, scratch=self._scratch)
            exchange.barrier()
            _write(exchange.o, exchange.attn[:rows], layer.o)
            exchange.barrier()
            x += exchange.o[:rows]
            self._gate(layer, x)
            exchange.barrier()
            _write(exchange.down, exchange.mlp[:rows], layer.down)
            exchange.barrier()
            x += exchange.down[:rows]
        return x

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits of batch rows `rows` (int64 [n]) of `x` from `hidden`: shared fp32 [n, V].

        In fp32 from bf16 weights: bf16 logits tie at the top. Valid until the exchange's logits are written
        again; the caller puts a barrier between its reads and that. Raises `ValueError` beyond `max_rows`.
        """
        count = len(rows)
        if count > self._exchange.max_rows:
            raise ValueError(f"logits of {count} rows; the exchange holds {self._exchange.max_rows}")
        if count < MIN_ROWS:
            rows = torch.cat((rows, rows[:1].expand(MIN_ROWS - count)))
        weight, owned = self._views.head.weight, self._views.head.rows
        normed = self._norm(x.index_select(0, rows), self._views.final_norm)
        out = self._exchange.logits[:count]
        for start in range(0, len(weight), HEAD_ROWS):
            part = weight[start : start + HEAD_ROWS]
            if part.dtype != torch.float32:
                part = self._scratch.take("head", tuple(part.shape)).copy_(part)
            first = owned.start + start
            width = min(len(part), owned.stop - first)
            out[:, first : first + width] = functional.linear(normed, part)[:count, :width]
        self._exchange.barrier()
        return out

    def _project(
        self,
        number: int,
        layer: LayerViews,
        x: torch.Tensor,
        batch: StepBatch,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Queries of the rank's heads to the exchange, its keys and values to the pages."""
        heads, dim = self._heads, self._facts.head_dim
        qkv = _linear(self._norm(x, layer.attn_norm).to(self._dtype), layer.qkv)
        qkv = qkv.view(len(x), -1, dim)
        queries, rotated = len(heads.query), len(heads.query) + len(heads.key)
        if rotated:
            turned = rotate(self._normed_heads(qkv[:, :rotated].float(), layer, queries), *rotation)
            if queries:
                target = self._exchange.q[: len(x)].view(len(x), -1, dim)
                torch.mul(
                    turned[:, :queries], self._scale, out=target[:, heads.query.start : heads.query.stop]
                )
            if batch.k_index is not None:
                self._arena.write_k(number, batch.k_index, turned[: batch.count, queries:])
        if batch.v_index is not None:
            self._arena.write_v(number, batch.v_index, qkv[: batch.count, rotated:])

    def _normed_heads(self, heads: torch.Tensor, layer: LayerViews, queries: int) -> torch.Tensor:
        """Per-head norms of queries and keys, for models that have them. [T, heads, D]"""
        if layer.q_norm is None or layer.k_norm is None:
            return heads
        parts = (self._norm(heads[:, :queries], layer.q_norm), self._norm(heads[:, queries:], layer.k_norm))
        return torch.cat(parts, 1)

    def _gate(self, layer: LayerViews, x: torch.Tensor) -> None:
        """SiLU(gate) · up of the rank's columns, in fp32, to the exchange."""
        normed = self._norm(x, layer.mlp_norm).to(self._dtype)
        gate = _linear(normed, layer.gate).float()
        # Not functional.silu: that computes the last elements of a tensor by another exponential than the
        # rest. This one is the same everywhere, and sums and quotients are exact.
        gated = gate.div(gate.neg().exp_().add_(1)).mul_(_linear(normed, layer.up))
        owned = layer.gate.rows
        self._exchange.mlp[: len(x), owned.start : owned.stop] = gated

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._facts.norm_eps)


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """[T, len(rows)] in the weights' type, or fp32 with a bias."""
    out = functional.linear(x, linear.weight)[:, : len(linear.rows)]
    return out if linear.bias is None else out.float() + linear.bias


def _write(target: torch.Tensor, x: torch.Tensor, linear: Linear) -> None:
    """Write the rank's columns of a projection of `x` [T, K]."""
    target[: len(x), linear.rows.start : linear.rows.stop] = _linear(x, linear)
