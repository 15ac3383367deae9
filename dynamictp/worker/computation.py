"""The forward pass of one rank of a domain, on one kernel path. The domain knows no more of it than this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dynamictp.errors import ResourceError
from dynamictp.facts import ModelFacts
from dynamictp.kernels.native import NativeExchange, NativeForward, NativeModel, StepSplit
from dynamictp.messages import OpenDomain
from dynamictp.model.attention_plan import Span, divide_attention
from dynamictp.model.batch import make_batch
from dynamictp.model.exchange import Exchange
from dynamictp.model.forward import Forward
from dynamictp.model.pages import KVArena
from dynamictp.model.rope import RopeTable
from dynamictp.model.views import ModelViews, copied_bytes, head_units
from dynamictp.ranges import shard_ranges
from dynamictp.worker.comm.base import Communicator
from dynamictp.worker.comm.shm import ShmCommunicator

Tables = Sequence[NDArray[np.int32]]


class Computation(Protocol):
    """What a domain needs. All ranks make the same calls with the same arguments; both meet the peers."""

    @property
    def max_rows(self) -> int:
        """Most rows of logits at a time."""

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[max_rows], shared by the ranks: for the tokens they sample, between barriers of the caller."""

    @property
    def weight_bytes_copied(self) -> int:
        """Bytes of the weights it reads that do not lie in the worker's weight mapping."""

    def run(self, tokens: NDArray[np.int64], spans: Sequence[Span], tables: Tables) -> None:
        """Compute the tokens of all spans and write their pages; after it every rank is done with the pages.
        `tables` are page tables [blocks, KV heads], one per span. Raises `ValueError`, `CommunicatorBroken`.
        """

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """[len(rows), V] of rows of the last batch: a shared buffer, which the caller reads before a barrier
        that it puts before the next call.
        """

    def take_split(self) -> StepSplit:
        """Where the time inside the computation went since the last call; zeros where that is not known.
        Waits are those that the caller's barrier did not see.
        """


class TorchComputation:
    """`model.forward` over row-major views."""

    def __init__(
        self,
        facts: ModelFacts,
        opened: OpenDomain,
        views: ModelViews,
        exchange: Exchange,
        *,
        weights: torch.Tensor,
        arena: KVArena,
        rope: RopeTable,
    ) -> None:
        """`weights` is the mapping that all views should lie in."""
        self.weight_bytes_copied = copied_bytes(views, weights)
        self._facts, self._arena = facts, arena
        self._rank, self._world = opened.rank, opened.tp
        self._heads = head_units(facts, shard_ranges(facts, opened.tp, opened.rank).qkv)
        self._exchange = exchange
        self._forward = Forward(facts, views, self._heads, exchange=exchange, arena=arena, rope=rope)
        self._hidden: torch.Tensor | None = None
        self.max_rows = exchange.max_rows
        self.tokens: NDArray[np.int64] = exchange.tokens[:, 0].numpy()

    def run(self, tokens: NDArray[np.int64], spans: Sequence[Span], tables: Tables) -> None:
        facts, page = self._facts, self._arena.spec.page_tokens
        items = divide_attention(spans, facts.kv_heads, facts.group, page, self._world)[self._rank]
        batch = make_batch(tokens, spans, tables, items, heads=self._heads, facts=facts, arena=self._arena)
        self._hidden = self._forward.hidden(batch)

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        if self._hidden is None:
            raise ValueError("logits before any batch")
        return self._forward.logits(self._hidden, torch.tensor(rows)).numpy()

    def take_split(self) -> StepSplit:
        return StepSplit()


class NativeComputation:
    """`kernels.native` over packed weights: barriers inside are native."""

    def __init__(
        self,
        model: NativeModel,
        opened: OpenDomain,
        comm: Communicator,
        *,
        payload: NDArray[np.uint8],
        progress: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        """`progress` is the address of the worker's progress word. Raises `ResourceError` for ranks that do
        not meet in shared memory.
        """
        if opened.tp > 1 and not isinstance(comm, ShmCommunicator):
            raise ResourceError(
                "the native kernels meet their peers through the shared-memory communicator only"
            )
        address = comm.core_address if isinstance(comm, ShmCommunicator) else 0
        exchange = NativeExchange(payload, max_tokens, max_rows, opened.tp, address, progress)
        self._forward = NativeForward(model, shard_ranges(model.facts, opened.tp, opened.rank), exchange)
        # A rank alone has no native barrier: its own is where it learns that the domain was revoked.
        self._check: Callable[[], None] | None = comm.barrier if opened.tp == 1 else None
        self.max_rows = max_rows
        self.tokens = self._forward.tokens
        self.weight_bytes_copied = self._forward.weight_bytes_copied

    def run(self, tokens: NDArray[np.int64], spans: Sequence[Span], tables: Tables) -> None:
        if self._check is not None:
            self._check()
        self._forward.run(tokens, [(span.start, span.count) for span in spans], tables)

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return self._forward.logits(rows)[0]

    def take_split(self) -> StepSplit:
        return self._forward.take_split()


OpenComputation = Callable[[Callable[[], None], Callable[[int], None]], Computation]
"""Makes a domain's computation from its barrier and its callback that is told which layer begins."""
