"""Drives the observed layout to the target: one switch at a time, level-triggered.

Level-triggered means that every `step` looks at what is and what should be, and at nothing that happened in
between: a lost command, an engine that restarted or a switch by hand need no case of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from dynamictp.clock import Clock
from dynamictp.control.config import ControlConfig
from dynamictp.control.values import Bar, Decision, Reason
from dynamictp.layout import Layout, parse_layout
from dynamictp.messages import CancelSwitch, RampSettings, SetLayout, SwitchStatus

AGAIN_S = 2.0
"""A command without an answer is sent again, under its id, after so long."""
BACKOFF_S = 1.0
BACKOFF_MAX_S = 60.0
MOST_DOUBLINGS = 10
PROBE_ONLY = RampSettings(shares=(1.0,), observe_s=0.0, settle_s=0.0)
"""All new requests to the new side as soon as the shadow probe has passed."""
FORGIVEN = 4.0
"""A bar counts as the first one again when the one before has been over for so many times its length."""


class Transport(Protocol):
    """The way to whoever carries switches out."""

    def send(self, command: SetLayout | CancelSwitch) -> bool:
        """False when it can't be reached now."""
        ...


@dataclass(frozen=True)
class Target:
    """What the layout should be. `forced`: the SLO needs it now, only the shadow probe stands before it."""

    layout: str
    reason: str
    forced: bool = False
    ramp: bool = True
    settings: RampSettings | None = None
    drain_deadline_s: float = 0.0


@dataclass(frozen=True)
class Observed:
    """What is. `in_flight`: id and target of the switch that has not committed yet, whoever asked for it."""

    layout: str
    available: int
    """Devices that a layout may have."""
    in_flight: tuple[str, str] | None = None


@dataclass
class _Failures:
    """Of one target."""

    count: int = 0
    until_s: float = 0.0
    length_s: float = 0.0


@dataclass
class _Order:
    """A switch that this reconciler wants."""

    command: SetLayout
    sent_s: float | None = None
    heard: bool = False
    cancelled_s: float | None = None


@dataclass
class Reconciler:
    """Owner of the target, of the switch that leads to it, and of the bars.

    A target that was rolled back is barred for `bar_s`, twice as long each time; one whose switch failed
    waits for a shorter back-off. `bar_s` may be replaced while it runs.
    """

    clock: Clock
    transport: Transport
    new_id: Callable[[], str]
    bar_s: float = 60.0
    target: Target | None = None
    _order: _Order | None = None
    _bars: dict[str, _Failures] = field(default_factory=dict)
    _backoffs: dict[str, _Failures] = field(default_factory=dict)

    @property
    def in_flight(self) -> str:
        """Id of its own switch that is under way, empty for none."""
        return self._order.command.switch_id if self._order is not None else ""

    def bars(self) -> tuple[Bar, ...]:
        """Targets that are not to be tried now."""
        now = self.clock.now()
        return tuple(Bar(layout, bar.until_s) for layout, bar in self._bars.items() if now < bar.until_s)

    def want(self, target: Target | None) -> None:
        """From now on lead there; None: stay, and leave a switch that is under way alone."""
        self.target = target

    def follow(self, decision: Decision, config: ControlConfig) -> None:
        """Take a decision of the planner up: another target, or haste on the way to the present one."""
        if decision.target is not None:
            self.want(target_of(decision, config))
        elif decision.forced and self.target is not None:
            self.target = replace(self.target, forced=True)

    # ------------------------------------------------------------ events

    def on_status(self, status: SwitchStatus) -> None:
        """Progress of any switch. Those of others bar and unbar targets too."""
        mine = self._order is not None and status.switch_id == self._order.command.switch_id
        if mine and self._order is not None:
            self._order.heard = True
        if not status.outcome or "rollback" in status.phases_ms:
            return
        spec = spec_of(status.to_layout)
        match status.outcome:
            case "rolled_back":
                self._bar(spec)
            case "failed" if mine:
                self._back_off(spec)
            case "committed" | "closed" | "noop":
                self._backoffs.pop(spec, None)
        if mine:
            self._order = None

    def engine_lost(self) -> None:
        """Nobody carries a switch out any more: begin anew from what is observed."""
        self._order = None

    # ------------------------------------------------------------ a step

    def step(self, observed: Observed) -> None:
        """Do the next thing, if there is one to do now."""
        target, order = self.target, self._order
        if order is not None and self._is_gone(order, observed):
            order = self._order = None
        if target is None:
            return
        wanted = spec_of(target.layout)
        if order is not None:
            self._follow(order, wanted, forced=target.forced)
            return
        if observed.in_flight is not None or reached(target.layout, observed.layout):
            return
        must = target.reason == Reason.DEVICES_LOST.value
        if not self._may_try(wanted, though_barred=must) or parse_devices(wanted) > observed.available:
            return
        command = SetLayout(
            self.new_id(), target.layout, ramp=target.ramp, drain_deadline_s=target.drain_deadline_s,
            reason=target.reason, forced=target.forced, settings=target.settings,
        )  # fmt: skip
        self._order = _Order(command)
        self._send(self._order)

    def cancel(self) -> None:
        """Take its switch back, now and until there is an outcome."""
        order = self._order
        now = self.clock.now()
        if order is None:
            return
        if order.sent_s is None:
            self._order = None
        elif order.cancelled_s is None or now - order.cancelled_s >= AGAIN_S:
            order.cancelled_s = now
            self.transport.send(CancelSwitch(order.command.switch_id))

    # ------------------------------------------------------------ within

    def _is_gone(self, order: _Order, observed: Observed) -> bool:
        """Its outcome was missed, or it was taken back before anyone heard of it."""
        if observed.in_flight is not None and observed.in_flight[0] == order.command.switch_id:
            return False
        silent = order.cancelled_s is not None and self.clock.now() - order.cancelled_s >= AGAIN_S
        return order.heard or silent

    def _follow(self, order: _Order, wanted: str, *, forced: bool) -> None:
        """A switch of its own is under way. One that has become urgent is commanded again, under its id."""
        if spec_of(order.command.layout) != wanted or order.cancelled_s is not None:
            self.cancel()
            return
        if forced and not order.command.forced:
            order.command = msgspec.structs.replace(order.command, forced=True)
            order.sent_s, order.heard = None, False
        if order.heard:
            return
        if order.sent_s is None or self.clock.now() - order.sent_s >= AGAIN_S:
            self._send(order)

    def _send(self, order: _Order) -> None:
        if self.transport.send(order.command):
            order.sent_s = self.clock.now()

    def _may_try(self, layout: str, *, though_barred: bool) -> bool:
        """`though_barred`: devices are to be left, and no other layout does."""
        now = self.clock.now()
        tables = (self._backoffs,) if though_barred else (self._bars, self._backoffs)
        return all(now >= table[layout].until_s for table in tables if layout in table)

    def _bar(self, layout: str) -> None:
        now = self.clock.now()
        bar = self._bars.setdefault(layout, _Failures())
        if bar.count and now > bar.until_s + FORGIVEN * bar.length_s:
            bar.count = 0
        bar.length_s = self.bar_s * 2.0 ** min(bar.count, MOST_DOUBLINGS)
        bar.until_s = now + bar.length_s
        bar.count += 1

    def _back_off(self, layout: str) -> None:
        failures = self._backoffs.setdefault(layout, _Failures())
        pause_s = BACKOFF_S * 2.0 ** min(failures.count, MOST_DOUBLINGS)
        failures.until_s = self.clock.now() + min(BACKOFF_MAX_S, pause_s)
        failures.count += 1


def spec_of(layout: str) -> str:
    """The shapes of a layout in their one spelling, without its devices."""
    parsed = parse_layout(layout)
    return str(parsed.spec if isinstance(parsed, Layout) else parsed)


def parse_devices(spec: str) -> int:
    """Devices that a layout takes."""
    parsed = parse_layout(spec)
    return len(parsed.devices) if isinstance(parsed, Layout) else parsed.devices


def reached(target: str, observed: str) -> bool:
    """`observed` is what `target` asks for. One that names devices is compared by them, when both do."""
    if "@" in target and "@" in observed:
        return parse_layout(target) == parse_layout(observed)
    return spec_of(target) == spec_of(observed)


def target_of(decision: Decision, config: ControlConfig) -> Target:
    """Where a decision leads, and how.

    A shrink comes when traffic is low: a ramp would end before its latency gate has samples, and hold the
    devices meanwhile. New domains of one are tried by the shadow probe alone.
    """
    assert decision.target is not None
    shrinks = decision.reason is Reason.SHRINK
    return Target(
        decision.target,
        decision.reason.value,
        forced=decision.forced,
        ramp=not decision.forced,
        settings=PROBE_ONLY if shrinks else ramp_settings(config),
        drain_deadline_s=config.drain_deadline_s,
    )


def ramp_settings(config: ControlConfig) -> RampSettings:
    """The ramp's parameters, as the engine wants them."""
    return RampSettings(
        shares=config.ramp_steps,
        observe_s=config.ramp_observe_s,
        settle_s=config.ramp_settle_s,
        min_finished=config.ramp_gate_samples,
        worse=config.ramp_gate_ratio,
    )
