"""Time of one step of one domain: a roofline per operation class, collectives and host overhead. Pure.

Roofline: Williams, Waterman, Patterson (2009). An operation takes max(bytes ÷ bandwidth, FLOPs ÷ peak),
plus the part of the smaller one that does not overlap. Every class takes as long as its most loaded rank.
Decode reads all weights once per step whatever the batch; prefill reads them once per chunk (kipply,
"Transformer Inference Arithmetic", 2022; Pope et al., "Efficiently Scaling Transformer Inference", 2022).
"""

from __future__ import annotations

import math

import msgspec

from dynamictp.cost.calibration import Calibration, Curve, Op
from dynamictp.cost.collectives import (
    COLLECTIVES_PER_LAYER,
    EXCHANGES_PER_LAYER,
    activation_bytes,
    all_gather_s,
    all_reduce_s,
    send_s,
)
from dynamictp.cost.figures import Corner
from dynamictp.cost.hardware import Assumptions, DeviceFacts, LinkFacts
from dynamictp.cost.shape import ModelShape
from dynamictp.cost.shares import share

_OPS: tuple[Op, ...] = ("base", "attention", "prompt_attention")


class Domain(msgspec.Struct, frozen=True):
    """Everything that decides the time of a step: the model on tp × pp devices of one kind."""

    shape: ModelShape
    device: DeviceFacts
    tp: int
    pp: int = 1
    link: LinkFacts | None = None
    """Weakest link inside the TP group; needed when tp > 1."""
    stage_link: LinkFacts | None = None
    """Between stages; needed when pp > 1."""
    assumptions: Assumptions = Assumptions()
    calibration: Calibration | None = None
    active_devices: int = 1
    """Devices of the node that read memory at the same time, where they share one (CPU)."""


class StepCost(msgspec.Struct, frozen=True):
    """Seconds of one pass through all stages. `total_s` is the sum."""

    linear_s: float
    attention_s: float
    communication_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        return self.linear_s + self.attention_s + self.communication_s + self.overhead_s

    @property
    def communication_share(self) -> float:
        return self.communication_s / self.total_s


class _Linear(msgspec.Struct, frozen=True):
    """A weight class of the most loaded rank: bytes read per step, parameters used per token."""

    nbytes: float
    parameters: float


class StepModel:
    """Step times of a domain in one corner. Owns coefficients computed once; immutable afterwards."""

    def __init__(self, domain: Domain, corner: Corner = Corner.EXPECTED) -> None:
        if domain.tp > 1 and domain.link is None:
            raise ValueError(f"tp{domain.tp} needs a link between its ranks")
        if domain.pp > 1 and domain.stage_link is None:
            raise ValueError(f"pp{domain.pp} needs a link between its stages")
        self.domain = domain
        self.corner = corner
        # A calibrated model is not at the mercy of its assumptions: only the measurement's spread counts.
        calibrated = domain.calibration is not None and corner is not Corner.IDEAL
        self._inner = Corner.EXPECTED if calibrated else corner
        self._curves: dict[Op, Curve | None] = {}
        if calibrated and domain.calibration is not None:
            self._curves = {op: domain.calibration.curve(op, domain.tp) for op in _OPS}
        assumed, device, shape = domain.assumptions, domain.device, domain.shape
        bandwidth = device.bandwidth.at(self._inner)
        if device.shared_bandwidth is not None:
            busy = max(domain.active_devices, domain.tp * domain.pp)
            bandwidth = min(bandwidth, device.shared_bandwidth.at(self._inner) / busy)
            if calibrated and domain.calibration is not None:
                bandwidth /= domain.calibration.slowdown(domain.tp, busy)
        self._bandwidth = bandwidth * assumed.memory_efficiency.at(self._inner)
        efficiency = assumed.compute_efficiency.at(self._inner)
        self._flops = device.flops(shape.weights.compute).at(self._inner) * efficiency
        self._attention_flops = device.bf16_flops.at(self._inner) * efficiency
        self._overlap = assumed.overlap.at(self._inner)
        self._overhead_s = assumed.step_overhead_s.at(self._inner)
        self._share = share(shape, domain.tp, shared_memory=device.shared_memory)
        self._body, self._head = self._linears()

    def _linears(self) -> tuple[list[_Linear], _Linear]:
        shape, part, parts = self.domain.shape, self._share, self.domain.shape.parts
        width = shape.weights.bits / 8
        if shape.latent is None:
            units = 2 * shape.query_heads + 2 * shape.kv_heads
            out = parts.attention * shape.query_heads / units * part.out
            qkv = parts.attention * (1 - shape.query_heads / units) * part.qkv
        else:
            out, qkv = 0.0, parts.attention * part.heads
        mlp = parts.mlp * (2 * part.mlp + part.down) / 3
        head = shape.vocab * shape.hidden * part.vocab
        body = [_Linear((out + qkv) * width, out + qkv), _Linear(mlp * width, mlp)]
        return body, _Linear(head * shape.weights.embedding_bits / 8, head)

    def _roofline(self, nbytes: float, flops: float, peak: float) -> float:
        memory, compute = nbytes / self._bandwidth, flops / peak
        return max(memory, compute) + (1 - self._overlap) * min(memory, compute)

    def _experts_s(self, tokens: float) -> float:
        """Routed experts: with uniform routing, `tokens` tokens touch E·(1 − (1 − k/E)^tokens) of them."""
        moe = self.domain.shape.experts
        if moe is None:
            return 0.0
        total = self.domain.shape.parts.experts * self._share.experts
        touched = 1 - (1 - moe.per_token / moe.count) ** tokens
        flops = 2 * total * moe.per_token / moe.count * tokens
        return self._roofline(total * self.domain.shape.weights.bits / 8 * touched, flops, self._flops)

    def _linear_s(self, tokens: float, sampled: float) -> float:
        body = sum(self._roofline(op.nbytes, 2 * op.parameters * tokens, self._flops) for op in self._body)
        head = self._roofline(self._head.nbytes, 2 * self._head.parameters * sampled, self._flops)
        return body + self._experts_s(tokens) + head

    def communication_s(self, tokens: float, sampled: float) -> float:
        """Collectives of a pass over `tokens` tokens, and the sends between stages."""
        domain, corner, shape = self.domain, self._inner, self.domain.shape
        assumed, element = domain.assumptions, domain.assumptions.bytes_per_exchange_element
        total = 0.0
        if domain.tp > 1 and domain.link is not None:
            message = activation_bytes(shape, tokens, element)
            logits = sampled * shape.vocab * element
            link = domain.link
            if domain.device.shared_memory:
                bandwidth = link.bandwidth.at(corner) * assumed.link_efficiency.at(corner)
                one = link.latency_s.at(corner) + 2 * message / domain.tp / bandwidth
                total += EXCHANGES_PER_LAYER * shape.layers * one + logits / domain.tp / bandwidth
            else:
                one = all_reduce_s(message, domain.tp, link, assumed, corner)
                bandwidth = link.bandwidth.at(corner) * assumed.link_efficiency.at(corner)
                total += COLLECTIVES_PER_LAYER * shape.layers * one
                total += all_gather_s(logits, domain.tp, bandwidth, link.latency_s.at(corner))
        if domain.pp > 1 and domain.stage_link is not None:
            message = activation_bytes(shape, tokens, element) / domain.tp
            total += (domain.pp - 1) * send_s(message, domain.stage_link, assumed, corner)
        return total

    def _factor(self, op: Op, size: float) -> float:
        curve = self._curves.get(op)
        if curve is None:
            return 1.0
        found = curve.at(size)
        sign = {Corner.FAST: -1.0, Corner.SLOW: 1.0}.get(self.corner, 0.0)
        return found.ratio * (1 + sign * found.spread)

    def request_s(self, *, busy: bool) -> float:
        """What a request takes outside of steps: on its way to the engine, and its first token back.

        Only where devices are cores of the host does it matter whether they compute meanwhile (`busy`).
        """
        domain = self.domain
        devices = self._busy_devices if busy else 0
        measured = None if domain.calibration is None else domain.calibration.request_s(devices)
        figure = measured if measured is not None else domain.assumptions.request_overhead_s
        return figure.at(self.corner)

    @property
    def request_added_s(self) -> float:
        """What a request adds to the steps of those that run beside it, beyond what its tokens do."""
        calibration = self.domain.calibration
        if calibration is None or self.corner is Corner.IDEAL:
            return 0.0
        return calibration.request_added_s(self._busy_devices)

    @property
    def _busy_devices(self) -> int:
        return max(self.domain.active_devices, self.domain.tp * self.domain.pp)

    def base(self, tokens: float, sampled: float) -> StepCost:
        """A pass over `tokens` tokens, `sampled` of them with logits, without attention."""
        factor = self._factor("base", tokens)
        return StepCost(
            linear_s=self._linear_s(tokens, sampled) * factor,
            attention_s=0.0,
            communication_s=self.communication_s(tokens, sampled) * factor,
            overhead_s=self._overhead_s * factor,
        )

    def decode_attention_s(self, rows: float, context: float) -> float:
        """Attention of `rows` new tokens over `context` tokens each, reading the rank's cache."""
        shape = self.domain.shape
        nbytes = rows * shape.kv_bytes(context) * self._share.kv
        flops = rows * shape.context_layers(context) * shape.attention_flops_per_pair * self._share.heads
        return self._roofline(nbytes, flops, self._attention_flops) * self._factor("attention", rows)

    def prompt_attention_s(self, tokens: float, past: float = 0.0) -> float:
        """Causal attention of `tokens` prompt tokens after `past` others."""
        shape = self.domain.shape
        seen = shape.context_layers(past + tokens / 2)
        flops = tokens * seen * shape.attention_flops_per_pair * self._share.heads
        nbytes = shape.kv_bytes(past + tokens) * self._share.kv
        factor = self._factor("prompt_attention", past + tokens)
        return self._roofline(nbytes, flops, self._attention_flops) * factor

    def decode(self, rows: float, context: float) -> StepCost:
        """One new token for each of `rows` requests with `context` tokens each.

        With stages the rows run as up to pp micro-batches, one in each stage: a token waits for one pass of
        rows ÷ pp.
        """
        batch = max(1.0, rows / self.domain.pp)
        base = self.base(batch, batch)
        return msgspec.structs.replace(base, attention_s=self.decode_attention_s(batch, context))

    def prompt(self, tokens: float, chunk: float, past: float = 0.0) -> StepCost:
        """A prompt of `tokens` tokens in chunks of `chunk`, alone: time to its first token.

        With stages, chunk k is in stage s while chunk k+1 is in stage s−1: (M+P−1)/(M·P) of the passes' sum,
        the pipeline's fill being the bubble.
        """
        whole = math.floor(tokens / chunk)
        rest = tokens - whole * chunk
        passes = [(whole, chunk)] * (whole > 0) + [(1, rest)] * (rest > 0)
        costs = [(count, self.base(size, 1.0)) for count, size in passes]
        batches, stages = sum(count for count, _ in passes), self.domain.pp
        factor = (batches + stages - 1) / (batches * stages)
        return StepCost(
            linear_s=factor * sum(count * cost.linear_s for count, cost in costs),
            attention_s=factor * self.prompt_attention_s(tokens, past),
            communication_s=factor * sum(count * cost.communication_s for count, cost in costs),
            overhead_s=factor * sum(count * cost.overhead_s for count, cost in costs),
        )
