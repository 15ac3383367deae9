"""The life of requests: submit, results of steps, ends, and the one way off a domain."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

from dynamictp.clock import Clock
from dynamictp.engine.blocks import BlockPool
from dynamictp.engine.domain import Domain, PlanRecord, RowWork
from dynamictp.engine.pages import Block
from dynamictp.engine.request import Detach, Request, Shadow
from dynamictp.engine.waiting import WaitingQueue
from dynamictp.errors import ProtocolError
from dynamictp.messages import (
    NO_TOKEN,
    CancelRequest,
    Outputs,
    PromptLogprobs,
    Queued,
    RequestEnd,
    RowPromptLogprobs,
    RowToken,
    StepResult,
    SubmitRequest,
    TokenEvent,
)

EndReason = Literal["stop", "length", "cancelled", "deadline", "error"]
MAX_CRASHES = 3
"""A request that ran in so many failed domains without getting on ends with an error. In the last one it ran
alone (`Request.suspect`), so it is the cause, or very unlucky."""


class RequestBook:
    """Owner of the live requests, the waiting queue and the outputs of a turn.

    `handover` chooses the domain that a request goes to from a draining one, None when none has room.
    """

    def __init__(
        self,
        pool: BlockPool,
        page_tokens: int,
        max_len: int,
        handover: Callable[[Request], Domain | None],
        clock: Clock,
    ) -> None:
        self.live: dict[str, Request] = {}
        self.waiting = WaitingQueue(clock)
        self.preemptions = 0
        self.max_len = max_len
        self.pool = pool
        self._page_tokens = page_tokens
        self._handover = handover
        self._age = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self._tokens: list[TokenEvent] = []
        self._ends: list[RequestEnd] = []
        self._prompts: list[PromptLogprobs] = []
        self._queued: list[Queued] = []

    # ------------------------------------------------------------ from the server

    def submit(self, message: SubmitRequest) -> None:
        """Queue a request. An attempt that is known, or older than the known one, is ignored."""
        known = self.live.get(message.request_id)
        if known is not None:
            if message.attempt <= known.attempt:
                return
            self._let_go(known)
        self._age += 1
        request = Request(message, self._age, self.max_len)
        self.live[request.id] = request
        length = len(request.tokens)
        if not 0 < request.prompt_len <= length or length > self.max_len:
            held = f"at most {self.max_len} tokens can be held"
            self._end(request, "error", f"{length} tokens, {request.prompt_len} of them prompt: {held}")
        elif request.output_tokens and request.tokens[-1] in request.stop_ids:
            self._end(request, "stop")
        elif length >= request.limit and not request.wants_prompt_logprobs:
            self._end(request, "length")
        else:
            self.waiting.add(request)
            if request.deadline_s is not None:
                heapq.heappush(self._deadlines, (request.deadline_s, request.age, request))

    def submit_shadow(self, message: SubmitRequest, domain: Domain) -> Request:
        """Run a request of the engine's own on `domain`, which has a free row; no client hears of it."""
        self._age += 1
        request = Request(message, self._age, self.max_len)
        request.shadow = Shadow()
        self.live[request.id] = request
        domain.attach(request)
        return request

    def cancel(self, message: CancelRequest) -> None:
        request = self.live.get(message.request_id)
        if request is not None and request.attempt == message.attempt:
            self.end(request, "cancelled")

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if self.live.get(request.id) is request:
                self.end(request, "deadline")

    def next_deadline(self) -> float | None:
        while self._deadlines and self.live.get(self._deadlines[0][2].id) is not self._deadlines[0][2]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def end(self, request: Request, reason: EndReason, error: str | None = None) -> None:
        """End a live request from outside of its steps: tokens still in flight are dropped."""
        self._let_go(request)
        self._end(request, reason, error)

    def take_outputs(self) -> Outputs | None:
        """Everything since the last call, in order; None for nothing."""
        if not (self._tokens or self._ends or self._prompts):
            return None
        outputs = Outputs(tuple(self._tokens), tuple(self._ends), tuple(self._prompts), tuple(self._queued))
        self._tokens, self._ends, self._prompts, self._queued = [], [], [], []
        return outputs

    # ------------------------------------------------------------ results

    def complete(self, domain: Domain, result: StepResult) -> PlanRecord:
        """A step is complete on all ranks. Raises `ProtocolError` when it is not the one expected."""
        if not domain.in_flight or domain.in_flight[0].step != result.step:
            expected = domain.in_flight[0].step if domain.in_flight else "none"
            raise ProtocolError(f"result of step {result.step} of {domain.id}; expected: {expected}")
        record = domain.in_flight[0]
        sampled = {token.row: token for token in result.tokens}
        for work in record.rows:
            token = sampled.get(work.row)
            if work.sample and (token is None or token.index != work.start + work.count):
                raise ProtocolError(f"step {result.step} of {domain.id} lacks the token of row {work.row}")
        domain.in_flight.popleft()
        if result.prompts:
            by_row = {work.row: work.request for work in record.rows}
            for prompt in result.prompts:
                self._prompt_logprobs(by_row[prompt.row], prompt)
        for work in record.rows:
            self._row_done(domain, work, sampled.get(work.row))
        return record

    def _row_done(self, domain: Domain, work: RowWork, token: RowToken | None) -> None:
        request = work.request
        request.in_flight -= 1
        request.computed = work.start + work.count
        if request.crashes and request.computed > request.crashed_at:
            request.crashes = 0
        if request.served is None:
            request.ran_on(domain)
        if request.computed // self._page_tokens > request.entered:
            self._enter_blocks(request)
        if work.sample:
            request.pending -= 1
        if request.detach is None or not request.detach.drops_output:
            if work.sample and token is not None:
                domain.tokens_total += 1
                self._sampled(request, token)
            elif request.computed == len(request.tokens) == request.limit:
                self._finish(request, "length")
        if request.detach is not None and not request.in_flight and request.domain is not None:
            self._settle(request, request.domain)

    def _sampled(self, request: Request, token: RowToken) -> None:
        if token.token == NO_TOKEN:
            self._fail_alone(request)
            return
        position = len(request.tokens) - request.prompt_len
        request.tokens.append(token.token)
        self.waiting.charge(request.tenant)
        served = request.served
        assert served is not None
        if request.shadow is not None:
            request.shadow.tokens.append(token.token)
            request.shadow.logprobs.append(token.logprobs.logprob if token.logprobs else 0.0)
        else:
            if not position:
                waited_s = max(0.0, request.admitted_s - request.arrival_s)
                self._queued.append(Queued(request.id, request.attempt, waited_s))
            self._tokens.append(
                TokenEvent(request.id, request.attempt, position, token.token, served, token.logprobs)
            )
        if token.token in request.stop_ids and position >= request.sampling.min_tokens:
            self._finish(request, "stop")
        elif len(request.tokens) >= request.limit:
            self._finish(request, "length")

    def _fail_alone(self, request: Request) -> None:
        """Its own numbers are not finite: nobody else's are touched, and nobody finds its blocks."""
        self.pool.forget(request.blocks)
        request.entered = len(request.blocks)
        self._end(request, "error", "the model's output for this request is not finite (NaN or infinite)")
        self.detach(request, Detach.FINISH)

    def _prompt_logprobs(self, request: Request, prompt: RowPromptLogprobs) -> None:
        entries = prompt.entries[max(0, request.prompts_from - prompt.start) :]
        if entries and (request.detach is None or not request.detach.drops_output):
            self._prompts.append(
                PromptLogprobs(request.id, request.attempt, request.prompts_from, tuple(entries))
            )
            request.prompts_from += len(entries)

    def _enter_blocks(self, request: Request) -> None:
        """Offer the blocks that completed steps have filled to the prefix cache."""
        full = request.computed // self._page_tokens
        keys = request.block_keys(full, self._page_tokens)
        trial = request.domain is not None and request.domain.trial
        for index in range(request.entered, full):
            before = request.blocks[index - 1] if index else None
            self.pool.enter(request.blocks[index], keys[index], before, trial=trial)
        request.entered = full

    # ------------------------------------------------------------ off a domain

    def detach(self, request: Request, why: Detach) -> None:
        """Take a running request out of plans; what `why` says follows its last step in flight.

        Until then its tokens still count unless `why` drops them. An end replaces another reason, nothing
        replaces an end.
        """
        domain = request.domain
        assert domain is not None
        if request.detach is not None and (request.detach.ends or not why.ends):
            return
        request.detach = why
        domain.running.pop(request, None)
        domain.leaving[request] = None
        if not request.in_flight:
            self._settle(request, domain)

    def distrust(self, domain: Domain) -> None:
        """Nothing that the domain's steps in flight compute is to be used: its requests are computed again
        elsewhere, and the blocks of those that end stay out of the prefix cache."""
        for request in (*domain.running, *domain.leaving):
            request.entered = len(request.blocks)
            if request.detach is None:
                self.detach(request, Detach.RECOMPUTE)
            elif not request.detach.ends:
                request.detach = Detach.RECOMPUTE

    def stay(self, request: Request) -> None:
        """Undo a handover that waits for its last step: the domain serves again."""
        domain = request.domain
        if domain is not None and request.detach is Detach.HANDOVER:
            request.detach = None
            del domain.leaving[request]
            domain.running[request] = None

    def lost(self, request: Request, crashed: bool) -> None:
        """Its domain failed; the caller keeps its blocks in quarantine. Compute it again elsewhere."""
        domain = request.domain
        assert domain is not None
        domain.release(request)
        request.blocks = []
        request.in_flight = request.pending = 0
        if request.detach is not None and request.detach.ends:
            return
        request.detach = None
        if crashed:
            request.crashes += 1
            request.crashed_at = max(request.crashed_at, request.computed)
        if request.crashes >= MAX_CRASHES:
            self._end(request, "error", f"its domain failed {request.crashes} times while it ran")
        else:
            self._requeue(request)

    def free(self, blocks: list[Block]) -> None:
        """Blocks that were in quarantine: nothing touches them any more."""
        self.pool.release(blocks)

    def _settle(self, request: Request, domain: Domain) -> None:
        """No step names the request any more: free its pages, or move them to another domain's account."""
        why, request.detach = request.detach, None
        moves = why is Detach.HANDOVER and request.shadow is None
        target = self._handover(request) if moves else None
        domain.release(request)
        if target is not None:
            request.handovers += 1
            domain.handovers += 1
            target.attach(request)
            return
        self.pool.release(request.blocks)
        request.blocks = []
        if why is Detach.PREEMPT:
            self.preemptions += 1
        elif why in {Detach.HANDOVER, Detach.RECOMPUTE}:
            domain.recomputes += 1
        if why is not None and not why.ends:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        if request.shadow is not None:
            # Preempted for want of pages, which says nothing about its domain.
            self._end(request, "cancelled")
            return
        request.recomputes += request.computed > 0
        request.planned = request.computed = request.entered = 0
        request.resumed = True
        self.waiting.add(request)

    def _finish(self, request: Request, reason: EndReason) -> None:
        request.finished = True
        self._end(request, reason)
        self.detach(request, Detach.FINISH)

    def _let_go(self, request: Request) -> None:
        if request.domain is None:
            self.waiting.remove(request)
        else:
            self.detach(request, Detach.CANCEL)

    def _end(self, request: Request, reason: EndReason, error: str | None = None) -> None:
        del self.live[request.id]
        if request.shadow is not None:
            request.shadow.end, request.shadow.error = reason, error or ""
            return
        self._ends.append(
            RequestEnd(
                request.id, request.attempt, reason, request.output_tokens,
                max(0, request.cached_tokens), error,
            )
        )  # fmt: skip
