"""The old domains of switches: they drain, hand over at their deadline, and close."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from dynamictp.engine.domain import Domain
from dynamictp.engine.fleet import Fleet
from dynamictp.engine.request import Detach
from dynamictp.engine.requests import RequestBook
from dynamictp.engine.switch import Switch


class Drains:
    """Owner of the switches that committed, or were rolled back, and still have domains to close."""

    def __init__(self, fleet: Fleet, book: RequestBook, report: Callable[[Switch], None]) -> None:
        self._fleet = fleet
        self._book = book
        self._report = report
        self._switches: list[Switch] = []

    def __bool__(self) -> bool:
        return bool(self._switches)

    def add(self, switch: Switch) -> None:
        self._switches.append(switch)

    def retire(self, domains: Iterable[Domain], deadline_s: float) -> None:
        """Serving domains take no more requests; what they have then is handed over."""
        for domain in domains:
            domain.become("draining")
            domain.drain_deadline_s = deadline_s
            domain.handovers = domain.recomputes = 0

    def revived(self, domain: Domain, committed: Iterable[Switch]) -> None:
        """A domain serves again: no switch waits for its end, nor one of `committed`."""
        for switch in (*self._switches, *committed):
            if domain in switch.retiring:
                switch.retired(domain)

    def advance(self, now: float, revived: Collection[Domain]) -> None:
        """Hand over and close what is due; `revived` are about to serve again."""
        for domain in self._draining(revived):
            if now >= domain.drain_deadline_s:
                for request in tuple(domain.running):
                    self._book.detach(request, Detach.HANDOVER)
            if domain.empty:
                domain.retired_s = now
                self._fleet.close(domain)
        for switch in tuple(self._switches):
            self._advance(switch, now)

    def deadlines(self, revived: Collection[Domain]) -> list[float]:
        """When domains with requests are to hand them over."""
        return [domain.drain_deadline_s for domain in self._draining(revived) if domain.running]

    def _draining(self, revived: Collection[Domain]) -> list[Domain]:
        return [d for d in self._fleet.live() if d.state == "draining" and d not in revived]

    def _advance(self, switch: Switch, now: float) -> None:
        for domain in tuple(switch.retiring):
            if domain.epoch not in self._fleet.domains:
                switch.retired(domain)
        if switch.phase == "drain" and all(domain.state != "draining" for domain in switch.retiring):
            switch.finish_phase("drain", now)
            switch.phase = "close"
        if switch.retiring or switch.phase == "drain":
            return
        if switch.phase == "rollback":
            switch.finish_phase("rollback", now)
        else:
            switch.finish_phase("close", now)
            switch.outcome = "closed"
        self._switches.remove(switch)
        self._report(switch)
