"""Leases of devices to jobs outside the server: the pool's rules, joined to engine and supervisor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

from dynamictp.clock import Clock
from dynamictp.control.pool import DeviceState, Lease, Level, ResourcePool
from dynamictp.errors import CapacityError, LeaseConflict
from dynamictp.layout import Layout, LayoutSpec
from dynamictp.server.changes import Changes

log = logging.getLogger(__name__)

CHECK_S = 0.25
"""Time between looks for leases that are lost, while there are any."""
SNAPSHOT_S = 1.0
"""Longest time that the engine lets pass without a snapshot."""


class Power(Protocol):
    """Who can do without a device's worker, and have it back."""

    def sleep(self, device: int) -> None:
        """End its worker: memory and all."""
        ...

    def wake(self, device: int) -> None:
        """Start it again."""
        ...

    @property
    def asleep(self) -> Collection[int]: ...


class AlwaysAwake:
    """Devices whose workers can't be ended; `released` is then no more than `standby`."""

    def sleep(self, device: int) -> None: ...

    def wake(self, device: int) -> None: ...

    @property
    def asleep(self) -> Collection[int]:
        return ()


class Layouts(Protocol):
    """Whoever knows what the layouts on the pool do."""

    @property
    def changing(self) -> bool:
        """A switch has no outcome yet."""

    @property
    def unsettled(self) -> bool:
        """What the pool observed last may not be so any more."""

    def devices_changed(self) -> None:
        """Devices were lent or returned: tell the engines."""


class LeaseDesk:
    """Owner of the way between the pool and the layouts. Lives in the event loop.

    A device may be lent only while the layout is at rest: between a switch's outcome and the next snapshot,
    nobody here knows which devices are free.
    """

    def __init__(self, pool: ResourcePool, clock: Clock, layouts: Layouts) -> None:
        self.pool = pool
        self.power: Power = AlwaysAwake()
        self._clock = clock
        self._layouts = layouts
        self._changes = Changes()
        self._watch: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ leases

    async def lease(
        self, count: int, level: Level, *, notice_s: float, grace_s: float, wait_s: float
    ) -> Lease:
        """Lend devices as soon as there are enough, at most `wait_s` from now. Raises `LeaseConflict`."""
        began = self._clock.now()
        while True:
            try:
                lease = self._lease(count, level, notice_s, grace_s)
            except LeaseConflict:
                # After a switch the next snapshot is due in a moment, which no one needs to wait for himself.
                patience_s = max(wait_s, SNAPSHOT_S) if self._layouts.unsettled else wait_s
                left = began + patience_s - self._clock.now()
                if left <= 0 or not await self._changes.wait(left):
                    raise
            else:
                self._lent(lease)
                return lease

    def renew(self, lease_id: str) -> Lease:
        return self.pool.renew(lease_id)

    def give_back(self, lease_id: str) -> Lease:
        lease = self.pool.give_back(lease_id)
        self._returned((lease,), "returned")
        return lease

    def reserve(self, count: int, hold_s: float, reason: str) -> None:
        """As `ResourcePool.reserve`, with word to the log. `reason` is told to whose devices are called
        back."""
        self._called(self.pool.reserve(count, hold_s, reason))

    # ------------------------------------------------------------ layouts

    def in_the_way(self, layout: Layout | LayoutSpec) -> frozenset[int]:
        """Leased devices that stand against the layout; for shapes without devices all of them, if there are
        too few others."""
        if isinstance(layout, Layout):
            return layout.devices & self.pool.leased
        return self.pool.leased if layout.devices > self.pool.available else frozenset()

    async def recall(self, layout: Layout | LayoutSpec, timeout_s: float) -> None:
        """Call leases back that are in the way of a layout, and return when they are out of it. Raises
        `LeaseConflict` where leases can't be revoked, `CapacityError` when the time is up first."""
        end = self._clock.now() + timeout_s
        reason = f"layout {layout} was asked for by hand"
        while blocking := self.in_the_way(layout):
            if not self.pool.revocable:
                names = ", ".join(map(str, sorted(blocking)))
                raise LeaseConflict(
                    f"{layout} needs devices that are leased ({names}), and static mode does not revoke "
                    "leases: wait, or end the jobs",
                    free=self.pool.free,
                )
            if isinstance(layout, Layout):
                self._called(self.pool.recall(blocking, reason))
            else:
                self._called(self.pool.call_back(layout.devices - self.pool.available, reason))
            left = end - self._clock.now()
            if left <= 0 or not await self._changes.wait(left):
                raise CapacityError(f"{layout}: its devices are called back from leases", retry_after_s=10)

    # ------------------------------------------------------------ within

    def _lease(self, count: int, level: Level, notice_s: float, grace_s: float) -> Lease:
        if self._layouts.changing or self._layouts.unsettled:
            raise LeaseConflict("the layout is changing; try again, or with wait_s", free=())
        return self.pool.lease(count, level, notice_s=notice_s, grace_s=grace_s)

    def _lent(self, lease: Lease) -> None:
        log.info("lease %s: devices %s, %s", lease.id, lease.devices, lease.level)
        self._layouts.devices_changed()
        if lease.level == "released":
            for device in lease.devices:
                self.power.sleep(device)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        self.notify()

    def _returned(self, leases: Collection[Lease], how: str) -> None:
        if not leases:
            return
        for lease in leases:
            log.info("lease %s: devices %s are %s", lease.id, lease.devices, how)
            for device in lease.devices:
                if device in self.power.asleep:
                    self.power.wake(device)
        self._layouts.devices_changed()
        self.notify()

    def _called(self, leases: Collection[Lease]) -> None:
        for lease in leases:
            log.info("lease %s is called back: devices %s, %s", lease.id, lease.devices, lease.reason)

    async def _look(self) -> None:
        """While there are leases: end those that are lost. A look that fails is logged, and the next one is
        made all the same."""
        while self.pool.leases:
            await asyncio.sleep(CHECK_S)
            try:
                self._returned(self.pool.tick(), "lost: not renewed, or not returned in time")
            except Exception:
                log.exception("a look for lost leases failed")

    def notify(self) -> None:
        """What may be leased, or is in the way, has changed: those who wait look again."""
        self._changes.notify()

    def states(self) -> dict[int, DeviceState]:
        return self.pool.states(self.power.asleep)

    async def close(self) -> None:
        """Stop looking."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
