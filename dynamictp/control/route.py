"""Which domain takes a request (C6). Pure; called once per admission.

The score is the predicted completion: prompts queued on the domain and the request's own, then its output at
the step time of one more row. Length and priority are terms of it: long or important requests lean to wide
domains, short or unimportant ones leave these free. During a ramp the side comes first, by a hash of the
request id, so that a request's side never changes while the new side's share grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Literal
from zlib import crc32

Side = Literal["old", "new"]

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
    side: Side = "old"


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
class Ramp:
    """A switch that hands its new side more and more of the new requests. `begun`: the first one, which
    always goes there, has gone."""

    share: float
    begun: bool = False


@dataclass(frozen=True, slots=True)
class RouteState:
    """What routing remembers: how many requests it has routed (equal domains take turns), and the ramp."""

    routed: int = 0
    ramp: Ramp | None = None
    long_prompt_tokens: int = 1024

    def after(self, chosen: DomainLoad) -> RouteState:
        """The state once a request was bound to `chosen`."""
        ramp = self.ramp
        if ramp is not None and not ramp.begun and chosen.side == "new":
            ramp = replace(ramp, begun=True)
        return replace(self, routed=self.routed + 1, ramp=ramp)


def route(request: RequestNeed, domains: Sequence[DomainLoad], state: RouteState) -> DomainLoad | None:
    """The domain with room where the request is predicted to be done first, its lean considered.

    Nearly equal ones go to the least load per device, then the most blocks left per device, then take turns.
    A side without room leaves the request to the other one. None when no domain can hold it now.
    """
    side = _side(request, state.ramp)
    lean = _lean(request, state.long_prompt_tokens)
    widths = [domain.devices for domain in domains]
    widest, narrowest = max(widths, default=1), min(widths, default=1)
    best: DomainLoad | None = None
    best_score: tuple[bool, int, float, float, int] | None = None
    for index, domain in enumerate(domains):
        left = domain.blocks_free - request.blocks[index]
        if not domain.rows_free or left < 0:
            continue
        tokens = request.tokens[index] if request.tokens else 0
        done_s = (domain.backlog_tokens + tokens) * domain.token_s + request.output_tokens * domain.step_s
        away = widest - domain.devices if lean > 0 else domain.devices - narrowest
        done_s *= 1 + _LEAN * abs(lean) * away / max(widest - narrowest, 1)
        score = (
            side is not None and domain.side != side,
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


def _side(request: RequestNeed, ramp: Ramp | None) -> Side | None:
    if ramp is None:
        return None
    return "new" if not ramp.begun else ramp_side(request.id, ramp.share)


def _lean(request: RequestNeed, long_prompt_tokens: int) -> float:
    """1: to wide domains, −1: to narrow ones. Priority decides before length."""
    if request.priority:
        return 1.0 if request.priority > 0 else -1.0
    if request.prompt_tokens >= long_prompt_tokens:
        return 1.0
    return -1.0 if request.prompt_tokens <= _SHORT * long_prompt_tokens else 0.0
