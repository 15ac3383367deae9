"""Shadow probes: the engine sends itself requests, to see a new domain compute before clients do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamictp.engine.domain import Domain
from dynamictp.engine.request import Request, Shadow
from dynamictp.engine.requests import RequestBook
from dynamictp.messages import SamplingParams, SubmitRequest, pack_tokens

PROMPT_TOKENS = 8
OUTPUT_TOKENS = 2

Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens and their log-probabilities."""


@dataclass(frozen=True)
class _Sent:
    domain: Domain
    request: Request
    shadow: Shadow

    @property
    def answer(self) -> Answer | None:
        """None until it has ended, or when it did not get to its end."""
        if self.shadow.end not in {"stop", "length"}:
            return None
        return tuple(self.shadow.tokens), tuple(self.shadow.logprobs)


class Probe:
    """One greedy request on each new domain, and on an old one as long as the right answer is not known: with
    exact numerics every degree gives the same bits."""

    def __init__(self, prober: Prober, sent: Sequence[_Sent], old: _Sent | None, deadline_s: float) -> None:
        self._prober = prober
        self._sent = sent
        self._old = old
        self.deadline_s = deadline_s

    def look(self, now: float) -> str | None:
        """None while it runs, an empty text when it has passed, else what is wrong with a new domain."""
        for sent in self._sent:
            if sent.shadow.end == "error":
                return f"the shadow probe failed on {sent.domain.placed}: {sent.shadow.error}"
            if not all(map(math.isfinite, sent.shadow.logprobs)):
                return f"the shadow probe on {sent.domain.placed} gave a log-probability that is not finite"
        late = now >= self.deadline_s
        # One that never got pages, or lost them (it is `cancelled`), tells nothing of its domain.
        waiting = [s for s in self._sent if not s.shadow.end and not (late and not s.request.planned)]
        if waiting and late:
            return f"the shadow probe on {waiting[0].domain.placed} did not end in time"
        if waiting or (self._old is not None and not self._old.shadow.end and not late):
            return None
        return self._compare()

    def cancel(self) -> None:
        """End what still runs."""
        for sent in (*self._sent, *((self._old,) if self._old is not None else ())):
            if not sent.shadow.end:
                self._prober.book.end(sent.request, "cancelled")

    def _compare(self) -> str:
        prober = self._prober
        if prober.reference is None and self._old is not None:
            prober.reference = self._old.answer
        for sent in self._sent:
            if prober.reference is not None and sent.answer is not None and sent.answer != prober.reference:
                return f"the shadow probe gave other tokens or log-probabilities on {sent.domain.placed}"
        return ""


class Prober:
    """Owner of the right answer to the probe, once some domain that serves has given it."""

    def __init__(self, book: RequestBook, vocab: int) -> None:
        self.book = book
        self.reference: Answer | None = None
        self._prompt = [(1 + 7 * i) % vocab for i in range(PROMPT_TOKENS)]

    def begin(self, switch_id: str, new: Sequence[Domain], old: Sequence[Domain], deadline_s: float) -> Probe:
        """Send the probes. Domains of `new` have no requests yet."""
        known = next((d for d in old if d.free_rows), None) if self.reference is None else None
        sent = [self._send(switch_id, domain) for domain in new]
        return Probe(self, sent, self._send(switch_id, known) if known else None, deadline_s)

    def _send(self, switch_id: str, domain: Domain) -> _Sent:
        name = f"shadow:{switch_id}:{domain.id}"
        sampling = SamplingParams(seed=0, max_tokens=OUTPUT_TOKENS, temperature=0.0, logprobs=0)
        # A salt of its own: it has to be computed, not found in the prefix cache.
        message = SubmitRequest(
            name, 1, pack_tokens(self._prompt), len(self._prompt), sampling, arrival_s=0.0, salt=name
        )
        request = self.book.submit_shadow(message, domain)
        assert request.shadow is not None
        return _Sent(domain, request, request.shadow)
