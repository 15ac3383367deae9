"""Which model of the server may use which device: `control/sharing`, joined to engines, planners and leases.

A server of one model has one share, which has every device that is not leased.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from dynamictp.clock import Clock
from dynamictp.control.arbitration import Demand
from dynamictp.control.pool import ResourcePool
from dynamictp.control.sharing import divide, reach
from dynamictp.errors import ConfigError
from dynamictp.layout import Layout, LayoutSpec
from dynamictp.messages import Body, SetDevices, Snapshot
from dynamictp.server.changes import Changes
from dynamictp.server.leases import LeaseDesk

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Need:
    """Devices that a model's layout takes, or will. `at`: which, where a layout under way names them;
    `flexible`: a planner decides, which can do with less and may want more."""

    devices: int
    at: frozenset[int] = frozenset()
    flexible: bool = False


class Holder(Protocol):
    """The model behind a share."""

    def need(self) -> Need: ...

    @property
    def changing(self) -> bool:
        """A switch has no outcome yet."""

    def send(self, body: Body) -> bool:
        """Hand a message to the engine; one that is away learns at its start what it may use."""

    def gained(self) -> None:
        """There are more devices to decide on."""


class Share:
    """One model's part of the devices. Made by `DeviceShares.join`, which owns what is in it."""

    def __init__(self, shares: DeviceShares, name: str, holder: Holder, *, priority: int, most: int) -> None:
        self.name = name
        self.priority = priority
        self.most = most
        """Devices that it may have at most."""
        self.holder = holder
        self.held: frozenset[int] = frozenset()
        """The devices that its engine may use."""
        self.used: frozenset[int] = frozenset()
        """Those in its layout or a domain, as the last snapshot said."""
        self.unsettled = True
        """What the last snapshot said may not be so any more."""
        self.wanted = 0
        """Devices that its planner would have ready."""
        self._shares = shares

    @property
    def excluded(self) -> tuple[int, ...]:
        """Devices that its engine must not use: other models' and leased ones."""
        return tuple(sorted(frozenset(self._shares.pool.devices) - self.held))

    @property
    def available(self) -> int:
        """Devices that a layout may have now."""
        return len(self.held)

    @property
    def reach(self) -> int:
        """Devices that its planner may decide on: held, or to be had at once; less than the layout takes when
        others come first."""
        return self._shares.reach(self)

    @property
    def busy(self) -> frozenset[int]:
        """Devices that it can't leave now."""
        return self.held if self.unsettled or self.holder.changing else self.used & self.held

    def has(self, layout: Layout | LayoutSpec) -> bool:
        """The layout can be opened on what it holds."""
        if isinstance(layout, Layout):
            return layout.devices <= self.held
        return layout.devices <= len(self.held)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """What is in use now."""
        self.used = frozenset(device for domain in snapshot.domains for device in domain.devices)
        if snapshot.placed:
            self.used |= Layout.parse(snapshot.placed).devices
        self.unsettled = False
        self._shares.observed()

    def unsettle(self) -> None:
        """A switch got on, or the engine is lost."""
        self.unsettled = True

    def reserve(self, devices: int, hold_s: float, reason: str) -> None:
        """The planner would have so many devices ready, those in use included, for `hold_s`; `reason` is told
        to whose devices are called back."""
        self.wanted = devices
        self._shares.reserve(hold_s, f"{self.name}: {reason}" if len(self._shares.all) > 1 else reason)

    def leave(self) -> None:
        """The model has failed for good: its devices are free."""
        self._shares.leave(self)


class DeviceShares:
    """Owner of the division of the pool's devices between models. Lives in the event loop."""

    def __init__(self, devices: int, clock: Clock, *, revocable: bool) -> None:
        """`revocable`: leases may be called back."""
        incarnation, numbers = secrets.token_hex(3), count(1)
        self.pool = ResourcePool(
            range(devices), clock, lambda: f"l{next(numbers)}-{incarnation}", revocable=revocable
        )
        self.desk = LeaseDesk(self.pool, clock, self)
        self._shares: dict[str, Share] = {}
        self._changes = Changes()

    # ------------------------------------------------------------ members

    def join(self, name: str, holder: Holder, *, priority: int = 0, most: int = 0) -> Share:
        """A model's share; it has devices from `begin` on."""
        share = Share(self, name, holder, priority=priority, most=most or len(self.pool.devices))
        self._shares[name] = share
        return share

    def begin(self) -> None:
        """Give each model the devices of its first layout. Raises `ConfigError` when there are too few."""
        needs = {share.name: share.holder.need() for share in self._shares.values()}
        if len(self._shares) == 1:
            self.settle()
        else:
            self._give(divide(self._demands(), self.pool.devices, {}, {}))
        for share in self._shares.values():
            need = needs[share.name]
            if len(share.held) < need.devices or not need.at <= share.held:
                listed = ", ".join(f"{name} {need.devices}" for name, need in needs.items())
                raise ConfigError(
                    f"the models' layouts take {listed} devices; the pool has {len(self.pool.devices)}, and "
                    "each may be in one layout only"
                )

    def leave(self, share: Share) -> None:
        """The model is gone, with all its processes."""
        self._shares.pop(share.name, None)
        share.held = share.used = frozenset()
        self.observed()

    def share(self, name: str) -> Share:
        return self._shares[name]

    @property
    def all(self) -> tuple[Share, ...]:
        return tuple(self._shares.values())

    def holder_of(self, device: int) -> Share | None:
        """The model that may use a device."""
        return next((share for share in self._shares.values() if device in share.held), None)

    # ------------------------------------------------------------ what the lease desk asks

    @property
    def changing(self) -> bool:
        """A layout is changing."""
        return any(share.holder.changing for share in self._shares.values())

    @property
    def unsettled(self) -> bool:
        """Nobody knows just now which devices are free."""
        return any(share.unsettled for share in self._shares.values())

    def devices_changed(self) -> None:
        """Devices were lent or returned."""
        self.settle()

    # ------------------------------------------------------------ dividing

    def observed(self) -> None:
        """What the layouts use has changed, or may have."""
        self.pool.observe(frozenset[int]().union(*(share.used for share in self._shares.values())))
        self.settle()
        self.desk.notify()

    def settle(self) -> None:
        """Divide the devices anew, and tell whom it concerns."""
        devices = frozenset(self.pool.devices) - self.pool.leased
        if len(self._shares) == 1:
            self._give(dict.fromkeys(self._shares, devices))
            return
        busy = {share.name: share.busy for share in self._shares.values()}
        self._give(divide(self._demands(), devices, self._held(), busy))

    def reserve(self, hold_s: float, reason: str) -> None:
        """A planner has said what it wants: divide, and have leases called back for what is missing."""
        self.settle()
        total = sum(share.wanted for share in self._shares.values())
        if len(self._shares) > 1:
            total = min(sum(demand.wanted for demand in self._demands()), len(self.pool.devices))
        self.desk.reserve(total, hold_s, reason)

    def reach(self, share: Share) -> int:
        """As `Share.reach`."""
        devices = frozenset(self.pool.devices) - self.pool.leased
        if len(self._shares) == 1:
            return len(devices)
        held, demands = self._held(), self._demands()
        free = devices.difference(*held.values())
        greedy = replace(_demand(share), wanted=share.most)
        return reach(greedy, demands, len(devices), held, len(free))

    async def wait(self, timeout_s: float) -> bool:
        """Returns at the next change of the division; False when the time is up first."""
        return await self._changes.wait(timeout_s)

    # ------------------------------------------------------------ within

    def _held(self) -> dict[str, frozenset[int]]:
        return {share.name: share.held for share in self._shares.values()}

    def _demands(self) -> list[Demand]:
        """Whoever has more comes first among equals: devices don't move without need."""
        ordered = sorted(self._shares.values(), key=lambda share: -len(share.held))
        return [_demand(share) for share in ordered]

    def _give(self, divided: Mapping[str, frozenset[int]]) -> None:
        """Those that give devices up are told first."""
        changes = [
            (share, divided[share.name])
            for share in self._shares.values()
            if divided[share.name] != share.held
        ]
        for share, devices in sorted(changes, key=lambda change: len(change[1]) - len(change[0].held)):
            more = devices - share.held
            share.held = devices
            if len(self._shares) > 1:
                log.info("model %s: devices %s", share.name, sorted(devices))
            share.holder.send(SetDevices(share.excluded))
            if more:
                share.holder.gained()
        if changes:
            self._changes.notify()


def _demand(share: Share) -> Demand:
    need = share.holder.need()
    if not need.flexible:
        return Demand(share.name, need.devices, share.priority, need.devices, need.at)
    return Demand(share.name, min(share.wanted or need.devices, share.most), share.priority)
