"""The waiting queue of a pool: whose turn it is.

Requests that ran before come first. Then priorities, strictly; but who has waited for `AGEING_S` counts as of
the highest priority there is, so nobody starves. Tenants of one priority take turns: the one that was served
least comes next, counted in tokens, output twice, and who comes back after a pause gets no credit for it
(virtual token counters: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). Within a tenant
HTTP requests take turns, by start tags: the first prompt of a list waits like any other request, each later
one until the list's fair share of what is served has come to it (start-time fair queueing: Goyal, Vin, Cheng,
SIGCOMM 1996). Requests of one prompt are so in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from dynamictp.clock import Clock
from dynamictp.engine.request import Request

AGEING_S = 5.0
OUTPUT_COST = 2.0
"""Cost of an output token in prompt tokens."""

Lane = tuple[str, int]
"""Tenant and priority."""
Entry = tuple[float, float, int, Request]
"""Start tag (0 for requests that ran before), arrival, age. Ages are unique: requests are never compared."""


@dataclass(slots=True)
class _Group:
    """What waits of one HTTP request. `finish` is the tag at which its share so far ends."""

    finish: float
    waiting: int = 0


@dataclass(slots=True)
class _Tenant:
    """`served` counts its tokens. `virtual` is the time of its tags: it runs as its requests are served, the
    slower the more HTTP requests wait.
    """

    served: float = 0.0
    virtual: float = 0.0
    waiting: int = 0
    groups: dict[str, _Group] = field(default_factory=dict)


class WaitingQueue:
    """Owner of the requests that no domain has, and of what each tenant was served."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._resumed: list[Entry] = []
        self._lanes: dict[Lane, list[Entry]] = {}
        self._entries: dict[Request, Entry] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._left = 0.0
        """What the tenant had been served whose last request left."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In order; the current request may be taken or removed, which changes whose turn is next."""
        for entry in tuple(self._resumed):
            yield entry[-1]
        now = self._clock.now()
        passed: dict[Lane, int] = {}
        while (lane := self._next(passed, now)) is not None:
            request = self._lanes[lane][passed.get(lane, 0)][-1]
            yield request
            if request in self._entries:
                passed[lane] = passed.get(lane, 0) + 1

    def unordered(self) -> Collection[Request]:
        """All of them; quicker than in order."""
        return self._entries.keys()

    def add(self, request: Request) -> None:
        if request.resumed:
            entry = (0.0, request.arrival_s, request.age, request)
            insort(self._resumed, entry)
        else:
            entry = (self._start_tag(request), request.arrival_s, request.age, request)
            insort(self._lanes.setdefault((request.tenant, request.priority), []), entry)
        self._entries[request] = entry

    def take(self, request: Request) -> None:
        """Its turn has come: it is charged what it has to compute, once. Raises KeyError when it is not
        waiting."""
        cost = 0 if request.resumed else len(request.tokens) - request.computed
        tenant = self._tenants.get(request.tenant)
        if tenant is not None:
            tenant.virtual += cost / max(1, len(tenant.groups))
        self.remove(request)
        self.charge(request.tenant, cost)

    def remove(self, request: Request) -> None:
        """It waits no more. Raises KeyError when it is not waiting."""
        entry = self._entries.pop(request)
        if request.resumed:
            del self._resumed[bisect_left(self._resumed, entry)]
            return
        key = request.tenant, request.priority
        lane = self._lanes[key]
        del lane[bisect_left(lane, entry)]
        if not lane:
            del self._lanes[key]
        tenant = self._tenants[request.tenant]
        group = tenant.groups[request.group]
        group.waiting -= 1
        if not group.waiting:
            del tenant.groups[request.group]
        tenant.waiting -= 1
        if not tenant.waiting:
            self._left = tenant.served

    def charge(self, name: str, tokens: float = OUTPUT_COST) -> None:
        """A tenant was served that much, by default an output token."""
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.served += tokens

    def _start_tag(self, request: Request) -> float:
        tenant = self._tenants.setdefault(request.tenant, _Tenant())
        if not tenant.waiting:
            busy = [other.served for other in self._tenants.values() if other.waiting]
            tenant.served = max(tenant.served, min(busy, default=self._left))
        tenant.waiting += 1
        group = tenant.groups.setdefault(request.group, _Group(tenant.virtual))
        group.waiting += 1
        start = max(tenant.virtual, group.finish)
        group.finish = start + len(request.tokens)
        return start

    def _next(self, passed: dict[Lane, int], now: float) -> Lane | None:
        """The lane whose turn it is, leaving out so many requests of each."""
        top = max((priority for _, priority in self._lanes), default=0)
        best: Lane | None = None
        best_rank: tuple[float, ...] = ()
        for lane, entries in self._lanes.items():
            at = passed.get(lane, 0)
            if at < len(entries):
                _, arrival_s, age, _ = entries[at]
                level = top if now - arrival_s >= AGEING_S else lane[1]
                rank = (-level, self._tenants[lane[0]].served, arrival_s, age)
                if best is None or rank < best_rank:
                    best, best_rank = lane, rank
        return best
