"""GGUF file → `ModelSource`: facts from metadata, tensors under Hugging Face names and in their row order."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from dynamictp.errors import ModelRefused
from dynamictp.facts import ModelFacts
from dynamictp.model.gguf_facts import facts_from_gguf
from dynamictp.model.gguf_file import GGUFFile, GGUFTensor
from dynamictp.model.int8 import Int8Rows
from dynamictp.model.source import Array, check_tensors, widen

if TYPE_CHECKING:
    from dynamictp.model.chat import ChatTemplate
    from dynamictp.model.tokenizer import Tokenizer

Kind = GGMLQuantizationType

_PLAIN: dict[GGMLQuantizationType, np.dtype[np.generic]] = {
    Kind.F32: np.dtype("<f4"),
    Kind.F16: np.dtype("<f2"),
    Kind.BF16: np.dtype(ml_dtypes.bfloat16),
}
_Q8_0_BYTES = 34  # of a block: an fp16 scale and 32 integers
_BLOCKS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K)
SUPPORTED_TYPES = tuple(kind.name for kind in (*_PLAIN, *_BLOCKS))

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Read into the facts, not into the weights.
_FACTS_ONLY = ("rope_freqs.weight",)


class GGUFSource:
    """A `ModelSource` over one GGUF file. Owns the file's memory map; safe to read from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._facts = facts_from_gguf(self._file)
        self._tensors = {
            hf_name(name): tensor for name, tensor in self._file.tensors.items() if name not in _FACTS_ONLY
        }
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._names = check_tensors(shapes, self._facts, str(path))
        for name in self._names:
            _check_type(name, self._tensors[name], str(path))

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def label(self) -> str:
        return self._file.path.stem

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def rows(self, name: str, start: int, stop: int) -> Array:
        tensor = self._tensors[name]
        part = self._raw_rows(name, start, stop)
        plain = _PLAIN.get(tensor.kind)
        if plain is not None:
            return part.view(plain).reshape(-1, *tensor.shape[1:])
        with np.errstate(invalid="ignore", over="ignore"):  # a corrupt scale: the loader refuses the values
            return dequantize(part, tensor.kind)

    def int8_rows(self, name: str, start: int, stop: int) -> Int8Rows | None:
        tensor = self._tensors[name]
        if tensor.kind is not Kind.Q8_0:
            return None
        blocks = self._raw_rows(name, start, stop).reshape(stop - start, -1, _Q8_0_BYTES)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
        return Int8Rows(blocks[:, :, 2:].view(np.int8).reshape(stop - start, -1), scales)

    def tensor(self, name: str) -> Array:
        return widen(self.rows(name, 0, self.shape(name)[0]))

    def sampling_defaults(self) -> dict[str, float]:
        return {}

    def tokenizer(self) -> Tokenizer:
        from dynamictp.model.gguf_tokenizer import tokenizer_from_gguf  # noqa: PLC0415  (workers never need it)

        return tokenizer_from_gguf(self._file, self._facts)

    def chat_template(self) -> ChatTemplate:
        from dynamictp.model.chat import ChatTemplate  # noqa: PLC0415  (workers never need it)
        from dynamictp.model.gguf_tokenizer import special_tokens_from_gguf  # noqa: PLC0415

        template = self._file.get("tokenizer.chat_template")
        return ChatTemplate(
            template if isinstance(template, str) else None,
            special_tokens=special_tokens_from_gguf(self._file),
        )

    def _raw_rows(self, name: str, start: int, stop: int) -> Array:
        """Stored bytes of rows in Hugging Face order."""
        raw = self._file.raw(self._tensors[name])
        order = self._row_order(name)
        return raw[start:stop] if order is None else raw[order[start:stop]]

    def _row_order(self, name: str) -> Array | None:
        if name.endswith((".q_proj.weight", ".q_proj.bias")):
            return self._permuted["query"]
        if name.endswith((".k_proj.weight", ".k_proj.bias")):
            return self._permuted["key"]
        return None

    @cached_property
    def _permuted(self) -> dict[Literal["query", "key"], Array | None]:
        # Only the llama architecture rotates neighbouring pairs in GGUF; the others keep half-and-half.
        if self._file.get("general.architecture") != "llama":
            return {"query": None, "key": None}
        heads, dim = self._facts.query_heads, self._facts.head_dim
        return {"query": stored_row_order(heads, dim), "key": stored_row_order(self._facts.kv_heads, dim)}


def stored_row_order(heads: int, head_dim: int) -> Array:
    """For each Hugging Face row of a Q or K projection, the row where a llama-architecture GGUF stores it.

    Hugging Face rotates row j with row j + D/2 of a head; GGUF interleaves those pairs to 2j and 2j + 1.
    """
    within = np.arange(head_dim).reshape(head_dim // 2, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * head_dim + within).reshape(-1)


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; names that have none are returned unchanged (and refused later)."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name


def _check_type(name: str, tensor: GGUFTensor, where: str) -> None:
    if tensor.kind not in _PLAIN and (tensor.kind not in _BLOCKS or len(tensor.shape) != 2):
        raise ModelRefused(
            f"{where}: tensor {name} is stored as {tensor.kind.name}, which is not supported; "
            f"supported: {', '.join(SUPPORTED_TYPES)} (vectors only unquantised)"
        )
