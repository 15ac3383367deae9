"""Binds waiting requests to domains, late; and finds the domain that takes a request over."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dynamictp.control.route import DomainLoad, RequestNeed, RouteState, route
from dynamictp.engine.blocks import BlockPool
from dynamictp.engine.domain import Domain
from dynamictp.engine.pages import Block
from dynamictp.engine.request import Request
from dynamictp.engine.waiting import WaitingQueue

MAX_SKIPPED = 16
"""Requests too large for every domain that one turn looks past."""
RESERVE_SHARE = 16
"""At most 1/16 of the arena is kept from admissions for the growth of what runs."""


class Admission:
    """Owner of the routing state and of the prefix cache's hit counts (in tokens).

    Admission is in queue order: a request that has to wait for room makes those behind it wait. Only one
    that no serving domain could hold even when empty is passed over; it is let in when nothing else runs.
    """

    def __init__(
        self,
        pool: BlockPool,
        page_tokens: int,
        max_batched_tokens: int,
        domains: Callable[[], Iterable[Domain]],
    ) -> None:
        self.hits = 0
        self.queries = 0
        self._pool = pool
        self._page_tokens = page_tokens
        self._max_batched_tokens = max_batched_tokens
        self._domains = domains
        self._state = RouteState()

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
            hits = self._match(request)
            total = self._blocks(len(request.tokens))
            domain = self._choose(open_domains, total, hits)
            if domain is None:
                if total <= max(d.quota for d in domains):
                    return
                skipped += 1
                continue
            waiting.remove(request)
            self._bind(request, domain, hits)
            request.admitted_s = request.admitted_s or now
            backlog[domain] += len(request.tokens) - request.planned

    def handover(self, request: Request) -> Domain | None:
        """The serving domain that takes over a running request with its pages; None when none has room."""
        domains = [domain for domain in self._domains() if domain.state == "serving"]
        needs = [domain.missing(request.blocks) for domain in domains]
        loads = [
            # An empty domain takes any one request: its oldest may exceed the quota.
            self._load(domain, need if domain.empty else domain.quota - len(domain.blocks))
            for domain, need in zip(domains, needs, strict=True)
        ]
        return self._route(domains, loads, needs)

    def _choose(self, domains: list[Domain], total: int, hits: list[Block]) -> Domain | None:
        """A domain with room for all known tokens of a waiting request."""
        idle_hits = sum(not block.refs for block in hits)
        running = sum(len(d.running) + len(d.leaving) for d in self._domains())
        reserve = min(running, self._pool.total // RESERVE_SHARE)
        if total - len(hits) > self._pool.available - idle_hits - reserve:
            return None
        needs = [total - len(hits) + domain.missing(hits) for domain in domains]
        loads = [
            self._load(domain, need if not running else domain.quota - len(domain.blocks))
            for domain, need in zip(domains, needs, strict=True)
        ]
        return self._route(domains, loads, needs)

    def _route(self, domains: list[Domain], loads: list[DomainLoad], needs: list[int]) -> Domain | None:
        chosen = route(RequestNeed(needs), loads, self._state)
        if chosen is None:
            return None
        self._state = RouteState(self._state.routed + 1)
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

    def _match(self, request: Request) -> list[Block]:
        """Cached blocks of its tokens. The last token is always computed: its logits are needed."""
        if request.wants_prompt_logprobs:
            return []
        whole = (len(request.tokens) - 1) // self._page_tokens
        return self._pool.match(request.block_keys(whole, self._page_tokens))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    @staticmethod
    def _load(domain: Domain, blocks_free: int) -> DomainLoad:
        running = len(domain.running) + len(domain.leaving)
        return DomainLoad(domain.epoch, len(domain.devices), running, domain.free_rows, blocks_free)


def _backlog(domain: Domain) -> int:
    """Tokens that its requests have yet to prefill."""
    return sum(max(0, request.length - request.planned - 1) for request in domain.running)
