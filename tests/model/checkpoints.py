"""Small random models on disk, as Hugging Face folders and as GGUF files with the same weights.

The sizes allow every cut up to nine (9 query heads, 3 KV heads, hidden and MLP of at least nine panels), and
one vocabulary is not a whole number of panels. Values are exact in float32, float16 and bfloat16, so the
stored type must not matter. The tokenizer is the demo model's, cut to the model's vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from dynamictp.model.load import open_model

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
Stored = Literal["F32", "F16", "BF16"]

VOCAB = 1000
"""Not a multiple of 16."""

ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-untied-bias": {"family": "llama", "tied": False, "bias": True},
    "llama-rope3": {"family": "llama", "rope": "llama3", "vocab": 1008},
    "llama-linear": {"family": "llama", "rope": "linear"},
    "mistral-untied": {"family": "mistral", "tied": False},
    "qwen2": {"family": "qwen2"},
    "qwen2-yarn": {"family": "qwen2", "tied": False, "rope": "yarn"},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "qwen3-untied": {"family": "qwen3", "tied": False, "sharded": True},
}
"""Arguments of `make_checkpoint` that cover every family and branch of the forward pass."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_checkpoint(
    family: Family,
    path: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    sharded: bool = False,
    rope: str = "default",
    bias: bool = False,
    vocab: int = VOCAB,
    hidden: int = 144,
    head_dim: int = 16,
    intermediate: int = 288,
    layers: int = 3,
    stored: Stored = "F32",
) -> Path:
    """Write a random model of `family` into folder `path` (created), saved by transformers."""
    import torch
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[family]
    extra: dict[str, Any] = {
        "llama": {"attention_bias": bias, "mlp_bias": bias},
        "mistral": {"sliding_window": None},
    }
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=head_dim,
        max_position_embeddings=16384 if rope == "llama3" else 2048,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 10000.0, **ROPE[rope]},
        bos_token_id=1,
        eos_token_id=2,
        **extra.get(family, {}),
    )
    model = model_class(config)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_random(rng, name, tuple(parameter.shape))))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[stored]
    model.to(dtype).save_pretrained(path, **({"max_shard_size": "800KB"} if sharded else {}))
    write_tokenizer(path, vocab)
    return path


def make_variant(variant: str, path: Path, **changes: Any) -> Path:
    """`make_checkpoint` with the arguments of `VARIANTS[variant]`."""
    return make_checkpoint(path=path, **{**VARIANTS[variant], **changes})


def write_tokenizer(path: Path, vocab: int) -> None:
    """The demo model's tokenizer with its first `vocab` tokens (ids follow the order of the merges)."""
    layout = json.loads(open_model("demo").tokenizer().backend.to_str())
    model = layout["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < vocab}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (path / "tokenizer.json").write_text(json.dumps(layout, ensure_ascii=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_gguf(
    folder: Path, path: Path, stored: str = "F32", *, metadata: dict[str, Any] | None = None
) -> Path:
    """Write the model in `folder` as GGUF, matrices stored as `stored` (F32, F16, BF16, Q4_0, Q4_1, Q8_0).

    Rows of Q and K are reordered for the llama architecture the way converters do. `metadata` adds keys,
    unsigned integers, floats or strings by type. Returns `path`.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    _write_facts(writer, config)
    _write_vocabulary(writer, folder)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata or {}).items():
        add[type(value)](key, value)
    kind = gguf.GGMLQuantizationType[stored]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    for name, values in sorted(_tensors(folder).items()):
        if arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if values.ndim == 1 or stored == "F32":
            writer.add_tensor(target, values)
        else:
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(target, data, raw_dtype=None if stored == "F16" else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_facts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    head_dim = config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, head_dim))


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if turns > high:
            divisors.append(1.0)
        elif turns < low:
            divisors.append(rope["factor"])
        else:
            share = (turns - low) / (high - low)
            divisors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(divisors, dtype=np.float32)


def _write_vocabulary(writer: gguf.GGUFWriter, folder: Path) -> None:
    layout = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = sorted(layout["model"]["vocab"], key=layout["model"]["vocab"].__getitem__)
    special = {token["id"] for token in layout["added_tokens"] if token["special"]}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(vocab))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in layout["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(str(shard), framework="numpy") as file:
            tensors |= {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    return tensors


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1.0 + 0.1 * values
    else:
        values *= 0.1 if len(shape) == 1 else shape[-1] ** -0.5
    rounded = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    # bfloat16 reaches further down than float16.
    rounded[np.abs(rounded) < 2.0**-14] = 0.0
    return rounded
