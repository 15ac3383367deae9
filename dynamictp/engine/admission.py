"""Binds waiting requests to domains, late; and finds the domain that takes a request over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from dynamictp.control.route import DomainLoad, RequestNeed, RouteState, route
from dynamictp.engine.blocks import BlockPool
from dynamictp.engine.domain import Domain
from dynamictp.engine.pages import Block
from dynamictp.engine.request import Request
from dynamictp.engine.steptime import StepTimes
from dynamictp.engine.waiting import WaitingQueue

MAX_SKIPPED = 16
"""Requests too large for every domain that one turn looks past."""
RESERVE_SHARE = 16
"""At most 1/16 of the arena is kept from admissions for the growth of what runs."""
EXPECTED_OUTPUT_TOKENS = 128
"""What routing expects of a request that may have more."""
DRAIN_RESERVE_SHARE = 8
"""At most 1/8 more while domains drain, for the growth of what runs on them."""


class Sides(Protocol):
    """Says which domains a request may go to while a switch shifts traffic from some to others."""

    def choices(self, request: Request, domains: list[Domain], blocks: int) -> list[list[Domain]]:
        """Groups of the serving domains for a request of so many blocks, the most wanted first; a later one
        takes what finds no room in those before."""
        ...

    def bound(self, domain: Domain) -> None:
        """A request was admitted to a domain."""


class _NoSides:
    def choices(self, request: Request, domains: list[Domain], blocks: int) -> list[list[Domain]]:
        return [domains]

    def bound(self, domain: Domain) -> None: ...


class Admission:
    """Owner of the routing state and of the prefix cache's hit counts (in tokens).

    Admission is in queue order: a request that has to wait for room makes those behind it wait. One that no
    serving domain could hold even when empty is let in when nothing else runs. Until then it is passed over,
    unless it ran before (in a wider layout): its stream is under way and must not wait for ever.
    """

    def __init__(
        self,
        pool: BlockPool,
        page_tokens: int,
        max_batched_tokens: int,
        times: StepTimes,
        domains: Callable[[], Iterable[Domain]],
        *,
        long_prompt_tokens: int,
    ) -> None:
        self.hits = 0
        self.queries = 0
        self._pool = pool
        self._page_tokens = page_tokens
        self._max_batched_tokens = max_batched_tokens
        self._times = times
        self._domains = domains
        self._state = RouteState(long_prompt_tokens=long_prompt_tokens)
        self.sides: Sides = _NoSides()

    def admit(self, waiting: WaitingQueue, now: float) -> None:
        """Give domains as many waiting requests as their next step can start on."""
        if not waiting:
            return
        domains = [domain for domain in self._domains() if domain.state == "serving"]
        if not domains:
            return
        backlog = {domain: _backlog(domain) for domain in domains}
        skipped = 0
        for request in waiting:
            open_domains = [d for d in domains if d.free_rows and backlog[d] < self._max_batched_tokens]
            if not open_domains or skipped > MAX_SKIPPED:
                return
            total = self._blocks(len(request.tokens))
            domain, hits = self._pick(request, domains, total, backlog)
            if domain is None:
                if request.resumed or total <= max(d.quota for d in domains):
                    return
                skipped += 1
                continue
            self._bind(request, domain, hits)
            request.admitted_s = request.admitted_s or now
            waiting.take(request)
            backlog[domain] += len(request.tokens) - request.planned

    def handover(self, request: Request) -> Domain | None:
        """The serving domain that takes over a running request with its pages; None when none has room."""
        serving = [domain for domain in self._domains() if domain.state == "serving"]
        for domains in self.sides.choices(request, serving, len(request.blocks)):
            needs = [domain.missing(request.blocks) for domain in domains]
            loads = [
                # An empty domain takes any one request: its oldest may exceed the quota.
                self._load(d, need if d.empty else d.quota - len(d.blocks), _backlog(d))
                for d, need in zip(domains, needs, strict=True)
            ]
            chosen = self._route(request, domains, loads, needs, request.length - request.planned)
            if chosen is not None:
                return chosen
        return None

    def _pick(
        self, request: Request, domains: list[Domain], total: int, backlog: dict[Domain, int]
    ) -> tuple[Domain | None, list[Block]]:
        """The domain for a waiting request, and the cached blocks that it may use there."""
        for side in self.sides.choices(request, domains, total):
            ready = [d for d in side if d.free_rows and backlog[d] < self._max_batched_tokens]
            if not ready:
                continue
            # What a ramp's new domains computed is not trusted outside of them.
            hits = self._match(request, trials=all(domain.trial for domain in ready))
            domain = self._choose(request, ready, total, hits, backlog)
            if domain is not None:
                return domain, hits
        return None, []

    def _choose(
        self,
        request: Request,
        domains: list[Domain],
        total: int,
        hits: list[Block],
        backlog: dict[Domain, int],
    ) -> Domain | None:
        """A domain with room for all known tokens of a waiting request."""
        idle_hits = sum(not block.refs for block in hits)
        running = sum(len(d.running) + len(d.leaving) for d in self._domains())
        reserve = min(running, self._pool.total // RESERVE_SHARE) + self._drain_reserve()
        if total - len(hits) > self._pool.available - idle_hits - reserve:
            return None
        needs = [total - len(hits) + domain.missing(hits) for domain in domains]
        loads = [
            self._load(domain, need if not running else domain.quota - len(domain.blocks), backlog[domain])
            for domain, need in zip(domains, needs, strict=True)
        ]
        return self._route(
            request, domains, loads, needs, len(request.tokens) - len(hits) * self._page_tokens
        )

    def _route(
        self, request: Request, domains: list[Domain], loads: list[DomainLoad], needs: list[int], tokens: int
    ) -> Domain | None:
        """`tokens`: what it has yet to compute, on any domain: they share the prefix cache."""
        need = RequestNeed(
            needs,
            [tokens] * len(domains),
            request.id,
            request.prompt_len,
            min(request.limit - len(request.tokens), EXPECTED_OUTPUT_TOKENS),
            request.priority,
        )
        chosen = route(need, loads, self._state)
        if chosen is None:
            return None
        self._state = self._state.after()
        return next(domain for domain in domains if domain.epoch == chosen.epoch)

    def _bind(self, request: Request, domain: Domain, hits: list[Block]) -> None:
        for block in hits:
            self._pool.share(block)
        request.blocks = hits
        request.entered = len(hits)
        request.planned = request.computed = len(hits) * self._page_tokens
        self.queries += len(request.tokens)
        self.hits += request.planned
        if request.cached_tokens < 0:
            request.cached_tokens = min(request.planned, request.prompt_len)
        domain.attach(request)
        self.sides.bound(domain)

    def _drain_reserve(self) -> int:
        """Blocks that requests of draining domains may still need where they are."""
        draining = [domain for domain in self._domains() if domain.state == "draining"]
        if not draining:
            return 0
        left = sum(self._blocks(r.limit) - len(r.blocks) for d in draining for r in d.running)
        return min(left, self._pool.total // DRAIN_RESERVE_SHARE)

    def _match(self, request: Request, *, trials: bool) -> list[Block]:
        """Cached blocks of its tokens. The last token is always computed: its logits are needed."""
        if request.wants_prompt_logprobs:
            return []
        whole = (len(request.tokens) - 1) // self._page_tokens
        return self._pool.match(request.block_keys(whole, self._page_tokens), trials=trials)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _load(self, domain: Domain, blocks_free: int, backlog: int) -> DomainLoad:
        running = len(domain.running) + len(domain.leaving)
        return DomainLoad(
            domain.epoch,
            len(domain.devices),
            running,
            domain.free_rows,
            blocks_free,
            step_s=self._times.decode_ms(domain.tp, running + 1) * 1e-3,
            token_s=self._times.prefill_ms(domain.tp, 1) * 1e-3,
            backlog_tokens=backlog,
        )


def _backlog(domain: Domain) -> int:
    """Tokens that its requests have yet to prefill."""
    return sum(max(0, request.length - request.planned - 1) for request in domain.running)
