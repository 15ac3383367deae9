"""Memory plan of one device: weights, communicators, buffers, and what is left for KV. Pure. Bytes."""

from __future__ import annotations

import msgspec

from dynamictp.cost.figures import Figure
from dynamictp.cost.hardware import GIB, DeviceFacts, EngineLimits
from dynamictp.cost.shape import ModelShape
from dynamictp.cost.shares import share

CONTEXT_BYTES = Figure(1.0 * GIB, "assumed", "driver context, kernels and graphs of one process")
COMMUNICATOR_BYTES = Figure(0.75 * GIB, "assumed", "0.5-1 GB per communicator (design 7)")
UNUSABLE = Figure(0.05, "assumed", "fragmentation and driver reserve, part of the memory")
WORKER_BYTES = Figure(0.3 * GIB, "measured", "resident memory of a CPU worker beside weights and pages")


class MemoryPlan(msgspec.Struct, frozen=True):
    """What lies in the memory of the most loaded device of a domain. Bytes."""

    capacity: float
    weights: float
    """Largest share of a rank and stage, residency surplus included."""
    surplus: float
    """Part of `weights` that is held only so that other degrees can be served."""
    context: float
    communicators: float
    activations: float
    reserve: float
    kv_per_token: float
    """Bytes of one token of context on that device."""
    kv_cap: float
    kv_limit: float = 0.0
    """Memory for KV that was configured, 0: all that is left."""

    @property
    def fixed(self) -> float:
        """All but KV."""
        return self.weights + self.context + self.communicators + self.activations + self.reserve

    @property
    def kv_bytes(self) -> float:
        """What is left for KV on the device, the cap applied; negative when the weights do not fit."""
        left = self.capacity - self.fixed
        if left <= 0:
            return left
        return (min(left, self.kv_limit) if self.kv_limit else left) * self.kv_cap

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that the domain holds over all its requests."""
        return max(0, int(self.kv_bytes / self.kv_per_token))

    @property
    def weights_fit(self) -> bool:
        return self.kv_bytes > 0


def rank_weight_bytes(shape: ModelShape, tp: int, pp: int = 1) -> float:
    """Bytes of the most loaded rank under separate memories: its share of every class, the embedding whole
    (it is a full view on every rank), norms whole. Stages hold ⌈layers/pp⌉ layers; the first has the
    embedding, the last the head, so the fullest has the larger of them.
    """
    part, parts = share(shape, tp), shape.parts
    stage = -(-shape.layers // pp) / shape.layers
    if shape.latent is None:
        query, kv = shape.query_heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
        out = query / (2 * query + kv)
        attention = parts.attention * (out * part.out + (1 - out) * part.qkv)
    else:
        attention = parts.attention * part.heads  # the small down-projections are replicated: below 1 %
    body = attention + parts.mlp * part.mlp + parts.experts * part.experts + parts.norms
    embedding = parts.embedding * shape.weights.embedding_bits / 8
    head = (parts.head or parts.embedding) * part.vocab * shape.weights.embedding_bits / 8
    ends = embedding  # a tied head reads rows of the embedding that the rank has anyway
    if parts.head:
        ends = embedding + head if pp == 1 else max(embedding, head)
    return body * stage * shape.weights.bits / 8 + ends


def activation_bytes(shape: ModelShape, tp: int, limits: EngineLimits) -> float:
    """Buffers of the largest step: residual, norm, QKV, attention output and the gated MLP, in 16 bits, for
    two layers in flight; logits in fp32 for every sequence.
    """
    part = share(shape, tp)
    wide = max(shape.intermediate * part.mlp, _expert_columns(shape) * part.experts)
    heads = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim * part.qkv
    per_token = 2 * 2.0 * (3 * shape.hidden + heads + 2 * wide)
    return limits.max_batched_tokens * per_token + limits.max_num_seqs * shape.vocab * 4.0


def _expert_columns(shape: ModelShape) -> float:
    return 0.0 if shape.experts is None else float(shape.experts.per_token * shape.experts.intermediate)


def memory_plan(
    shape: ModelShape,
    device: DeviceFacts,
    tp: int,
    pp: int = 1,
    *,
    limits: EngineLimits | None = None,
    surplus_fraction: float = 0.0,
) -> MemoryPlan:
    """Plan of the most loaded device of a tp × pp domain.

    `surplus_fraction` of the cut weights is held beyond the rank's share (dynamic mode). On a shared memory
    the weights and pages exist once: a device is charged its part of the node, as the engine's quotas do.
    """
    limits = limits or EngineLimits()
    stage_layers = -(-shape.layers // pp) / shape.layers
    if device.shared_memory:
        weights, surplus = shape.weight_bytes / device.node_devices, 0.0
        kv = shape.kv_bytes(1) * stage_layers / tp
        context, communicator = WORKER_BYTES.value, 0.0
    else:
        parts = shape.parts
        cut = (parts.total - parts.embedding - parts.norms) * shape.weights.bits / 8
        surplus = surplus_fraction * cut / pp
        weights = rank_weight_bytes(shape, tp, pp) + surplus
        kv = shape.kv_bytes(1, share(shape, tp).kv_heads) * stage_layers
        context = CONTEXT_BYTES.value
        communicator = COMMUNICATOR_BYTES.value * limits.communicators if tp * pp > 1 else 0.0
    return MemoryPlan(
        capacity=device.memory_bytes,
        weights=weights,
        surplus=surplus,
        context=context,
        communicators=communicator,
        activations=activation_bytes(shape, tp, limits),
        reserve=device.memory_bytes * UNUSABLE.value,
        kv_per_token=kv,
        kv_cap=limits.kv_cap,
        kv_limit=limits.kv_bytes / device.node_devices,
    )


def sequence_tokens(tokens: float, page_tokens: int) -> float:
    """Tokens of pages that a sequence of `tokens` tokens takes on average: half a page more."""
    return tokens + page_tokens / 2
