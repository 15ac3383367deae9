"""One domain as the engine keeps it: state, rows, accounted blocks, plans in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dynamictp.engine.pages import Block
from dynamictp.engine.request import Request
from dynamictp.layout import PlacedShape
from dynamictp.messages import CommHandle, DomainStatus

State = Literal["preparing", "ready", "serving", "draining", "closed", "failed"]

_NEXT: dict[State, frozenset[State]] = {
    "preparing": frozenset({"ready", "closed", "failed"}),
    "ready": frozenset({"serving", "closed", "failed"}),
    "serving": frozenset({"draining", "failed"}),
    "draining": frozenset({"serving", "closed", "failed"}),
    "closed": frozenset({"failed"}),
    "failed": frozenset(),
}


class RowWork(msgspec.Struct, frozen=True):
    """A request's part of a step in flight."""

    request: Request
    row: int
    start: int
    count: int
    sample: bool


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A step in flight. `predicted_ms` is what the scheduler expects of it, `alone` that no other domain
    shared its devices when it was planned."""

    step: int
    rows: tuple[RowWork, ...]
    decode_rows: int
    prefill_tokens: int
    predicted_ms: float
    alone: bool


@dataclass(eq=False)
class Domain:
    """Owner of a domain's state, rows and plans in flight.

    `closed` means that `CloseDomain` is sent: no request can be on it, its epoch is over. The members'
    acknowledgements (`closed_by`) come later; until then its communicator is in use.
    """

    epoch: int
    placed: PlacedShape
    comm: CommHandle
    incarnations: tuple[int, ...]
    max_rows: int
    quota: int
    """Blocks its requests may name, together."""
    state: State = "preparing"
    running: dict[Request, None] = field(default_factory=dict)
    """Requests that are planned, in order of admission."""
    leaving: dict[Request, None] = field(default_factory=dict)
    """Detached requests whose last steps are in flight."""
    blocks: dict[Block, int] = field(default_factory=dict)
    """Distinct blocks its requests name, and by how many of them."""
    in_flight: deque[PlanRecord] = field(default_factory=deque)
    busy: bool = False
    """At its last result the next step was in flight already: what passes between the two is not idleness."""
    next_step: int = 0
    gone: list[int] = field(default_factory=list)
    """Rows the workers know that no request has any more."""
    opened_by: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Rank → (views, communicator) ms."""
    closed_by: set[int] = field(default_factory=set)
    drain_deadline_s: float = 0.0
    """When a draining domain's requests are handed over."""
    retired_s: float = 0.0
    """When its last request left it, while it is closed."""
    quarantine: list[list[Block]] = field(default_factory=list)
    """Blocks that steps of the failed domain may still touch."""
    virtual_s: float = 0.0
    """Device seconds used, for the turns of domains that share a device."""
    trial: bool = False
    """It serves on the new side of a ramp, which may still take it back."""
    tokens_total: int = 0
    handovers: int = 0
    recomputes: int = 0
    _free_rows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._free_rows = list(reversed(range(self.max_rows)))

    @property
    def id(self) -> str:
        return f"d{self.epoch}"

    @property
    def devices(self) -> tuple[int, ...]:
        return self.placed.devices

    @property
    def tp(self) -> int:
        return self.placed.shape.tp

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def empty(self) -> bool:
        """No request is on it and no step is in flight."""
        return not (self.running or self.leaving or self.in_flight)

    def become(self, state: State) -> None:
        """Raises RuntimeError for a transition that the life of a domain does not have."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"domain {self.id} can't go from {self.state} to {state}")
        self.state = state

    def attach(self, request: Request) -> None:
        """Give the request a row and account its blocks here."""
        request.domain = self
        request.row = self._free_rows.pop()
        request.sent_blocks = -1
        request.served = None
        self.running[request] = None
        self.add_blocks(request.blocks)

    def release(self, request: Request) -> None:
        """Take a request without steps in flight off: its row is free, its blocks are not accounted here."""
        self.running.pop(request, None)
        self.leaving.pop(request, None)
        if request.sent_blocks >= 0:
            self.gone.append(request.row)
        self._free_rows.append(request.row)
        for block in request.blocks:
            left = self.blocks[block] - 1
            if left:
                self.blocks[block] = left
            else:
                del self.blocks[block]
        request.domain, request.row, request.sent_blocks = None, -1, -1

    def add_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.blocks[block] = self.blocks.get(block, 0) + 1

    def missing(self, blocks: Iterable[Block]) -> int:
        """How many of the blocks would be new to its account."""
        return sum(block not in self.blocks for block in blocks)

    def shares_device(self, other: Domain) -> bool:
        return not set(self.devices).isdisjoint(other.devices)

    def status(self, model: str, heads: int) -> DomainStatus:
        shape = self.placed.shape
        return DomainStatus(
            self.id, self.epoch, model, shape.tp, shape.pp, self.devices, self.state,
            running=len(self.running) + len(self.leaving),
            kv_pages_used=len(self.blocks) * heads,
            kv_pages_cap=self.quota * heads,
            tokens_total=self.tokens_total,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise RuntimeError unless rows and block accounts match the requests."""
        requests = [*self.running, *self.leaving]
        rows = [request.row for request in requests] + self._free_rows
        if sorted(rows) != list(range(self.max_rows)):
            raise RuntimeError(f"rows of {self.id} are lost or doubled: {sorted(rows)}")
        counts: dict[Block, int] = {}
        for request in requests:
            if request.domain is not self:
                raise RuntimeError(f"request {request.id} runs on {self.id} and does not know it")
            for block in request.blocks:
                counts[block] = counts.get(block, 0) + 1
        if counts != self.blocks:
            raise RuntimeError(f"{self.id} accounts {len(self.blocks)} blocks, its requests {len(counts)}")
        steps: dict[Request, int] = {}
        for record in self.in_flight:
            for work in record.rows:
                steps[work.request] = steps.get(work.request, 0) + 1
        if any(request.in_flight != steps.get(request, 0) for request in requests):
            raise RuntimeError(f"steps in flight of {self.id} do not match its requests")
