"""The layout as it is, and the switches that change it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from dynamictp.clock import Clock
from dynamictp.engine.domain import Domain
from dynamictp.engine.fleet import Fleet
from dynamictp.engine.request import Detach
from dynamictp.engine.requests import RequestBook
from dynamictp.engine.switch import Outcome, Switch
from dynamictp.errors import FatalError, LayoutRefused
from dynamictp.layout import Layout, LayoutSpec, PlacedShape, Shape, legal_specs, parse_layout, place
from dynamictp.messages import (
    CancelSwitch,
    DomainOpened,
    DomainProven,
    EngineStart,
    SetLayout,
    SwitchStatus,
)

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
        emit: Callable[[SwitchStatus], None],
    ) -> None:
        self._fleet = fleet
        self._book = book
        self._clock = clock
        self._model = start.model
        self._legal = start.legal_degrees
        self._emit = emit
        self.observed = self.target(start.layout)
        self.started = False
        """Some layout serves, or has."""
        self._current: Switch | None = None
        self._drains: list[Switch] = []
        self._committed: list[Switch] = []
        """Switches whose commit this turn is to report."""
        self._statuses: OrderedDict[str, SwitchStatus] = OrderedDict()
        self._failures = 0
        self._rebuild_at = 0.0

    @property
    def settled(self) -> bool:
        """No switch and no drain is under way, and the observed layout serves."""
        return self._current is None and not self._drains and not self._missing(self.observed)

    # ------------------------------------------------------------ commands

    def target(self, text: str) -> Layout:
        """The placed layout that a text asks for. Raises `LayoutRefused`."""
        devices = self._fleet.devices
        legal = tuple(map(str, legal_specs(self._legal, devices)))
        try:
            named = parse_layout(text)
            if isinstance(named, Layout):
                layout = Layout(tuple(PlacedShape(self._shape(d.shape), d.devices) for d in named.domains))
            else:
                spec = LayoutSpec(tuple(map(self._shape, named.shapes)))
                layout = place(spec, devices, [domain.placed for domain in self._keepable()])
        except LayoutRefused as error:
            raise LayoutRefused(error.message, legal=legal) from error
        if any(device >= devices for device in layout.devices):
            raise LayoutRefused(f"{layout} names a device beyond {devices - 1}", legal=legal)
        return layout

    def set_layout(self, command: SetLayout) -> None:
        """Begin a switch. A known id gets its latest status again; a refused one a status `failed`."""
        known = self._statuses.get(command.switch_id)
        if known is not None:
            self._emit(known)
            return
        now = self._clock.now()
        running = self._current
        switch = Switch(
            command.switch_id, self.observed, self.observed, command.reason, command.drain_deadline_s, now
        )
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
        if not (switch.opening or switch.reviving or self._surplus(switch)):
            switch.outcome, switch.phase = "noop", "close"
            self.observed = switch.target
            self._report(switch)
            return
        self._current = switch
        self._report(switch)

    def cancel(self, command: CancelSwitch) -> None:
        """Take a switch back before its commit; later only its status is sent again."""
        current = self._current
        if current is not None and current.id == command.switch_id:
            self._abandon(current, "cancelled", None)
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
            self._abandon(current, "failed", error)
        if not worker_lost and not self.started and self._failures >= START_ATTEMPTS:
            raise FatalError(f"the first layout {self.observed} does not open: {error}")

    def on_progress(self) -> None:
        """A step is complete: what failed before is no sign any more."""
        self._failures = 0

    # ------------------------------------------------------------ every turn

    def advance(self) -> None:
        """Take every switch as far as it can go now."""
        now = self._clock.now()
        if self._current is None:
            self._rebuild(now)
        if self._current is not None:
            self._advance(self._current, now)
        self._drain(now)

    def report_commits(self) -> None:
        """Call after planning: a commit lasts until the first plans under the new routing are made (or none
        could be)."""
        now = self._clock.now()
        for switch in self._committed:
            switch.phases_ms["ramp"] = 0.0
            switch.finish_phase("commit", now)
            switch.outcome = "committed"
            self._report(switch)
            switch.phase = "drain"
            self._drains.append(switch)
        self._committed.clear()

    def next_deadline(self) -> float | None:
        deadlines = [d.drain_deadline_s for d in self._draining() if d.running]
        if self._current is None and self._clock.now() < self._rebuild_at and self._missing(self.observed):
            deadlines.append(self._rebuild_at)
        return min(deadlines, default=None)

    # ------------------------------------------------------------ phases

    def _advance(self, switch: Switch, now: float) -> None:
        if switch.phase == "prepare" and self._prepare(switch, now):
            switch.phase = "proof"
            self._report(switch)
        if switch.phase == "proof" and all(domain.state == "ready" for domain in switch.opening):
            switch.finish_phase("proof", now)
            switch.phase = "commit"
            self._commit(switch, now)

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
        if not self._fleet.complete:
            return
        held = [d for d in self._fleet.domains.values() if d not in switch.opening]
        held = [d for d in held if d.state in {"draining", "closed", "failed"} and d not in switch.reviving]
        for domain in held:
            domain.drain_deadline_s = min(domain.drain_deadline_s, now)
        if not held:
            self._abandon(switch, "failed", f"no {len(switch.opening)} communicator slots are free")

    def _commit(self, switch: Switch, now: float) -> None:
        for domain in switch.opening:
            domain.become("serving")
        for domain in switch.reviving:
            domain.become("serving")
            for request in tuple(domain.leaving):
                self._book.stay(request)
            for earlier in (*self._drains, *self._committed):
                if domain in earlier.retiring:
                    earlier.retired(domain)
        switch.retiring = self._surplus(switch)
        for domain in switch.retiring:
            domain.become("draining")
            domain.drain_deadline_s = now + switch.drain_deadline_s
            domain.handovers = domain.recomputes = 0
        self.observed = switch.target
        self.started = True
        self._current = None
        self._committed.append(switch)

    def _drain(self, now: float) -> None:
        for domain in self._draining():
            if now >= domain.drain_deadline_s:
                for request in tuple(domain.running):
                    self._book.detach(request, Detach.HANDOVER)
            if domain.empty:
                domain.retired_s = now
                self._fleet.close(domain)
        for switch in tuple(self._drains):
            self._advance_drain(switch, now)

    def _draining(self) -> list[Domain]:
        """Domains that drain and are not about to be revived."""
        revived = self._current.reviving if self._current is not None else []
        return [d for d in self._fleet.live() if d.state == "draining" and d not in revived]

    def _advance_drain(self, switch: Switch, now: float) -> None:
        for domain in tuple(switch.retiring):
            if domain.epoch not in self._fleet.domains:
                switch.retired(domain)
        if switch.phase == "drain" and all(domain.state != "draining" for domain in switch.retiring):
            switch.finish_phase("drain", now)
            switch.phase = "close"
        if switch.phase == "close" and not switch.retiring:
            switch.finish_phase("close", now)
            switch.outcome = "closed"
            self._drains.remove(switch)
            self._report(switch)

    def _rebuild(self, now: float) -> None:
        """Open what the observed layout misses: at the start once all workers are there, later whatever has
        its workers."""
        missing = self._missing(self.observed)
        if now < self._rebuild_at or not any(self._fleet.has_workers(placed.devices) for placed in missing):
            return
        if not self.started and not self._fleet.complete:
            return
        if any(domain.state == "failed" for domain in self._fleet.domains.values()):
            return
        switch = Switch("", self.observed, self.observed, "rebuild" if self.started else "start", 0.0, now)
        self._compare(switch)
        switch.opening = [d for d in switch.opening if self._fleet.has_workers(d.devices)]
        self._current = switch

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
        by_place = {domain.placed: domain for domain in reversed(self._keepable())}
        for placed in switch.target.domains:
            domain = by_place.get(placed)
            if domain is None:
                switch.opening.append(self._fleet.make(placed))
            elif domain.state == "draining":
                switch.reviving.append(domain)

    def _surplus(self, switch: Switch) -> list[Domain]:
        """Serving domains that the target does not have."""
        kept = set(switch.target.domains)
        return [d for d in self._fleet.live() if d.state == "serving" and d.placed not in kept]

    def _missing(self, layout: Layout) -> list[PlacedShape]:
        """What of the layout no domain serves."""
        served = {domain.placed for domain in self._fleet.live() if domain.state == "serving"}
        return [placed for placed in layout.domains if placed not in served]

    def _keepable(self) -> list[Domain]:
        """Domains a target may keep: serving ones first, those with most requests first."""
        live = [d for d in self._fleet.live() if d.state in {"serving", "draining"}]
        return sorted(live, key=lambda d: (d.state != "serving", -len(d.running) - len(d.leaving)))

    def _shape(self, shape: Shape) -> Shape:
        if shape.pp > 1:
            raise LayoutRefused(f"{shape}: pipeline stages (pp > 1) are not supported yet")
        if shape.model not in {"", self._model}:
            raise LayoutRefused(f"{shape}: model '{shape.model}' is not served here")
        if shape.tp not in self._legal:
            raise LayoutRefused(f"{shape}: degrees legal here are {', '.join(map(str, self._legal))}")
        return Shape(shape.tp)

    def _report(self, switch: Switch) -> None:
        if not switch.id:
            return
        status = switch.status()
        self._statuses[switch.id] = status
        while len(self._statuses) > REMEMBERED_SWITCHES:
            self._statuses.popitem(last=False)
        self._emit(status)
