"""Layout switches as the server sees them: validation, the one in flight, waiting for an outcome.

The engine owns the observed layout; this board keeps what it reported, and the layout that was asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import msgspec

from dynamictp.errors import CapacityError, LayoutRefused, NotFound, SwitchConflict
from dynamictp.layout import Layout, LayoutSpec, legal_specs, parse_layout, place
from dynamictp.messages import Body, CancelSwitch, FirstAdmission, RampSettings, SetLayout, SwitchStatus
from dynamictp.server.changes import Changes

log = logging.getLogger(__name__)

MAX_LAYOUT_CHARS = 1024
MAX_SWITCHES = 256
"""Switches remembered for `GET /admin/switches/{id}`."""

WAITING = "devices"
"""Phase of a switch that waits for devices which another model has."""

Wait = Literal["none", "commit", "closed"]
_ENDED = ("closed", "noop", "failed", "cancelled", "rolled_back")


@dataclass(frozen=True)
class Wanted:
    """A layout asked for by hand, and how to get there."""

    layout: str
    ramp: bool = False
    drain_deadline_s: float = 0.0

    def command(self, switch_id: str, ramp: RampSettings | None) -> SetLayout:
        """`ramp`: what a ramp goes by; None: what the engine was started with."""
        return SetLayout(
            switch_id,
            self.layout,
            ramp=self.ramp,
            drain_deadline_s=self.drain_deadline_s,
            settings=ramp if self.ramp else None,
        )


@dataclass
class Times:
    """When a switch got how far, None before. Unix times in seconds but for the last."""

    began: float
    committed: float | None = None
    ended: float | None = None
    first_admitted_ms: float | None = None
    """From the engine's receipt of the command to the first request that a new domain admitted."""


def check_layout(
    text: str, degrees: Sequence[int], devices: int, model: str, *, pool: int = 0
) -> LayoutSpec | Layout:
    """The layout that `text` asks for, placed if it names devices, without the model's name. It may take
    `devices` devices, of the `pool` that there are (0: there are no more).

    Raises `LayoutRefused`, which lists the legal ones.
    """
    pool = pool or devices
    legal = tuple(map(str, legal_specs(degrees, devices)))
    listing = f"; legal layouts: {', '.join(legal)}"
    if len(text) > MAX_LAYOUT_CHARS:
        raise LayoutRefused(f"a layout has at most {MAX_LAYOUT_CHARS} characters{listing}", legal=legal)
    try:
        layout = parse_layout(text)
        spec = layout.spec if isinstance(layout, Layout) else layout
        for shape in spec.shapes:
            if shape.pp > 1:
                raise LayoutRefused(f"{shape}: pipeline stages (pp > 1) are not supported yet")
            if shape.model not in ("", model):
                raise LayoutRefused(f"{shape}: the model here is '{model}'")
            if shape.tp not in degrees:
                known = ", ".join(map(str, degrees))
                bound = f", as it may take {devices} of the {pool} devices" if devices < pool else ""
                raise LayoutRefused(
                    f"{shape}: this model on this node can be served at degree {known}{bound}"
                )
        place(spec, devices, ())
        if isinstance(layout, Layout) and max(layout.devices) >= pool:
            raise LayoutRefused(f"{layout} names device {max(layout.devices)}; the pool has 0 to {pool - 1}")
    except LayoutRefused as error:
        raise LayoutRefused(error.message + listing, legal=legal) from error
    return layout.without_models()


def describe(status: SwitchStatus, times: Times | None = None) -> dict[str, object]:
    """A switch as the admin API shows it."""
    shown = asdict(times) if times is not None else {}
    first_admitted_ms = shown.pop("first_admitted_ms", None)
    return {
        "id": status.switch_id,
        "from": status.from_layout,
        "to": status.to_layout,
        "phase": status.phase,
        "outcome": status.outcome,
        "phases_ms": status.phases_ms,
        "first_admitted_ms": first_admitted_ms,
        "handovers": status.handovers,
        "recomputes": status.recomputes,
        "weight_bytes_copied": status.weight_bytes_copied,
        "reason": status.reason,
        "error": status.error,
        "ramp_share": status.ramp_share,
        **{f"{name}_at": value for name, value in shown.items()},
    }


def _log_end(status: SwitchStatus, label: str) -> None:
    log.info(
        "%sswitch_id=%s from=%s to=%s reason=%s outcome=%s handovers=%d recomputes=%d phases_ms=%s%s",
        label,
        status.switch_id,
        status.from_layout,
        status.to_layout,
        status.reason,
        status.outcome,
        status.handovers,
        status.recomputes,
        ",".join(f"{phase}:{ms:.1f}" for phase, ms in status.phases_ms.items()) or "-",
        f" error={status.error!r}" if status.error else "",
    )


class SwitchBoard:
    """Owner of the requested layout and of what is known about each switch."""

    def __init__(self, incarnation: str, model: str = "") -> None:
        """`incarnation` leads the switch ids, so that a restarted server never uses one again. `model` is
        named in the log, where there are several."""
        self.label = f"model={model} " if model else ""
        """Leads lines of the log."""
        self._incarnation = incarnation
        self._switches: dict[str, SwitchStatus] = {}
        self._times: dict[str, Times] = {}
        self._changes = Changes()
        self._numbers = 0
        self.wanted: Wanted | None = None
        """What was last asked for by hand, None before the first."""
        self.pinned = False
        self.listeners: list[Callable[[SwitchStatus], None]] = []
        """Told of every progress, also of what this board says itself."""

    @property
    def target(self) -> str | None:
        """The layout last asked for by hand, None before the first."""
        return self.wanted.layout if self.wanted is not None else None

    @property
    def in_flight(self) -> SwitchStatus | None:
        """The switch that has no outcome yet."""
        return next((s for s in reversed(self._switches.values()) if not s.outcome), None)

    @property
    def known(self) -> tuple[SwitchStatus, ...]:
        """The switches that are remembered, the latest first."""
        return tuple(reversed(self._switches.values()))

    def times(self, switch_id: str) -> Times | None:
        return self._times.get(switch_id)

    def new_id(self) -> str:
        self._numbers += 1
        return f"s{self._numbers}-{self._incarnation}"

    def get(self, switch_id: str) -> SwitchStatus:
        """Raises `NotFound`."""
        try:
            return self._switches[switch_id]
        except KeyError:
            raise NotFound(f"there is no switch '{switch_id}'", code="switch_not_found") from None

    def on_status(self, status: SwitchStatus) -> None:
        """The engine reported progress."""
        now = time.time()
        times = self._times.setdefault(status.switch_id, Times(now))
        if status.outcome in ("committed", "closed") and times.committed is None:
            times.committed = now
        if status.outcome in _ENDED:
            times.ended = now
            _log_end(status, self.label)
        self._switches[status.switch_id] = status
        while len(self._switches) > MAX_SWITCHES:
            oldest = next(iter(self._switches))
            del self._switches[oldest], self._times[oldest]
        self._changes.notify()
        for listener in self.listeners:
            listener(status)

    def on_first_admission(self, message: FirstAdmission) -> None:
        """The engine admitted a first request to a new domain of a switch."""
        times = self._times.get(message.switch_id)
        if times is not None:
            times.first_admitted_ms = message.milliseconds

    def engine_lost(self) -> None:
        """A crash in any phase ends in the last committed layout: what had not committed has failed, and the
        old domains of what had are gone."""
        for status in list(self._switches.values()):
            if status.outcome == "committed":
                self.on_status(msgspec.structs.replace(status, outcome="closed"))
            elif not status.outcome:
                self.on_status(
                    msgspec.structs.replace(status, outcome="failed", error="the engine restarted")
                )

    def start(
        self,
        wanted: Wanted,
        observed: str,
        send: Callable[[Body], bool],
        *,
        ramp: RampSettings | None = None,
    ) -> SwitchStatus:
        """Command a switch; `ramp` as in `Wanted.command`. Raises `SwitchConflict` while one is in flight,
        `CapacityError` when there is no engine to command.
        """
        running = self.in_flight
        if running is not None:
            raise SwitchConflict(
                f"switch {running.switch_id} to {running.to_layout} has not committed yet",
                switch_id=running.switch_id,
            )
        command = wanted.command(self.new_id(), ramp)
        if not self.command(command, observed, send):
            raise CapacityError("the engine is restarting; try again")
        self.wanted = wanted
        return self.get(command.switch_id)

    def announce(self, wanted: Wanted, observed: str) -> SwitchStatus:
        """A switch that waits for its devices: in flight, and not yet commanded."""
        status = SwitchStatus(self.new_id(), observed, wanted.layout, WAITING)
        self.on_status(status)
        self.wanted = wanted
        return status

    def command(self, command: SetLayout, observed: str, send: Callable[[Body], bool]) -> bool:
        """Send a command; one sent before only goes out again. False when there is no engine."""
        if not send(command):
            return False
        known = self._switches.get(command.switch_id)
        if known is None or known.phase == WAITING:
            self.on_status(
                SwitchStatus(command.switch_id, observed, command.layout, "decide", reason=command.reason)
            )
        return True

    def cancel(self, switch_id: str, send: Callable[[Body], bool]) -> None:
        """Ask for a switch to be taken back. Raises `NotFound`, or `SwitchConflict` once it has committed."""
        status = self.get(switch_id)
        if status.outcome:
            raise SwitchConflict(
                f"switch {switch_id} is past its commit: {status.outcome}", switch_id=switch_id
            )
        if status.phase == WAITING:
            self.on_status(msgspec.structs.replace(status, outcome="cancelled"))
        elif not send(CancelSwitch(switch_id)):
            raise CapacityError("the engine is restarting; try again")

    async def wait(self, switch_id: str, until: Wait, timeout_s: float) -> SwitchStatus | None:
        """The status once the switch got as far as `until` or ended before; None when the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    status = self.get(switch_id)
                    reached = status.outcome in _ENDED or (
                        until == "commit" and status.outcome == "committed"
                    )
                    if reached or until == "none":
                        return status
                    await self._changes.wait()
        except TimeoutError:
            return None
