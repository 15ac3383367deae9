"""Small sound models of every format, as mutable parts. Nothing here imports torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.model.mutants.gguf_pieces import GGUFModel, Piece

LAYERS, HIDDEN, HEADS, HEAD_DIM, WIDE = 1, 32, 2, 16, 64
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' ~ 'assistant\n' }}{% endif %}"
)
_SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Seed:
    """A model as parts: file name → bytes, a JSON value, or a GGUF model or its pieces. `entry` is opened."""

    name: str
    entry: str
    parts: dict[str, Any]

    def write(self, folder: Path) -> Path:
        """Write all files; returns the path to open."""
        for name, part in self.parts.items():
            (folder / name).write_bytes(serialised(part))
        return folder / self.entry if self.entry else folder


def serialised(part: Any) -> bytes:
    """The bytes of a part of a seed."""
    if isinstance(part, bytes):
        return part
    if isinstance(part, GGUFModel):
        part = part.pieces()
    if isinstance(part, list) and part and isinstance(part[0], Piece):
        return b"".join(piece.content for piece in part)
    return json.dumps(part).encode()


@cache
def seeds() -> tuple[Seed, ...]:
    """Every kind of model file this server reads, smallest form."""
    return (_gguf_byte_level(), _gguf_sentencepiece(), _folder(sharded=False), _folder(sharded=True))


def _letters() -> list[str]:
    """GPT-2's printable character for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _byte_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges."""
    merges = ["h e", "l l", "he ll", "Ġ w"]
    return [*_SPECIAL, *_letters(), *(merge.replace(" ", "") for merge in merges)], merges


def _gguf_facts(arch: str, vocab: int, **more: Any) -> dict[str, Any]:
    facts = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": [1] * LAYERS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": vocab,
        **more,
    }
    return {
        "general.architecture": arch,
        "general.alignment": 32,
        **{f"{arch}.{key}": v for key, v in facts.items()},
    }


def _gguf_tensors(vocab: int, kind: Kind, *, bias: bool) -> dict[str, tuple[Kind, tuple[int, ...]]]:
    tensors: dict[str, tuple[Kind, tuple[int, ...]]] = {"token_embd.weight": (kind, (vocab, HIDDEN))}
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        query, kv = HEADS * HEAD_DIM, HEAD_DIM
        for name, rows, columns in [
            ("attn_q", query, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, query),
            ("ffn_gate", WIDE, HIDDEN),
            ("ffn_up", WIDE, HIDDEN),
            ("ffn_down", HIDDEN, WIDE),
        ]:
            tensors[f"{at}{name}.weight"] = (kind, (rows, columns))
            if bias and name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"{at}{name}.bias"] = (Kind.F32, (rows,))
        tensors[f"{at}attn_norm.weight"] = (Kind.F32, (HIDDEN,))
        tensors[f"{at}ffn_norm.weight"] = (Kind.F32, (HIDDEN,))
    tensors["output_norm.weight"] = (Kind.F32, (HIDDEN,))
    return tensors


def _gguf_byte_level() -> Seed:
    tokens, merges = _byte_vocabulary()
    entries = {
        **_gguf_facts("llama", len(tokens)),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in _SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    tensors = _gguf_tensors(len(tokens), Kind.Q8_0, bias=False)
    tensors["rope_freqs.weight"] = (Kind.F32, (HEAD_DIM // 2,))
    return Seed("gguf-bytes", "m.gguf", {"m.gguf": GGUFModel(entries, tensors)})


def _gguf_sentencepiece() -> Seed:
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    entries = {
        **_gguf_facts(
            "qwen2",
            len(tokens),
            **{
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
        ),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": TEMPLATE,
    }
    model = GGUFModel(entries, _gguf_tensors(len(tokens), Kind.F16, bias=True))
    return Seed("gguf-sentencepiece", "m.gguf", {"m.gguf": model})


def _folder(*, sharded: bool) -> Seed:
    tokens, merges = _byte_vocabulary()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "vocab_size": len(tokens),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        if sharded
        else {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": [2],
        "bos_token_id": 1,
    }
    tokenizer_config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "add_bos_token": True,
        "chat_template": [
            {"name": "default", "template": TEMPLATE},
            {"name": "rag", "template": "{{ documents }}"},
        ],
    }
    parts: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [2], "do_sample": True, "temperature": 0.6, "top_k": 20},
        "tokenizer.json": _tokenizer_json(tokens, merges),
        "tokenizer_config.json": tokenizer_config,
    }
    weights = _weights(len(tokens))
    if not sharded:
        parts["chat_template.jinja"] = TEMPLATE.encode()
        parts["model.safetensors"] = save(weights)
        return Seed("folder", "", parts)
    names = sorted(weights)
    half = len(names) // 2
    files = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, part in files.items():
        parts[file] = save({name: weights[name] for name in part})
    parts["model.safetensors.index.json"] = {
        "metadata": {"total_size": 1},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
    return Seed("folder-sharded", "", parts)


def _weights(vocab: int) -> dict[str, np.ndarray[Any, Any]]:
    query, kv, at = HEADS * HEAD_DIM, HEAD_DIM, "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{at}input_layernorm.weight": (HIDDEN,),
        f"{at}post_attention_layernorm.weight": (HIDDEN,),
        f"{at}self_attn.q_proj.weight": (query, HIDDEN),
        f"{at}self_attn.k_proj.weight": (kv, HIDDEN),
        f"{at}self_attn.v_proj.weight": (kv, HIDDEN),
        f"{at}self_attn.o_proj.weight": (HIDDEN, query),
        f"{at}mlp.gate_proj.weight": (WIDE, HIDDEN),
        f"{at}mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{at}mlp.down_proj.weight": (HIDDEN, WIDE),
    }
    return {name: np.ones(shape, np.float16) for name, shape in shapes.items()}


def _tokenizer_json(tokens: list[str], merges: list[str]) -> Any:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return json.loads(backend.to_str())
