"""One domain as one of its ranks lives it: views, communicator, rows, and the execution of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynamictp.clock import Clock
from dynamictp.errors import CommunicatorBroken
from dynamictp.messages import (
    NO_TOKEN,
    OpenDomain,
    RowPromptLogprobs,
    RowStep,
    RowToken,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from dynamictp.model.attention_plan import Span
from dynamictp.model.pages import KVArena
from dynamictp.model.rope import RopeTable
from dynamictp.worker.comm.base import Communicator
from dynamictp.worker.computation import OpenComputation
from dynamictp.worker.rows import Row, RowTable
from dynamictp.worker.sampler import choose, token_logprobs
from dynamictp.worker.start import PROOF_BYTES, WorkerStart


@dataclass(frozen=True)
class Device:
    """What a worker has for all its domains."""

    start: WorkerStart
    weights: torch.Tensor
    """uint8: the one mapping that every view lies in."""
    arena: KVArena
    rope: RopeTable
    clock: Clock


class Domain:
    """Rank `rank` of one domain epoch. Owns the rows; used by the worker's one thread."""

    def __init__(
        self,
        device: Device,
        opened: OpenDomain,
        *,
        comm: Communicator,
        open_computation: OpenComputation,
        on_layer: Callable[[int], None],
    ) -> None:
        """`open_computation` gets the barrier and `on_layer`, which is told the layer that begins."""
        facts, arena = device.start.facts, device.arena
        self.epoch, self.rank, self._world = opened.epoch, opened.rank, opened.tp
        self.comm = comm
        self.broken = False
        self._clock = device.clock
        self._computation = open_computation(self._barrier, on_layer)
        self._rows = RowTable(facts.kv_heads, arena.spec.page_tokens, arena.pages)
        self._wait_s = 0.0
        self._ended_s: float | None = None

    @property
    def weight_bytes_copied(self) -> int:
        """Bytes of weights that the computation does not read from the worker's one mapping: 0, or a bug."""
        return self._computation.weight_bytes_copied

    def prove(self) -> float:
        """The proof collective; returns ms. No warm-up: it would take a whole step from the domains that run
        on the same device, and saves the first step less.

        Raises `CommunicatorBroken` when a peer's bytes are not what they should be.
        """
        began = self._clock.now()
        proof = self.comm.all_gather(_pattern(self.epoch, self.rank))
        for rank in range(self._world):
            if not np.array_equal(proof[rank], _pattern(self.epoch, rank)):
                raise CommunicatorBroken(f"the proof of epoch {self.epoch}: rank {rank} sent other bytes")
        return (self._clock.now() - began) * 1e3

    def step(self, plan: StepPlan) -> StepResult:
        """Execute a plan. Every rank returns the same tokens; log-probabilities are rank 0's only.

        Raises `ProtocolError`, `CommunicatorBroken`, `DomainError`, or what the computation raised.
        """
        began = self._clock.now()
        self._wait_s = 0.0
        rows = self._rows.apply(plan)
        tokens: tuple[RowToken, ...] = ()
        prompts: tuple[RowPromptLogprobs, ...] = ()
        if rows:
            self._compute(plan.rows, rows)
            prompts = self._prompt_logprobs(plan.rows, rows)
            tokens = self._sample(plan.rows, rows)
        split = self._computation.take_split()
        ended, since = self._clock.now(), self._ended_s
        self._ended_s = ended
        return StepResult(
            self.epoch,
            plan.step,
            tokens,
            ended - began,
            self._wait_s + split.wait_s,
            prompts,
            weights_s=split.weights_s,
            attention_s=split.attention_s,
            gap_s=0.0 if since is None else began - since,
        )

    # ------------------------------------------------------------ parts of a step

    def _compute(self, steps: Sequence[RowStep], rows: Sequence[Row]) -> None:
        spans: list[Span] = []
        offset = 0
        for step in steps:
            spans.append(Span(offset, step.start, step.count))
            offset += step.count
        known = [
            row.tokens[step.start : step.start + step.count] for step, row in zip(steps, rows, strict=True)
        ]
        self._computation.run(np.concatenate(known).astype(np.int64), spans, [row.table for row in rows])

    def _prompt_logprobs(
        self, steps: Sequence[RowStep], rows: Sequence[Row]
    ) -> tuple[RowPromptLogprobs, ...]:
        """Log-probabilities of prompt tokens, as many positions at a time as the exchange holds."""
        asked: list[tuple[int, int, int]] = []  # (row of the plan, batch row, index of the predicted token)
        offset = 0
        for number, (step, row) in enumerate(zip(steps, rows, strict=True)):
            if step.prompt_logprobs:
                last = min(step.start + step.count, row.prompt_len - 1)
                asked.extend((number, offset + i - step.start, i + 1) for i in range(step.start, last))
            offset += step.count
        entries: dict[int, list[TokenLogprobs]] = {}
        for first in range(0, len(asked), self._computation.max_rows):
            part = asked[first : first + self._computation.max_rows]
            logits = self._computation.logits([batch_row for _, batch_row, _ in part])
            if self.rank == 0:
                for values, (number, _, index) in zip(logits, part, strict=True):
                    row = rows[number]
                    entry = token_logprobs(values, int(row.tokens[index]), row.sampling.prompt_logprobs or 0)
                    entries.setdefault(number, []).append(entry)
            # Rank 0 has read these logits before anyone writes the next.
            self._barrier()
        return tuple(
            RowPromptLogprobs(steps[number].row, steps[number].start + 1, tuple(found))
            for number, found in entries.items()
        )

    def _sample(self, steps: Sequence[RowStep], rows: Sequence[Row]) -> tuple[RowToken, ...]:
        """Sample the rows that end here: row i by rank i mod world, to all through the exchange."""
        sampled: list[tuple[RowStep, Row]] = []
        last: list[int] = []
        offset = 0
        for step, row in zip(steps, rows, strict=True):
            offset += step.count
            if step.sample:
                sampled.append((step, row))
                last.append(offset - 1)
        if not sampled:
            return ()
        logits = self._computation.logits(last)
        tokens = self._computation.tokens
        for i in range(self.rank, len(sampled), self._world):
            row = sampled[i][1]
            tokens[i] = choose(logits[i], row.tokens, row.prompt_len, row.sampling)
        self._barrier()
        chosen: list[int] = tokens[: len(sampled)].tolist()
        result = []
        for i, (step, row) in enumerate(sampled):
            if chosen[i] == NO_TOKEN:
                # Nothing comes of this row. The step that may be under way already goes on with any token.
                result.append(RowToken(step.row, len(row), NO_TOKEN))
                row.append(0)
                continue
            asked = row.sampling.logprobs
            # The peers write logits again only after barriers of the next step, which rank 0 reaches later.
            entry = (
                token_logprobs(logits[i], chosen[i], asked) if asked is not None and not self.rank else None
            )
            result.append(RowToken(step.row, len(row), chosen[i], entry))
            row.append(chosen[i])
        return tuple(result)

    # ------------------------------------------------------------ meeting the peers

    def _barrier(self) -> None:
        began = self._clock.now()
        self.comm.barrier()
        self._wait_s += self._clock.now() - began


def _pattern(epoch: int, rank: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The proof of a rank: bytes that no other rank and no other epoch has."""
    head = np.frombuffer(f"{epoch}:{rank}:".encode(), np.uint8)
    return np.resize(np.concatenate((head, np.arange(rank, rank + 97, dtype=np.uint8))), PROOF_BYTES)
