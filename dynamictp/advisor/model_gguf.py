"""GGUF metadata → `ModelShape`. The header is read with the server's own reader."""

from __future__ import annotations

from pathlib import Path

from dynamictp.cost.shape import Experts, LatentAttention, ModelShape, WeightFormat
from dynamictp.errors import ModelRefused
from dynamictp.model.gguf_file import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "deepseek2")


def read_gguf(path: Path) -> ModelShape:
    """Sizes of the model in a GGUF file. Raises `ModelRefused`.

    The stored format is named in the note; plans are made for bf16, to which this server converts weights.
    """
    file = GGUFFile(path)
    arch = file.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelRefused(
            f"{path}: general.architecture {arch!r} is not known to the advisor; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelRefused(f"{path}: tensor token_embd.weight is missing")
    hidden, heads = file.integer(f"{arch}.embedding_length"), _same(file, f"{arch}.attention.head_count")
    kv_heads = _same(file, f"{arch}.attention.head_count_kv", heads)
    latent = _latent(file, arch) if f"{arch}.attention.kv_lora_rank" in file.keys else None
    if latent is not None:
        kv_heads = heads  # newer converters write 1 for the shared latent
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelRefused(f"{path}: {heads} query heads are not divisible by {kv_heads} KV heads")
    window = file.integer(f"{arch}.attention.sliding_window", 0)
    layers = file.integer(f"{arch}.block_count")
    stored = sum(tensor.nbytes for tensor in file.tensors.values())
    shape = ModelShape(
        name=str(file.get("general.name") or path.stem),
        layers=layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=file.integer(f"{arch}.attention.key_length", hidden // heads),
        intermediate=_same(file, f"{arch}.feed_forward_length"),
        vocab=embedding.rows,
        max_context=file.integer(f"{arch}.context_length"),
        tied_head="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        experts=_experts(file, arch),
        latent=latent,
        window=window,
        windowed_layers=layers if window else 0,
        weights=WeightFormat(),
        note=f"the file stores {stored / 1e9:.2f} GB; this server serves it as bf16",
    )
    if min(shape.layers, hidden, shape.head_dim, shape.intermediate, shape.max_context) < 1:
        raise ModelRefused(f"{path}: a size in the metadata is below 1: corrupt")
    return shape


def _same(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelRefused(f"{file.path}: {key} differs between layers, which the advisor does not plan")
        return int(value[0])
    return file.integer(key, default)


def _latent(file: GGUFFile, arch: str) -> LatentAttention:
    rope = file.integer(f"{arch}.rope.dimension_count")
    keys = f"{arch}.attention.key_length_mla"
    key = file.integer(keys if keys in file.keys else f"{arch}.attention.key_length")
    values = f"{arch}.attention.value_length_mla"
    value = file.integer(values if values in file.keys else f"{arch}.attention.value_length")
    return LatentAttention(
        q_rank=file.integer(f"{arch}.attention.q_lora_rank", 0),
        kv_rank=file.integer(f"{arch}.attention.kv_lora_rank"),
        rope_dim=rope,
        nope_dim=key - rope,
        v_dim=value,
    )


def _experts(file: GGUFFile, arch: str) -> Experts | None:
    count = file.integer(f"{arch}.expert_count", 0)
    if not count:
        return None
    width = file.integer(f"{arch}.expert_feed_forward_length", 0) or _same(
        file, f"{arch}.feed_forward_length"
    )
    shared = file.integer(f"{arch}.expert_shared_feed_forward_length", 0)
    shared = shared or file.integer(f"{arch}.expert_shared_count", 0) * width
    return Experts(
        count=count,
        per_token=file.integer(f"{arch}.expert_used_count"),
        intermediate=width,
        shared_intermediate=shared,
        dense_layers=file.integer(f"{arch}.leading_dense_block_count", 0),
    )
