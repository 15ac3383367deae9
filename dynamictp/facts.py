"""What every process knows about a model: sizes, shapes and constants, without any weight.

Pure values (no torch, no I/O). `dynamictp.model` reads them from `config.json` or GGUF metadata; layout,
ranges, engine, workers and the advisor compute from them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal["bf16", "fp32"]
WeightType = Literal["", "int8"]
"""How the matrices are stored: in the model's dtype, or quantised."""
DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}

PANEL_ROWS = 16
"""Output rows in one weight panel: the unit in which hidden, MLP and vocabulary rows are cut."""


class RopeFacts(msgspec.Struct, frozen=True):
    """Rotary position embedding: base frequency and how it is stretched for long contexts.

    `factor`, `original_context` and the per-kind fields have the meaning of the Hugging Face
    `rope_scaling` entry of that kind. `attention_factor` multiplies cos and sin (YaRN's mscale).
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


class ModelFacts(msgspec.Struct, frozen=True):
    """Sizes and constants of one decoder-only model. Head counts in heads, all others in elements."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"]
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    """Rows of the embedding, which may exceed the tokenizer's vocabulary."""
    max_context: int
    """Longest sequence (prompt + output) in tokens that the positions of the model cover."""
    norm_eps: float
    rope: RopeFacts
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def qkv_units(self) -> int:
        """Head units of the fused query-key-value projection: query heads, then K heads, then V heads."""
        return self.query_heads + 2 * self.kv_heads

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Bytes of K and V that one token of context takes over all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]
