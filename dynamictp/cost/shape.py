"""What the cost model knows of a model: sizes by part, bytes, FLOPs. Pure.

`ModelFacts` describes what this server runs; `ModelShape` also covers what an advisor is asked about:
mixtures of experts, multi-head latent attention, sliding windows, quantised weights. Counts of parameters
follow the tensors of the published checkpoints, so that they equal what the model cards state.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dynamictp.facts import DTYPE_BYTES, DType, ModelFacts

AttentionKind = Literal["MHA", "GQA", "MQA", "MLA"]


class Experts(msgspec.Struct, frozen=True):
    """The mixture-of-experts part: every MoE layer has `count` experts of `intermediate` columns, of which
    a token uses `per_token`, and shared ones of `shared_intermediate` columns in all. The first
    `dense_layers` layers (and those skipped by the step) have a plain MLP instead.
    """

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    dense_layers: int = 0


class LatentAttention(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): K and V of all heads are compressed into
    one latent vector per token, of `kv_rank` elements, beside a rotary key of `rope_dim` shared by the heads.
    """

    q_rank: int
    """0: queries are not compressed."""
    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int


class WeightFormat(msgspec.Struct, frozen=True):
    """How weights are stored. Bits per parameter, scales included; embedding and head often stay wide."""

    name: str = "bf16"
    bits: float = 16.0
    embedding_bits: float = 16.0
    compute: Literal["bf16", "fp8"] = "bf16"
    """Type of the matrix products: FP8 checkpoints use the FP8 peak where the device has one."""


class Parts(msgspec.Struct, frozen=True):
    """Parameters by part of the model."""

    embedding: int
    attention: int
    mlp: int
    """Plain MLPs and shared experts: every token passes through them."""
    experts: int
    """Routed experts: a token passes through `per_token` of them."""
    norms: int
    head: int
    """0 when tied to the embedding."""

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.experts + self.norms + self.head


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of one decoder-only model. Head counts in heads, all others in elements."""

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window: int = 0
    """Tokens that a windowed layer attends to; 0: no windowed layer."""
    windowed_layers: int = 0
    weights: WeightFormat = WeightFormat()
    kv_bytes_per_element: int = 2
    note: str = ""
    """What the reader of the file assumed, in a sentence."""

    @classmethod
    def of(cls, facts: ModelFacts, name: str = "", dtype: DType = "bf16") -> ModelShape:
        """The shape of a model that this server runs."""
        bits = 8.0 * DTYPE_BYTES[dtype]
        return cls(
            name=name or facts.family,
            layers=facts.layers,
            hidden=facts.hidden,
            query_heads=facts.query_heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            intermediate=facts.intermediate,
            vocab=facts.vocab,
            max_context=facts.max_context,
            tied_head=facts.tied_head,
            qkv_bias=facts.qkv_bias,
            output_bias=facts.output_bias,
            mlp_bias=facts.mlp_bias,
            qk_norm=facts.qk_norm,
            weights=WeightFormat(dtype, bits, bits),
            kv_bytes_per_element=DTYPE_BYTES[dtype],
        )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def attention(self) -> AttentionKind:
        """The attention's name in the literature."""
        if self.latent is not None:
            return "MLA"
        if self.kv_heads == self.query_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def moe_layers(self) -> int:
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def attention_per_layer(self) -> int:
        """Parameters of the attention projections of one layer, biases and QK norms included."""
        hidden, heads = self.hidden, self.query_heads
        if self.latent is not None:
            mla = self.latent
            query_dim = heads * (mla.nope_dim + mla.rope_dim)
            queries = mla.q_rank * (hidden + 1 + query_dim) if mla.q_rank else hidden * query_dim
            latent = hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank
            up = mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
            return queries + latent + up + heads * mla.v_dim * hidden
        query, kv = heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (query + 2 * kv) * self.qkv_bias + hidden * self.output_bias
        return hidden * (2 * query + 2 * kv) + biases + 2 * self.head_dim * self.qk_norm

    @property
    def parts(self) -> Parts:
        """Parameters by part, equal to the tensors of the checkpoint."""
        hidden = self.hidden
        dense = 3 * hidden * self.intermediate + (2 * self.intermediate + hidden) * self.mlp_bias
        mlp, routed = self.layers * dense, 0
        if self.experts is not None:
            moe, expert = self.experts, 3 * hidden * self.experts.intermediate
            shared_and_router = 3 * hidden * moe.shared_intermediate + hidden * moe.count
            mlp = moe.dense_layers * dense + self.moe_layers * shared_and_router
            routed = self.moe_layers * moe.count * expert
        return Parts(
            embedding=self.vocab * hidden,
            attention=self.layers * self.attention_per_layer,
            mlp=mlp,
            experts=routed,
            norms=(2 * self.layers + 1) * hidden,
            head=0 if self.tied_head else self.vocab * hidden,
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token's matrix products use: without the embedding, which is a look-up."""
        parts, used = self.parts, 0
        if self.experts is not None:
            used = parts.experts * self.experts.per_token // self.experts.count
        return parts.attention + parts.mlp + used + self.vocab * self.hidden

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights as stored for serving."""
        parts = self.parts
        wide = parts.embedding + parts.head
        return (parts.total - wide) * self.weights.bits / 8 + wide * self.weights.embedding_bits / 8

    @property
    def kv_elements_per_layer(self) -> int:
        """Cached elements of one token in one layer, over all heads."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim

    def kv_bytes(self, tokens: float, kv_heads: int | None = None) -> float:
        """Bytes of the cache for one sequence of `tokens` tokens, of `kv_heads` heads (None: all).

        Full attention: 2 · layers · KV heads · head_dim · bytes per token (Llama-2-70B: 2·80·8·128·2 =
        327,680). MLA has one latent vector whatever the heads, so every rank holds all of it. Windowed layers
        keep at most `window` tokens.
        """
        elements = float(self.kv_elements_per_layer)
        if kv_heads is not None and self.latent is None:
            elements *= kv_heads / self.kv_heads
        return self.context_layers(tokens) * elements * self.kv_bytes_per_element

    def context_layers(self, tokens: float) -> float:
        """Σ over layers of the tokens that layer attends to."""
        if not self.windowed_layers:
            return self.layers * tokens
        seen = min(tokens, float(self.window))
        return (self.layers - self.windowed_layers) * tokens + self.windowed_layers * seen

    @property
    def attention_flops_per_pair(self) -> float:
        """FLOPs of one (query token, context token) pair in one layer, all heads: the score and the weighted
        sum, 2 multiply-adds each element. MLA: with the up-projections absorbed into queries and outputs.
        """
        if self.latent is not None:
            return 2.0 * self.query_heads * (2 * self.latent.kv_rank + self.latent.rope_dim)
        return 4.0 * self.query_heads * self.head_dim

    def flops_per_token(self, context: float) -> float:
        """FLOPs of one token with `context` tokens before it: 2 per active parameter (Kaplan et al. 2020,
        table 1), plus attention over the context.
        """
        attention = self.context_layers(context) * self.attention_flops_per_pair
        return 2.0 * self.active_parameters + attention

    def prefill_flops(self, tokens: float) -> float:
        """FLOPs of a prompt of `tokens` tokens: causal attention sees half of the pairs; the head runs for
        the last token only.
        """
        head = 2.0 * self.vocab * self.hidden
        linear = (2.0 * self.active_parameters - head) * tokens + head
        return linear + tokens * self.context_layers(tokens / 2) * self.attention_flops_per_pair
