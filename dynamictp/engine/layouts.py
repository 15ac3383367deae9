"""The layout as it is, and the switches that change it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from dynamictp.clock import Clock
from dynamictp.engine.domain import Domain, PlanRecord
from dynamictp.engine.drains import Drains
from dynamictp.engine.firsts import FirstAdmissions
from dynamictp.engine.fleet import Fleet
from dynamictp.engine.placing import Targets, keepable, missing, surplus
from dynamictp.engine.probe import Prober
from dynamictp.engine.ramp import Ramp
from dynamictp.engine.request import Request
from dynamictp.engine.requests import RequestBook
from dynamictp.engine.steptime import StepTimes
from dynamictp.engine.switch import Outcome, Switch
from dynamictp.errors import FatalError, LayoutRefused
from dynamictp.layout import Layout
from dynamictp.messages import (
    CancelSwitch,
    DomainOpened,
    DomainProven,
    EngineStart,
    FirstAdmission,
    SetDevices,
    SetLayout,
    StepResult,
    SwitchStatus,
)

log = logging.getLogger(__name__)

REMEMBERED_SWITCHES = 256
REBUILD_BACKOFF_S = 0.05
REBUILD_BACKOFF_MAX_S = 30.0
START_ATTEMPTS = 3


class LayoutManager:
    """Owner of the observed layout and of the switches.

    At most one switch is in flight (until its commit); drains of committed ones run beside it. Whenever the
    observed layout has a shape that no domain serves (at the start, or after a failure), a switch of the
    engine's own opens it.
    """

    def __init__(
        self,
        start: EngineStart,
        fleet: Fleet,
        book: RequestBook,
        clock: Clock,
        *,
        times: StepTimes,
        emit: Callable[[SwitchStatus | FirstAdmission], None],
    ) -> None:
        """`times`: step times measured so far, which a ramp judges by."""
        self._fleet = fleet
        self._book = book
        self._clock = clock
        self._emit = emit
        self._ramp_settings = start.ramp
        self._times = times
        self._prober = Prober(book, start.facts.vocab)
        self.targets = Targets(start.model, start.devices, start.legal_degrees, start.leased)
        self.observed = self.target(start.layout)
        self.started = False
        """Some layout serves, or has."""
        self._current: Switch | None = None
        self._drains = Drains(fleet, book, self._report)
        self._firsts = FirstAdmissions()
        self._committed: list[Switch] = []
        """Switches whose commit this turn is to report."""
        self._statuses: OrderedDict[str, SwitchStatus] = OrderedDict()
        self._failures = 0
        self._rebuild_at = 0.0

    @property
    def settled(self) -> bool:
        """No switch and no drain is under way, and the observed layout serves."""
        return self._current is None and not self._drains and not missing(self._fleet, self.observed)

    # ------------------------------------------------------------ commands

    def target(self, text: str) -> Layout:
        """The placed layout that a text asks for. Raises `LayoutRefused`."""
        return self.targets.parse(text, [domain.placed for domain in keepable(self._fleet)])

    def set_layout(self, command: SetLayout) -> None:
        """Begin a switch. A known id gets its latest status again, and is forced from now on if the command
        says so; a refused one gets a status `failed`."""
        known = self._statuses.get(command.switch_id)
        if known is not None:
            if command.forced and self._current is not None and self._current.id == command.switch_id:
                self._current.hurry()
            self._emit(known)
            return
        now = self._clock.now()
        running = self._current
        switch = Switch(
            command.switch_id, self.observed, self.observed, command.reason, command.drain_deadline_s, now,
            ramped=command.ramp or command.forced, forced=command.forced, settings=command.settings,
        )  # fmt: skip
        try:
            switch.target = self.target(command.layout)
        except LayoutRefused as error:
            switch.outcome, switch.error = "failed", error.message
        if running is not None and running.id and not switch.outcome:
            switch.outcome, switch.error = "failed", f"switch {running.id} is in flight"
        if switch.outcome:
            self._emit(switch.status())
            return
        if running is not None:
            self._abandon(running, "cancelled", "another layout was asked for")
        self._compare(switch)
        if not (switch.opening or switch.reviving or surplus(self._fleet, switch.target)):
            switch.outcome, switch.phase = "noop", "close"
            self.observed = switch.target
            self._report(switch)
            return
        self._current = switch
        self._report(switch)

    def set_devices(self, command: SetDevices) -> None:
        """Devices are leased or returned. One that the layout has is kept all the same: requests come first,
        and the next snapshot says so."""
        busy = self.observed.devices | (self._current.target.devices if self._current else frozenset())
        leased = frozenset(command.leased)
        if busy & leased:
            log.error("devices %s are leased and in use: %s", sorted(busy & leased), self.observed)
        self.targets.leased = leased - busy

    def cancel(self, command: CancelSwitch) -> None:
        """Take a switch back before its commit; later only its status is sent again."""
        current = self._current
        if current is not None and current.id == command.switch_id:
            self._take_back(current, "cancelled", None)
        elif command.switch_id in self._statuses:
            self._emit(self._statuses[command.switch_id])

    # ------------------------------------------------------------ from workers

    def on_opened(self, message: DomainOpened) -> None:
        domain = self._fleet.domains.get(message.epoch)
        if domain is None or domain.state != "preparing":
            return
        domain.opened_by[message.rank] = (message.views_ms, message.communicator_ms)
        current = self._current
        if current is not None and domain in current.opening:
            current.weight_bytes_copied += message.weight_bytes_copied

    def on_proven(self, message: DomainProven) -> None:
        domain = self._fleet.domains.get(message.epoch)
        if domain is not None and domain.state == "preparing" and message.rank == 0:
            domain.become("ready")

    def on_failed(self, domain: Domain, error: str, *, worker_lost: bool) -> None:
        """A domain failed (the fleet has taken it apart): what that means for the switches.

        For a lost worker there is no back-off: the supervisor takes care when it starts the next one.
        """
        if not worker_lost:
            backoff = REBUILD_BACKOFF_S * 2.0 ** min(self._failures, 16)
            self._failures += 1
            self._rebuild_at = self._clock.now() + min(REBUILD_BACKOFF_MAX_S, backoff)
        current = self._current
        if current is not None and domain in (*current.opening, *current.reviving):
            if domain in current.reviving:
                current.reviving.remove(domain)
            else:
                current.opening.remove(domain)
            self._take_back(current, "failed", error, distrust=not worker_lost)
        if not worker_lost and not self.started and self._failures >= START_ATTEMPTS:
            raise FatalError(f"the first layout {self.observed} does not open: {error}")

    def on_completed(self, domain: Domain, record: PlanRecord, result: StepResult) -> None:
        """A step is complete: what failed before is no sign any more."""
        self._failures = 0
        if self._ramp is not None:
            self._ramp.completed(domain, record, result)

    # ------------------------------------------------------------ sides of a ramp

    def on_trial(self, domain: Domain) -> bool:
        """What the domain computes is not trusted yet."""
        return self._ramp is not None and self._ramp.tries(domain)

    @property
    def _ramp(self) -> Ramp | None:
        return self._current.ramp if self._current is not None else None

    def choices(self, request: Request, domains: list[Domain], blocks: int) -> list[list[Domain]]:
        """The serving domains in the order in which they may take the request: its side of a ramp first."""
        return [domains] if self._ramp is None else self._ramp.choices(request, domains, blocks)

    def bound(self, domain: Domain) -> None:
        """A request was admitted to a domain."""
        if self._ramp is not None:
            self._ramp.bound(domain)
        first = self._firsts.admitted(domain, self._clock.now())
        if first is not None:
            self._emit(first)

    # ------------------------------------------------------------ every turn

    def advance(self) -> None:
        """Take every switch as far as it can go now."""
        now = self._clock.now()
        if self._current is None:
            self._rebuild(now)
        if self._current is not None:
            self._advance(self._current, now)
        revived = self._current.reviving if self._current is not None else []
        self._drains.advance(now, revived)

    def report_commits(self) -> None:
        """Call after planning: a commit lasts until the first plans under the new routing are made (or none
        could be)."""
        now = self._clock.now()
        for switch in self._committed:
            switch.finish_phase("commit", now)
            switch.outcome = "committed"
            self._report(switch)
            switch.phase = "drain"
            self._drains.add(switch)
        self._committed.clear()

    def next_deadline(self) -> float | None:
        revived = self._current.reviving if self._current is not None else []
        deadlines = self._drains.deadlines(revived)
        if (
            self._current is None
            and self._clock.now() < self._rebuild_at
            and missing(self._fleet, self.observed)
        ):
            deadlines.append(self._rebuild_at)
        if self._ramp is not None:
            deadlines.append(self._ramp.deadline_s)
        return min(deadlines, default=None)

    # ------------------------------------------------------------ phases

    def _advance(self, switch: Switch, now: float) -> None:
        if switch.phase == "prepare" and self._prepare(switch, now):
            switch.phase = "proof"
            self._report(switch)
        if switch.phase == "proof" and all(domain.state == "ready" for domain in switch.opening):
            switch.finish_phase("proof", now)
            switch.phases_ms["ramp"] = 0.0
            if switch.ramped and switch.opening:
                self._begin_ramp(switch, now)
            else:
                self._commit(switch, now)
        if switch.phase == "ramp" and switch.ramp is not None:
            self._advance_ramp(switch, switch.ramp, now)

    def _prepare(self, switch: Switch, now: float) -> bool:
        """Views, then communicators, in the background of what runs. True once all members have them and
        the proofs are queued behind their work."""
        if not switch.opened:
            if not self._fleet.can_open(switch.opening):
                self._free_slots(switch, now)
                return False
            for domain in switch.opening:
                self._fleet.open(domain)
            switch.opened = True
        if any(len(domain.opened_by) < len(domain.devices) for domain in switch.opening):
            return False
        times = [time for domain in switch.opening for time in domain.opened_by.values()]
        switch.phases_ms["prepare_views"] = max((views for views, _ in times), default=0.0)
        switch.phases_ms["prepare_communicator"] = max((comm for _, comm in times), default=0.0)
        switch.mark_s = now
        for domain in switch.opening:
            self._fleet.prove(domain)
        return True

    def _free_slots(self, switch: Switch, now: float) -> None:
        """Communicators wait for slots: hand over at once what drains, and give up if nothing does."""
        if not self._fleet.complete(self.targets.leased):
            return
        held = [d for d in self._fleet.domains.values() if d not in switch.opening]
        held = [d for d in held if d.state in {"draining", "closed", "failed"} and d not in switch.reviving]
        for domain in held:
            domain.drain_deadline_s = min(domain.drain_deadline_s, now)
        if not held:
            self._abandon(switch, "failed", f"no {len(switch.opening)} communicator slots are free")

    def _begin_ramp(self, switch: Switch, now: float) -> None:
        """The new domains serve on trial. The layout stays the old one until the ramp is done."""
        old = [domain for domain in self._fleet.live() if domain.state == "serving"]
        self._serve(switch)
        new = [*switch.opening, *switch.reviving]
        for domain in new:
            domain.trial = True
        settings = switch.settings or self._ramp_settings
        switch.ramp = Ramp(
            settings,
            new=new,
            retiring=surplus(self._fleet, switch.target),
            probe=self._prober.begin(switch.id, switch.opening, old, now + settings.probe_s),
            times=self._times.copy(),
            forced=switch.forced,
        )
        switch.phase = "ramp"
        self._report(switch)

    def _advance_ramp(self, switch: Switch, ramp: Ramp, now: float) -> None:
        share = ramp.share
        regression = ramp.advance(now)
        if regression is not None:
            self._take_back(switch, "rolled_back", regression.reason, distrust=regression.distrust)
        elif ramp.done:
            switch.finish_phase("ramp", now)
            self._end_trial(switch, accept=True)
            self._commit(switch, now)
        elif ramp.share != share:
            self._report(switch)

    def _end_trial(self, switch: Switch, *, accept: bool) -> None:
        for domain in (*switch.opening, *switch.reviving):
            domain.trial = False
        self._book.pool.end_trial(accept=accept)
        switch.ramp = None

    def _serve(self, switch: Switch) -> None:
        """The new domains take requests."""
        for domain in switch.opening:
            domain.become("serving")
        for domain in switch.reviving:
            domain.become("serving")
            for request in tuple(domain.leaving):
                self._book.stay(request)
            self._drains.revived(domain, self._committed)
        self._firsts.serve(switch)

    def _commit(self, switch: Switch, now: float) -> None:
        if switch.phase != "ramp":
            self._serve(switch)
        switch.phase = "commit"
        switch.retiring = surplus(self._fleet, switch.target)
        self._drains.retire(switch.retiring, now + switch.drain_deadline_s)
        self.observed = switch.target
        self.started = True
        self._current = None
        self._committed.append(switch)

    def _rebuild(self, now: float) -> None:
        """Open what the observed layout misses: at the start once all workers are there, later whatever has
        its workers."""
        absent = missing(self._fleet, self.observed)
        if now < self._rebuild_at or not any(self._fleet.has_workers(placed.devices) for placed in absent):
            return
        if not self.started and not self._fleet.complete(self.targets.leased):
            return
        if any(domain.state == "failed" for domain in self._fleet.domains.values()):
            return
        switch = Switch("", self.observed, self.observed, "rebuild" if self.started else "start", 0.0, now)
        self._compare(switch)
        switch.opening = [d for d in switch.opening if self._fleet.has_workers(d.devices)]
        self._current = switch

    def _take_back(
        self, switch: Switch, outcome: Outcome, error: str | None, *, distrust: bool = False
    ) -> None:
        """Take an uncommitted switch back, in mid-ramp too: the old side takes the new one's requests over,
        or (`distrust`) computes them again."""
        if switch.ramp is None:
            self._abandon(switch, outcome, error)
            return
        now = self._clock.now()
        switch.ramp.stop()
        self._end_trial(switch, accept=not distrust)
        switch.finish_phase("ramp", now)
        switch.phase, switch.outcome, switch.error = "rollback", outcome, error
        if outcome == "failed":
            switch.outcome = "rolled_back"
        switch.retiring = [d for d in (*switch.opening, *switch.reviving) if d.state == "serving"]
        self._drains.retire(switch.retiring, now)
        for domain in switch.retiring if distrust else ():
            self._book.distrust(domain)
        self._current = None
        self._drains.add(switch)
        self._report(switch)

    def _abandon(self, switch: Switch, outcome: Outcome, error: str | None) -> None:
        """Take an uncommitted switch back: the layout stays as it was."""
        for domain in switch.opening:
            if domain.epoch in self._fleet.domains and domain.state in {"preparing", "ready"}:
                self._fleet.close(domain)
        self._current = None
        switch.outcome, switch.error = outcome, error
        self._report(switch)

    # ------------------------------------------------------------ comparing layouts

    def _compare(self, switch: Switch) -> None:
        """What the target needs opened and revived. Domains are made, not yet told to anyone."""
        by_place = {domain.placed: domain for domain in reversed(keepable(self._fleet))}
        for placed in switch.target.domains:
            domain = by_place.get(placed)
            if domain is None:
                switch.opening.append(self._fleet.make(placed))
            elif domain.state == "draining":
                switch.reviving.append(domain)

    def _report(self, switch: Switch) -> None:
        if not switch.id:
            return
        status = switch.status()
        self._statuses[switch.id] = status
        while len(self._statuses) > REMEMBERED_SWITCHES:
            self._statuses.popitem(last=False)
        self._emit(status)
