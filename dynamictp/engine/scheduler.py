"""Builds the plan of one step of one domain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dynamictp.engine.blocks import BlockPool
from dynamictp.engine.domain import Domain, PlanRecord, RowWork
from dynamictp.engine.request import Request
from dynamictp.engine.steptime import StepTimes
from dynamictp.messages import NewRow, RowStep, StepPlan

Pages = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Limits:
    """Bounds of a step. `shared_step_ms` holds while domains take turns on a device."""

    page_tokens: int
    max_batched_tokens: int
    max_step_ms: float
    shared_step_ms: float = 50.0


class _Draft:
    """A plan under construction."""

    def __init__(self) -> None:
        self.rows: list[RowStep] = []
        self.new: list[NewRow] = []
        self.work: list[RowWork] = []
        self.prefill_tokens = 0

    def add(self, request: Request, count: int) -> None:
        """Plan `count` tokens of a request whose blocks are reserved."""
        start, end = request.planned, request.planned + count
        sample = end == request.length < request.limit
        logprobs = start + 1 < request.prompt_len and request.wants_prompt_logprobs
        new_blocks: Pages = ()
        if request.sent_blocks < 0:
            self.new.append(_new_row(request))
            request.sent_blocks = len(request.blocks)
        elif request.sent_blocks < len(request.blocks):
            new_blocks = tuple(block.pages for block in request.blocks[request.sent_blocks :])
            request.sent_blocks = len(request.blocks)
        self.rows.append(RowStep(request.row, start, count, sample, new_blocks, logprobs))
        self.work.append(RowWork(request, request.row, start, count, sample))
        request.planned = end
        request.in_flight += 1
        request.pending += sample


def _new_row(request: Request) -> NewRow:
    return NewRow(
        request.row, request.id, request.attempt, request.tokens.tobytes(), request.prompt_len,
        request.sampling, tuple(block.pages for block in request.blocks),
    )  # fmt: skip


class Scheduler:
    """Plans steps: decode first, then chunked prefill, each row with the blocks it needs.

    Who is older wins when blocks are short: a request may preempt newer ones and waits for older ones, so
    the oldest of all always goes on. `preempt` takes a victim off its domain (its blocks come back at once,
    or after its steps in flight).
    """

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        times: StepTimes,
        domains: Callable[[], Iterable[Domain]],
        preempt: Callable[[Request], None],
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._times = times
        self._domains = domains
        self._preempt = preempt

    def plan(self, domain: Domain, *, alone: bool) -> StepPlan | None:
        """The next step of the domain, accounted as in flight; None when no row can go on now.

        A step may be planned while the one before is in flight: its rows decode the token which that one
        will sample. `alone`: no other domain has work on its devices.
        """
        requests = list(domain.running)
        suspects = [request for request in requests if request.suspect]
        if suspects:
            # One that may be the cause of crashes has its step to itself, so that the next crash tells.
            if domain.in_flight:
                return None
            plan = self._plan(domain, suspects[:1], alone)
            if plan is not None:
                return plan
            requests = [request for request in requests if not request.suspect]
        return self._plan(domain, requests, alone)

    def _plan(self, domain: Domain, requests: list[Request], alone: bool) -> StepPlan | None:
        limits = self._limits
        draft = _Draft()
        prefilling: list[Request] = []
        for request in requests:
            length = request.length
            left = length - request.planned
            if left > 1:
                prefilling.append(request)
            elif left == 1 and (length < request.limit or not request.pending):
                if len(draft.rows) == limits.max_batched_tokens:
                    break
                if self._reserve(domain, request, request.planned + 1):
                    draft.add(request, 1)
        decode_rows = len(draft.rows)
        if prefilling:
            self._add_prefill(domain, draft, prefilling, alone)
        if not draft.rows:
            return None
        plan = StepPlan(
            domain.epoch, domain.next_step, tuple(draft.rows), tuple(draft.new), tuple(domain.gone)
        )
        domain.gone.clear()
        domain.next_step += 1
        predicted_ms = self._times.step_ms(domain.tp, decode_rows, draft.prefill_tokens)
        domain.in_flight.append(
            PlanRecord(plan.step, tuple(draft.work), decode_rows, draft.prefill_tokens, predicted_ms, alone)
        )
        return plan

    def _add_prefill(self, domain: Domain, draft: _Draft, requests: list[Request], alone: bool) -> None:
        limits = self._limits
        rows = len(draft.rows)
        budget = limits.max_batched_tokens - rows
        if rows or not alone:
            limit_ms = limits.max_step_ms if alone else min(limits.max_step_ms, limits.shared_step_ms)
            timed = self._times.prefill_tokens(domain.tp, rows, limit_ms)
            # Never less than a page, so that prefill goes on beside any number of streams.
            budget = min(budget, max(limits.page_tokens, timed))
        for request in requests:
            if budget < 1:
                break
            if request.detach is not None or request.domain is not domain:
                continue
            end = request.planned + min(request.length - request.planned, budget)
            if end < request.length and end - end % limits.page_tokens > request.planned:
                end -= end % limits.page_tokens
            if self._reserve(domain, request, end):
                count = end - request.planned
                draft.add(request, count)
                draft.prefill_tokens += count
                budget -= count

    def _reserve(self, domain: Domain, request: Request, tokens: int) -> bool:
        """Have blocks for that many tokens of the request. False when it has to wait for them, or was
        preempted itself in this plan's making."""
        if request.domain is not domain or request.detach is not None:
            return False
        needed = -(-tokens // self._limits.page_tokens)
        if needed <= len(request.blocks):
            return True
        while needed > len(request.blocks):
            if not self._add_block(domain, request):
                return False
        return request.domain is domain and request.detach is None

    def _add_block(self, domain: Domain, request: Request) -> bool:
        while len(domain.blocks) >= domain.quota:
            # The oldest request of a domain may exceed the quota: someone always makes progress.
            if min(domain.running, key=_age) is request:
                break
            if not self._make_room((domain,), request):
                return False
        while True:
            block = self._pool.allocate(request.blocks[-1] if request.blocks else None)
            if block is not None:
                request.blocks.append(block)
                domain.add_blocks((block,))
                return True
            if not self._make_room((domain, *self._domains()), request):
                return False

    def _make_room(self, domains: Iterable[Domain], request: Request) -> bool:
        """Preempt the newest request that is newer than this one, domain by domain. True when blocks came
        back at once; False to wait: for victims' steps in flight, or for older requests to end."""
        for domain in domains:
            if domain.leaving:
                return False
            victim = max(domain.running, key=_age, default=request)
            if victim.age > request.age:
                freed_at_once = not victim.in_flight
                self._preempt(victim)
                return freed_at_once
        return False


def _age(request: Request) -> int:
    return request.age
