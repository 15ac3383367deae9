"""Which domain takes a request (C6). Pure; called once per admission.

The score is the predicted completion: prompts queued on the domain and the request's own, then its output at
the step time of one more row. Length and priority are terms of it: long or important requests lean to wide
domains, short or unimportant ones leave these free. During a ramp the side comes first (`RampSides`), by a
hash of the request id, so that a request's side never changes while the new side's share grows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Generic, Literal, TypeVar
from zlib import crc32

Side = Literal["old", "new"]
D = TypeVar("D")

_LEAN = 0.5
"""How much longer a completion on the domain that the request leans to may take, at most."""
_ALIKE = 8
"""Completions in the same eighth of an e-fold count as equal: medians of measured steps are no better."""
_SHORT = 0.25
"""Prompts up to this part of `long_prompt_tokens` are short."""


@dataclass(frozen=True, slots=True)
class DomainLoad:
    """A serving domain at the time of routing. `rows_free` and `blocks_free` are what admission may take.

    `step_s`: seconds of a step that decodes one row more than now; `token_s`: seconds that a prompt token
    takes; `backlog_tokens`: prompt tokens queued on it. Zeros while nothing is known.
    """

    epoch: int
    devices: int
    running: int
    rows_free: int
    blocks_free: int
    step_s: float = 0.0
    token_s: float = 0.0
    backlog_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestNeed:
    """What a request takes on each domain: `blocks[i]` are the blocks new to domain i's account, `tokens[i]`
    the prompt tokens that it would have to compute (fewer where it finds its prefix; empty: none known).
    """

    blocks: Sequence[int]
    tokens: Sequence[int] = ()
    id: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Expected."""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class RouteState:
    """What routing remembers: how many requests it has routed (equal domains take turns)."""

    routed: int = 0
    long_prompt_tokens: int = 1024

    def after(self) -> RouteState:
        """The state once a request was bound."""
        return replace(self, routed=self.routed + 1)


@dataclass(frozen=True, slots=True)
class RampSides(Generic[D]):
    """A ramp, as routing sees it: `share` of the new requests go to the domains in `new`, those in `retiring`
    are left at 100 %. `first_due`: the first request, which always goes to the new side, is still to come.
    `probing`: the new side must get no request yet.
    """

    share: float
    new: Container[D]
    retiring: Container[D]
    first_due: bool = False
    probing: bool = False

    def groups(self, request_id: str, domains: Sequence[D], holds: Callable[[D], bool]) -> list[list[D]]:
        """The domains of the request's side, then those of the other one: a side without room leaves it the
        request. Not so while the probe runs, and at 100 %, as long as there is another way. `holds` says
        whether a domain could hold the request when empty.
        """
        if self.share >= 1.0:
            side = [domain for domain in domains if domain not in self.retiring]
            stays = any(holds(domain) for domain in side)
        else:
            new = self.first_due or ramp_side(request_id, self.share) == "new"
            side = [domain for domain in domains if (domain in self.new) == new]
            stays = self.probing and bool(side)
        others = [] if stays else [domain for domain in domains if domain not in side]
        return [group for group in (side, others) if group]


def route(request: RequestNeed, domains: Sequence[DomainLoad], state: RouteState) -> DomainLoad | None:
    """The domain with room where the request is predicted to be done first, its lean considered.

    Nearly equal ones go to the least load per device, then the most blocks left per device, then take turns.
    None when no domain can hold it now.
    """
    lean = _lean(request, state.long_prompt_tokens)
    widths = [domain.devices for domain in domains]
    widest, narrowest = max(widths, default=1), min(widths, default=1)
    best: DomainLoad | None = None
    best_score: tuple[int, float, float, int] | None = None
    for index, domain in enumerate(domains):
        left = domain.blocks_free - request.blocks[index]
        if not domain.rows_free or left < 0:
            continue
        tokens = request.tokens[index] if request.tokens else 0
        done_s = (domain.backlog_tokens + tokens) * domain.token_s + request.output_tokens * domain.step_s
        away = widest - domain.devices if lean > 0 else domain.devices - narrowest
        done_s *= 1 + _LEAN * abs(lean) * away / max(widest - narrowest, 1)
        score = (
            round(_ALIKE * log(done_s)) if done_s > 0 else 0,
            (domain.running + 1) / domain.devices,
            -left / domain.devices,
            (index - state.routed) % len(domains),
        )
        if best_score is None or score < best_score:
            best, best_score = domain, score
    return best


def ramp_side(request_id: str, share: float) -> Side:
    """The side of a request at that share of the new side: once new, always new as the share grows."""
    return "new" if crc32(request_id.encode()) < share * 2**32 else "old"


def _lean(request: RequestNeed, long_prompt_tokens: int) -> float:
    """1: to wide domains, −1: to narrow ones. Priority decides before length."""
    if request.priority:
        return 1.0 if request.priority > 0 else -1.0
    if request.prompt_tokens >= long_prompt_tokens:
        return 1.0
    return -1.0 if request.prompt_tokens <= _SHORT * long_prompt_tokens else 0.0
