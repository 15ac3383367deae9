"""One rank's forward pass in native code: one call per step, with the interpreter lock released.

The counterpart of `model.forward` for packed weights. It knows ranges and buffers, no communicator: the
caller passes the native communicator's address, through which the step meets its peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dynamictp import native
from dynamictp.facts import PANEL_ROWS, DType, ModelFacts, WeightType
from dynamictp.kv import KVSpec
from dynamictp.model.weights import WeightIndex
from dynamictp.ranges import Range, ShardRanges

Bytes = NDArray[np.uint8]


class Rotation(Protocol):
    """Tables of the rotary embedding, the same on every rank."""

    def tables(self, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(cos, sin) fp32 [at least `positions`, D/2], contiguous."""
        ...


def native_exchange_bytes(
    facts: ModelFacts, dtype: DType, *, max_tokens: int, max_rows: int, world: int
) -> int:
    """Bytes of the exchange payload of a domain of up to `world` ranks."""
    return int(_shape(facts, dtype).exchange_bytes(max_tokens, max_rows, world))


@dataclass(frozen=True)
class NativeModel:
    """What a process has for all its domains: a model, its packed weights and the KV arena (uint8, shared
    mappings aligned to 64 bytes), and its threads (`open_team`), None for one.
    """

    facts: ModelFacts
    index: WeightIndex
    weights: Bytes
    arena: Bytes
    spec: KVSpec
    rotation: Rotation
    level: str
    team: Any = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for memory that does not fit the model."""
        if self.index.layout != "panels" or self.weights.nbytes < self.index.total_bytes:
            raise ValueError(
                f"expected {self.index.total_bytes} bytes of packed weights, got {self.weights.nbytes} "
                f"({self.index.layout})"
            )
        if self.spec.dtype != self.index.dtype:
            raise ValueError(f"pages of {self.spec.dtype} for a model of {self.index.dtype}")
        _check_aligned(weights=self.weights, arena=self.arena)


@dataclass(frozen=True)
class NativeExchange:
    """The shared payload of one domain (uint8, `native_exchange_bytes`), the largest step it was sized for,
    the address of this rank's native communicator, 0 in a domain of one rank, and that of its worker's
    progress word, 0 when nobody reads it.
    """

    payload: Bytes
    max_tokens: int
    max_rows: int
    world: int = 1
    communicator: int = 0
    progress: int = 0

    def __post_init__(self) -> None:
        """Raises `ValueError` for a communicator that does not fit the degree."""
        if (self.communicator == 0) != (self.world == 1):
            raise ValueError(f"a domain of {self.world} ranks with communicator {self.communicator:#x}")
        _check_aligned(payload=self.payload)


class StepSplit(NamedTuple):
    """Seconds of a rank's step: in matrices, in attention, at barriers. The rest is norms, rotary embedding,
    page writes and what the caller does.
    """

    weights_s: float = 0.0
    attention_s: float = 0.0
    wait_s: float = 0.0


class NativeForward:
    """One rank's computation in one domain. Holds scratch memory, and addresses into arrays that it keeps
    alive; used by one thread. Raises `ValueError` for an exchange that is too small.
    """

    def __init__(self, model: NativeModel, ranges: ShardRanges, exchange: NativeExchange) -> None:
        facts, index, payload = model.facts, model.index, exchange.payload
        limits = {"max_tokens": exchange.max_tokens, "max_rows": exchange.max_rows}
        needed = native_exchange_bytes(facts, index.dtype, **limits, world=exchange.world)
        if payload.nbytes < needed:
            raise ValueError(f"the exchange payload has {payload.nbytes} bytes, {needed} are needed")
        self._weights = model.weights
        self._rotation, self._positions = model.rotation, 0
        self._step = native.require().Step(
            _shape(facts, index.dtype, index.weights),
            weight_addresses(model),
            qkv=_units(ranges.qkv, facts.head_dim),
            hidden=_units(ranges.hidden, PANEL_ROWS),
            mlp=_units(ranges.mlp, PANEL_ROWS),
            vocab=_units(ranges.vocab, PANEL_ROWS),
            arena=_address(model.arena),
            pages=model.arena.nbytes // model.spec.page_bytes,
            page_tokens=model.spec.page_tokens,
            exchange=_address(payload),
            communicator=exchange.communicator,
            progress=exchange.progress,
            team=model.team,
            level=model.level,
            keep=(model, exchange),
            **limits,
        )
        rows, stride = exchange.max_rows, self._step.logits_stride
        start = self._step.logits_address - _address(payload)
        logits = payload[start : start + rows * stride * 4].view(np.float32).reshape(rows, stride)
        self._logits = logits[:, : facts.vocab]
        start = self._step.tokens_address - _address(payload)
        self.tokens: NDArray[np.int64] = payload[start : start + rows * 8].view(np.int64)
        """[max_rows] shared by the ranks, for the tokens they sample; free between barriers of the caller."""

    def run(
        self, tokens: NDArray[np.int64], spans: Sequence[tuple[int, int]], tables: Sequence[NDArray[np.int32]]
    ) -> None:
        """Compute `tokens` [T], those of all spans in order, and write their K and V to the pages.

        `spans` are (start, count) in their sequences, `tables` page tables [blocks, KV heads] that cover
        start + count tokens. Meets the peers five times a layer; after the last every rank is done with the
        pages. Raises `CommunicatorBroken`, and `ValueError` for a step beyond the limits.
        """
        starts = [start for start, _ in spans]
        counts = [count for _, count in spans]
        if len(tokens) != sum(counts) or len(tables) != len(spans):
            raise ValueError(
                f"{len(tokens)} tokens and {len(tables)} tables for spans of {sum(counts)} tokens"
            )
        longest = max((start + count for start, count in spans), default=0)
        if longest > self._positions:
            self._grow(longest)
        tokens = np.ascontiguousarray(tokens, np.int64)
        tables = [np.ascontiguousarray(table, np.int32) for table in tables]
        self._step.run(_address(tokens), starts, counts, [_address(table) for table in tables])

    def logits(self, rows: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(fp32 [n, V], arg-max [n]) of batch rows `rows` of the last step; of equal maxima the lowest token.

        The logits are a view of the exchange, valid until they are computed again; the caller puts a barrier
        between its reads and that. Raises `ValueError` beyond `max_rows`.
        """
        wanted = np.array(rows, np.int64)
        best = np.empty(len(wanted), np.int64)
        self._step.logits(_address(wanted), len(wanted), _address(best))
        return self._logits[: len(wanted)], best

    @property
    def weight_bytes_copied(self) -> int:
        """Bytes of the weights this rank reads that do not lie in the model's mapping, as the native step has
        them: 0 unless something copied them.
        """
        start = _address(self._weights)
        stop = start + self._weights.nbytes
        spans: set[tuple[int, int]] = set(self._step.weight_spans())
        return sum(size for address, size in spans if not start <= address <= address + size <= stop)

    def take_split(self) -> StepSplit:
        """Where the time went since the last call."""
        step = self._step
        parts_ns = (step.take_weights_ns(), step.take_attention_ns(), step.take_wait_ns())
        return StepSplit(*(float(part_ns) * 1e-9 for part_ns in parts_ns))

    def _grow(self, positions: int) -> None:
        cosine, sine = self._rotation.tables(positions)
        self._positions = len(cosine)
        self._step.set_rotation(_address(cosine), _address(sine), len(cosine), (cosine, sine))


def weight_addresses(model: NativeModel) -> dict[str, int]:
    """Where each weight begins, by its canonical name."""
    base = _address(model.weights)
    return {name: base + entry.offset for name, entry in model.index.entries.items()}


def open_team(threads: int, cores: Sequence[int] = (), *, spin: int = 0) -> Any:
    """The threads of one device, for `NativeModel.team`: the caller and `threads` - 1 helpers. None for one.

    Helper i is bound to `cores[i]` if there are any, the caller binds itself to the first. Waits poll `spin`
    times, then yield, then sleep. Raises `ValueError` for too few cores, `RuntimeError` when a thread can't
    be started or bound.
    """
    return native.require().Team(threads, list(cores), spin) if threads > 1 else None


def map_aligned(descriptor: int, size: int, *, writable: bool = True) -> Bytes:
    """uint8 [size] over a descriptor's shared memory, where huge pages can lie. Raises `OSError`."""
    mapped: Bytes = native.require().map_aligned(descriptor, size, writable)
    return mapped


def collapse(memory: NDArray[Any]) -> float:
    """Ask for huge pages under a mapping, best effort; the share of its bytes that got them."""
    if not memory.nbytes:
        return 0.0
    return int(native.require().collapse_pages(_address(memory), memory.nbytes)) / memory.nbytes


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _shape(facts: ModelFacts, dtype: DType, weights: WeightType = "") -> Any:
    return native.require().ModelShape(
        layers=facts.layers,
        hidden=facts.hidden,
        query_heads=facts.query_heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        intermediate=facts.intermediate,
        vocab=facts.vocab,
        epsilon=facts.norm_eps,
        dtype=dtype,
        weights=weights,
    )


def _units(rows: Range, unit: int) -> tuple[int, int]:
    return rows.start // unit, -(-rows.stop // unit)


def _check_aligned(**memories: Bytes) -> None:
    for name, memory in memories.items():
        if not memory.flags.c_contiguous or _address(memory) % 64:
            raise ValueError(f"{name} must be contiguous and aligned to 64 bytes")
