"""What a model file must offer, whatever its format, and the names its tensors have.

Tensor names, shapes and row order are those of the Hugging Face checkpoint; a source in another format
translates. Rows are read in ranges so that a loader never holds more than one slice of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dynamictp.errors import ModelRefused
from dynamictp.facts import ModelFacts
from dynamictp.model.int8 import Int8Rows

if TYPE_CHECKING:
    from dynamictp.model.chat import ChatTemplate
    from dynamictp.model.tokenizer import Tokenizer

Array = NDArray[Any]


class ModelSource(Protocol):
    """An opened model: its facts, its tensors under Hugging Face names, its tokenizer and chat template.

    Everything is checked against the file when it is opened, so that reading later fails only when the file
    changes underneath.
    """

    @property
    def path(self) -> Path: ...

    @property
    def label(self) -> str:
        """Name of the model for people: the folder's or the file's, without extension."""
        ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names of the tensors that the model uses."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, `(rows, columns)` or `(elements,)`."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of tensor `name` (elements when it is a vector).

        The type is as stored for float32, float16 and bfloat16, and float32 for block-quantised tensors.
        """
        ...

    def int8_rows(self, name: str, start: int, stop: int) -> Int8Rows | None:
        """Rows [start, stop) of a matrix that is stored in the form of `model.int8`; None for all others."""
        ...

    def tensor(self, name: str) -> Array:
        """The whole of tensor `name`: float32, or bfloat16 where it is stored so."""
        ...

    def sampling_defaults(self) -> dict[str, float]:
        """Sampling values the model's makers recommend; empty when they gave none."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def chat_template(self) -> ChatTemplate: ...


def widen(values: Array) -> Array:
    """float16 → float32; other types unchanged."""
    return values.astype(np.float32) if values.dtype == np.float16 else values


def expected_shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model has, by Hugging Face name."""
    hidden, wide = facts.hidden, facts.intermediate
    query, kv = facts.query_heads * facts.head_dim, facts.kv_heads * facts.head_dim
    linears: list[tuple[str, int, int, bool]] = [
        ("self_attn.q_proj", query, hidden, facts.qkv_bias),
        ("self_attn.k_proj", kv, hidden, facts.qkv_bias),
        ("self_attn.v_proj", kv, hidden, facts.qkv_bias),
        ("self_attn.o_proj", hidden, query, facts.output_bias),
        ("mlp.gate_proj", wide, hidden, facts.mlp_bias),
        ("mlp.up_proj", wide, hidden, facts.mlp_bias),
        ("mlp.down_proj", hidden, wide, facts.mlp_bias),
    ]
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if facts.qk_norm:
        norms |= {"self_attn.q_norm": facts.head_dim, "self_attn.k_norm": facts.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (facts.vocab, hidden)}
    for layer in range(facts.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not facts.tied_head:
        shapes["lm_head.weight"] = (facts.vocab, hidden)
    return shapes


def check_tensors(found: Mapping[str, tuple[int, ...]], facts: ModelFacts, where: str) -> frozenset[str]:
    """Compare a file's tensors with what the facts call for; return the names the model uses.

    Raises `ModelRefused` for missing tensors, wrong shapes, and tensors the forward pass would ignore.
    """
    expected = expected_shapes(facts)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelRefused(f"{where}: {len(missing)} tensors are missing: {_some(missing)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelRefused(f"{where}: tensor {name} has shape {found[name]}, expected {shape}")
    # A tied head may be stored again; inverse frequencies are recomputed from the facts.
    unknown = [
        name
        for name in found
        if name not in expected and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")
    ]
    if unknown:
        raise ModelRefused(
            f"{where}: {len(unknown)} tensors are not part of this architecture: {_some(sorted(unknown))}"
        )
    return frozenset(expected)


def _some(names: Iterable[str], limit: int = 4) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (" …" if len(listed) > limit else "")
