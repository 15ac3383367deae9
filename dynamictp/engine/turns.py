"""Which domain plans next: domains that share a device take turns by the device seconds they use."""

from __future__ import annotations

from collections.abc import Iterable

from dynamictp.engine.domain import Domain, PlanRecord

DEPTH = 2
"""Steps in flight of a domain that has its devices to itself: the next one is planned ahead."""
QUANTUM_S = 0.05
"""Device seconds by which a domain may be ahead of those it shares a device with."""


class Turns:
    """Deficit round-robin. Owner of the domains' `virtual_s`.

    A domain beside others has one step in flight, and waits while it is more than a quantum ahead of one
    that has a step in flight. Domains on disjoint devices do not see each other. One that is being opened
    counts too: its proof and the first step after it stop all members until each has done what it had queued.
    """

    def order(self, domains: Iterable[Domain]) -> list[tuple[Domain, list[Domain]]]:
        """Domains with requests, those that used least first, each with the busy ones it shares with."""
        busy = [d for d in domains if d.state in {"preparing", "ready"} or not d.empty]
        if len(busy) > 1:
            busy.sort(key=lambda domain: domain.virtual_s)
        return [(d, [o for o in busy if o is not d and o.shares_device(d)]) for d in busy if d.running]

    def may_plan(self, domain: Domain, sharers: list[Domain]) -> bool:
        if not sharers:
            return len(domain.in_flight) < DEPTH
        if domain.in_flight:
            return False
        # A domain that was idle is owed a quantum at most.
        domain.virtual_s = max(domain.virtual_s, max(o.virtual_s for o in sharers) - QUANTUM_S)
        return not any(o.in_flight and domain.virtual_s > o.virtual_s + QUANTUM_S for o in sharers)

    def planned(self, domain: Domain, record: PlanRecord) -> None:
        domain.virtual_s += record.predicted_ms * 1e-3 * len(domain.devices)

    def completed(self, domain: Domain, record: PlanRecord, seconds: float) -> None:
        """Replace the prediction by what the step took."""
        domain.virtual_s += (seconds - record.predicted_ms * 1e-3) * len(domain.devices)
