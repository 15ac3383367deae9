"""Switches on virtual time: prepare, ramp with gates, commit, settle, drain, handover; rollback and bars.

A model of the engine's switch state machine (design 9) with the same commands, placement and routing; the
times of its phases are given. Who commands it is the production reconciler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec

from dynamictp.control.config import ControlConfig
from dynamictp.control.reconciler import ramp_settings
from dynamictp.control.route import RampSides
from dynamictp.control.values import SwitchView
from dynamictp.control.windows import quantile
from dynamictp.layout import Layout, LayoutSpec, place
from dynamictp.messages import CancelSwitch, RampSettings, SetLayout, SwitchStatus
from dynamictp.sim.domain import SimDomain
from dynamictp.sim.loop import Event
from dynamictp.sim.node import Node
from dynamictp.sim.requests import SimRequest
from dynamictp.sim.values import SwitchTimes

_PROBE_LIMIT = 2.0
"""A shadow probe may take so many times its prediction."""


@dataclass(slots=True)
class SwitchRecord:
    """What became of a switch."""

    id: str
    from_layout: str
    to_layout: str
    began_s: float
    reason: str
    forced: bool
    committed_s: float | None = None
    outcome: str = ""
    revived: int = 0


@dataclass(slots=True)
class _Switch:
    record: SwitchRecord
    target: Layout
    opening: list[SimDomain]
    reviving: list[SimDomain]
    closing: list[SimDomain]
    command: SetLayout
    phase: str = "prepare"
    timer: Event | None = None
    ratios: dict[str, list[float]] = field(default_factory=lambda: {"old": [], "new": []})
    """Measured ÷ predicted time of requests that finished on each side of the ramp."""


class Switcher:
    """Owner of the observed layout, of the switch in flight and of drains. `on_status` hears how switches
    end. The reconciler's transport."""

    def __init__(self, node: Node, layout: str, times: SwitchTimes, config: ControlConfig) -> None:
        self.node, self.config = node, config
        self.records: list[SwitchRecord] = []
        self.last_commit_s: float | None = None
        self._times = times
        self.on_status: Callable[[SwitchStatus], None] = lambda status: None
        self._current: _Switch | None = None
        node.on_broken = self._on_broken
        node.on_idle = self._on_idle
        for placed in place(LayoutSpec.parse(layout), node.devices, ()).domains:
            node.serve(node.open(placed))
        self.observed = LayoutSpec.parse(layout)

    # ------------------------------------------------------------ asked from outside

    @property
    def view(self) -> SwitchView | None:
        switch = self._current
        if switch is None:
            return None
        record = switch.record
        return SwitchView(record.id, record.to_layout, switch.phase, record.began_s)

    @property
    def draining(self) -> tuple[str, ...]:
        return tuple(str(d.placed.shape) for d in self.node.domains.values() if d.state == "draining")

    def send(self, command: SetLayout | CancelSwitch) -> bool:
        """A command arrives; it is always heard. One that is known makes its switch forced, if it says so."""
        current = self._current
        if isinstance(command, CancelSwitch):
            if current is not None and current.record.id == command.switch_id:
                self._take_back(current, "cancelled", recompute=False)
        elif current is None:
            self._begin(command)
        elif current.record.id == command.switch_id and command.forced:
            self._hurry(current)
        return True

    def finished(self, domain: SimDomain, request: SimRequest) -> None:
        """A request ended: a sample for the latency gate."""
        switch = self._current
        if switch is None or switch.phase != "ramp" or request.finished_s is None:
            return
        if request.arrival_s < switch.record.began_s:
            return
        model = self.node.surroundings(domain).times.model
        predicted = model.decode(domain.running + 1, request.length).total_s * request.output
        predicted += model.prompt(request.prompt, self.node.facts.limits.max_batched_tokens).total_s
        side = "new" if domain in switch.opening else "old"
        switch.ratios[side].append((request.finished_s - request.arrival_s) / predicted)

    # ------------------------------------------------------------ a switch

    def _begin(self, command: SetLayout) -> None:
        node, layout = self.node, command.layout
        live = [d for d in node.domains.values() if d.state in {"serving", "draining"}]
        live.sort(key=lambda d: d.state != "serving")
        target = place(LayoutSpec.parse(layout), node.devices, [d.placed for d in live])
        wanted = set(target.domains)
        kept = {d.placed: d for d in live if d.placed in wanted}
        record = SwitchRecord(
            command.switch_id, str(self.observed), layout, node.loop.now(), command.reason, command.forced
        )
        self.records.append(record)
        switch = _Switch(
            record,
            target,
            opening=[node.open(placed) for placed in target.domains if placed not in kept],
            reviving=[d for d in kept.values() if d.state == "draining"],
            closing=[d for d in live if d.state == "serving" and d.placed not in wanted],
            command=command,
        )
        self._current = switch
        delay = self._times.prepare_s if switch.opening else 0.0
        switch.timer = node.loop.after(delay + self._times.commit_s, lambda: self._ready(switch))

    def _hurry(self, switch: _Switch) -> None:
        """What is left of its ramp is left out. A switch that is not ready yet will have none."""
        switch.command = msgspec.structs.replace(switch.command, forced=True)
        if switch.phase == "ramp" and switch.timer is not None:
            switch.timer.cancel()
            self._ramp(switch, len(self._settings(switch).shares) + 1)

    def _settings(self, switch: _Switch) -> RampSettings:
        return switch.command.settings or ramp_settings(self.config)

    def _ready(self, switch: _Switch) -> None:
        for domain in switch.reviving:
            self.node.serve(domain)
        switch.record.revived = len(switch.reviving)
        command = switch.command
        if not switch.opening or not (command.ramp or command.forced):
            self._serve_new(switch)
            self._commit(switch)
            return
        if not self._probe(switch):
            return
        if command.forced:
            self._serve_new(switch)
            self._commit(switch)
            return
        switch.phase = "ramp"
        for domain in switch.opening:
            self.node.serve(domain)
        self._ramp(switch, 0)

    def _serve_new(self, switch: _Switch) -> None:
        for domain in switch.opening:
            self.node.serve(domain)

    def _probe(self, switch: _Switch) -> bool:
        """A real request to each new domain before it takes all of the traffic."""
        if self.node.faults.hidden:
            return True
        for domain in switch.opening:
            shape = str(domain.placed.shape)
            if shape in self.node.faults.failing:
                self._take_back(switch, "rolled_back", recompute=True)
                return False
            if self.node.faults.slow.get(shape, 1.0) > _PROBE_LIMIT:
                self._take_back(switch, "rolled_back", recompute=False)
                return False
        return True

    def _ramp(self, switch: _Switch, step: int) -> None:
        """Step `len(shares)` is the settling; the one after it, the end."""
        if switch is not self._current:
            return
        if self._regressed(switch):
            self._take_back(switch, "rolled_back", recompute=False)
            return
        settings = self._settings(switch)
        shares = settings.shares
        if step > len(shares):
            self._commit(switch)
            return
        before = self.node.ramp
        self.node.ramp = RampSides(
            shares[min(step, len(shares) - 1)],
            frozenset(switch.opening),
            frozenset(switch.closing),
            first_due=before is None or before.first_due,
        )
        wait = settings.observe_s if step < len(shares) else settings.settle_s
        switch.timer = self.node.loop.after(wait, lambda: self._ramp(switch, step + 1))
        self.node.pump()

    def _regressed(self, switch: _Switch) -> bool:
        old, new = sorted(switch.ratios["old"]), sorted(switch.ratios["new"])
        if min(len(old), len(new)) < self.config.ramp_gate_samples:
            return False
        return quantile(new, 0.95) > self.config.ramp_gate_ratio * quantile(old, 0.95)

    def _commit(self, switch: _Switch) -> None:
        now = self.node.loop.now()
        self._current = None
        self.node.ramp = None
        switch.record.committed_s, switch.record.outcome = now, "committed"
        self.last_commit_s, self.observed = now, switch.target.spec
        for domain in switch.closing:
            self.node.drain(domain)
            self.node.loop.after(self.config.drain_deadline_s, partial(self._deadline, domain))
        self.node.pump()
        self._tell(switch, "committed")

    def _deadline(self, domain: SimDomain) -> None:
        """What still runs is handed over, between two steps."""
        if domain.state == "draining":
            domain.cut(ahead=0)
            if domain.run is None:
                self._on_idle(domain)

    def _on_idle(self, domain: SimDomain) -> None:
        if domain.state != "draining":
            return
        committed = self.last_commit_s or 0.0
        if self.node.loop.now() >= committed + self.config.drain_deadline_s - 1e-9:
            self.node.hand_over(domain)
        if not domain.running:
            self.node.close(domain)

    # ------------------------------------------------------------ taking back

    def _take_back(
        self, switch: _Switch, outcome: Literal["cancelled", "rolled_back"], *, recompute: bool
    ) -> None:
        """Serve with the old domains again."""
        if switch.timer is not None:
            switch.timer.cancel()
        self._current = None
        self.node.ramp = None
        switch.record.outcome = outcome
        for domain in switch.opening:
            domain.abort()
            for request in tuple(domain.requests()):
                domain.take(request)
                self.node.requeue(request, recompute=recompute or not self._shares_memory)
            self.node.close(domain)
        for domain in switch.reviving:
            self.node.drain(domain)
        self.node.pump()
        self._tell(switch, outcome)

    def _tell(self, switch: _Switch, outcome: Literal["committed", "cancelled", "rolled_back"]) -> None:
        record = switch.record
        phase = "commit" if outcome == "committed" else "rollback"
        self.on_status(SwitchStatus(record.id, record.from_layout, record.to_layout, phase, outcome))

    def _on_broken(self, domain: SimDomain) -> None:
        switch = self._current
        if switch is not None and domain in switch.opening:
            self._take_back(switch, "rolled_back", recompute=True)
            return
        # A serving domain that breaks is opened again; its requests are recomputed.
        placed = domain.placed
        domain.abort()
        for request in tuple(domain.requests()):
            domain.take(request)
            self.node.requeue(request, recompute=True)
        self.node.close(domain)
        self.node.serve(self.node.open(placed))

    @property
    def _shares_memory(self) -> bool:
        return self.node.facts.device.shared_memory
