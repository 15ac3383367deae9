"""Who has which device: models that serve, jobs of others on leases, reservations ahead of a growth.

Pure but for its clock. It is told what serves (`observe`) and what the planner needs (`reserve`); whoever
owns the engine takes `leased` to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from dynamictp.clock import Clock
from dynamictp.errors import LeaseConflict, NotFound

Level = Literal["standby", "released"]

EXPIRE_S = 15.0
"""A lease that is not renewed for so long is lost."""
KEPT_S = 3.0
"""A device that was called back is kept for whoever called for so long."""


class DeviceState(StrEnum):
    """What a device does. `standby` and `released` are free: it is back in ms, or after its wake time."""

    SERVING = "serving"
    STANDBY = "standby"
    RELEASED = "released"
    RESERVED = "reserved"
    LEASED = "leased"


@dataclass(frozen=True)
class Lease:
    """Devices lent to a job. Times in seconds of the pool's clock."""

    id: str
    devices: tuple[int, ...]
    level: Level
    notice_s: float
    """How long its devices may stay away once they are called back; not less than `grace_s`."""
    grace_s: float
    """How long its job may take to end once it is told to."""
    expires_s: float
    called_back_s: float | None = None
    reason: str = ""
    """Why it was called back, for the job's owner; empty before."""

    @property
    def state(self) -> Literal["active", "revoking"]:
        return "active" if self.called_back_s is None else "revoking"

    @property
    def deadline_s(self) -> float | None:
        """When its devices must be back, while it is being revoked."""
        return None if self.called_back_s is None else self.called_back_s + max(self.notice_s, self.grace_s)


class ResourcePool:
    """Owner of leases and reservations over `devices` (numbered by the node).

    ```
    free ─lease─▶ leased ─call back─▶ leased (revoking) ─returned, lost or overdue─▶ free
    free ─reserve─▶ reserved ─a domain is put on it─▶ serving ─▶ free
    ```
    A leased device is in no layout and counts as missing until it is returned.
    """

    def __init__(
        self, devices: Iterable[int], clock: Clock, new_id: Callable[[], str], *, revocable: bool
    ) -> None:
        """`revocable`: leases may be called back; a static pool never does."""
        self._devices = set(devices)
        self._clock = clock
        self._new_id = new_id
        self.revocable = revocable
        self._used: frozenset[int] = frozenset()
        self._leases: dict[str, Lease] = {}
        self._reserved: dict[int, float] = {}
        """Device → until when it is kept."""

    # ------------------------------------------------------------ state

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self._devices))

    @property
    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    @property
    def leased(self) -> frozenset[int]:
        """Devices that no domain may be put on."""
        return frozenset(device for lease in self._leases.values() for device in lease.devices)

    @property
    def available(self) -> int:
        """Devices that layouts may have: all but the leased ones."""
        return len(self._devices - self.leased)

    @property
    def reserved(self) -> frozenset[int]:
        """Devices that are kept for a growth, or for whoever called them back."""
        now = self._clock.now()
        return frozenset(device for device, until in self._reserved.items() if now < until)

    @property
    def free(self) -> tuple[int, ...]:
        """Devices that may be leased now."""
        return tuple(sorted(self._devices - self._used - self.leased - self.reserved))

    def states(self, asleep: Collection[int] = ()) -> dict[int, DeviceState]:
        """By device. `asleep`: devices without a worker, because they were released."""
        leased, reserved = self.leased, self.reserved
        states = {}
        for device in self.devices:
            if device in leased:
                states[device] = DeviceState.LEASED
            elif device in self._used:
                states[device] = DeviceState.SERVING
            elif device in reserved:
                states[device] = DeviceState.RESERVED
            else:
                states[device] = DeviceState.RELEASED if device in asleep else DeviceState.STANDBY
        return states

    def lease_of(self, device: int) -> Lease | None:
        return next((lease for lease in self._leases.values() if device in lease.devices), None)

    def get(self, lease_id: str) -> Lease:
        """Raises `NotFound`."""
        try:
            return self._leases[lease_id]
        except KeyError:
            raise NotFound(
                f"there is no lease '{lease_id}': it was returned, or lost for want of renewal",
                code="lease_not_found",
            ) from None

    # ------------------------------------------------------------ what happens

    def observe(self, used: Iterable[int]) -> None:
        """Devices that are in some layout or domain now, or will be when the switch in flight ends."""
        self._used = frozenset(used)

    def grow(self, devices: Iterable[int]) -> None:
        """More devices belong to the pool."""
        self._devices |= set(devices)

    def shrink(self, devices: Iterable[int]) -> None:
        """Devices leave the pool. Raises `LeaseConflict` for one that is in use or leased."""
        leaving = set(devices)
        taken = leaving & (self._used | self.leased)
        if taken:
            raise LeaseConflict(f"device {min(taken)} is in use and can't leave the pool", free=self.free)
        self._devices -= leaving
        for device in leaving:
            self._reserved.pop(device, None)

    def tick(self) -> list[Lease]:
        """End leases that were not renewed, or not returned in time."""
        now = self._clock.now()
        ended = [
            lease
            for lease in self._leases.values()
            if now >= lease.expires_s or (lease.deadline_s is not None and now >= lease.deadline_s)
        ]
        for lease in ended:
            self._end(lease)
        return ended

    # ------------------------------------------------------------ leases

    def lease(self, count: int, level: Level, *, notice_s: float, grace_s: float) -> Lease:
        """Lend free devices, those with the highest numbers: layouts take the lowest. Raises
        `LeaseConflict`."""
        free = self.free
        if count > len(free):
            asked = "1 device is" if count == 1 else f"{count} devices are"
            left = f"free: {', '.join(map(str, free))}" if free else "none is free"
            kept = ", ".join(map(str, sorted(self.reserved)))
            kept = f"; reserved for some seconds for a growth of the layout: device {kept}" if kept else ""
            raise LeaseConflict(f"{asked} asked for, {left}{kept}", free=free)
        lease = Lease(
            self._new_id(), free[len(free) - count :], level, notice_s, grace_s, self._clock.now() + EXPIRE_S
        )
        self._leases[lease.id] = lease
        return lease

    def renew(self, lease_id: str) -> Lease:
        """Keep it for another `EXPIRE_S`. Raises `NotFound`."""
        lease = replace(self.get(lease_id), expires_s=self._clock.now() + EXPIRE_S)
        self._leases[lease_id] = lease
        return lease

    def give_back(self, lease_id: str) -> Lease:
        """The job is over. Raises `NotFound`."""
        lease = self.get(lease_id)
        self._end(lease)
        return lease

    def call_back(self, count: int, reason: str = "") -> list[Lease]:
        """Revoke leases of `count` devices in all, those under revocation included; the latest ones first.
        What was revoked just now. Nothing in a pool that is not revocable."""
        if not self.revocable:
            return []
        coming = sum(len(lease.devices) for lease in self._leases.values() if lease.called_back_s is not None)
        called: list[Lease] = []
        for lease in reversed(self.leases):
            if coming >= count:
                break
            if lease.called_back_s is None:
                called.append(self._revoke(lease, reason))
                coming += len(lease.devices)
        return called

    def recall(self, devices: Collection[int], reason: str = "") -> list[Lease]:
        """Revoke the leases of these devices. What was revoked just now."""
        wanted = set(devices)
        return [
            self._revoke(lease, reason)
            for lease in self.leases
            if self.revocable and lease.called_back_s is None and wanted.intersection(lease.devices)
        ]

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.id]
        if lease.called_back_s is not None:
            until = self._clock.now() + KEPT_S
            self._reserved |= dict.fromkeys(lease.devices, until)

    def _revoke(self, lease: Lease, reason: str) -> Lease:
        revoked = replace(lease, called_back_s=self._clock.now(), reason=reason)
        self._leases[lease.id] = revoked
        return revoked

    # ------------------------------------------------------------ reservations

    def reserve(self, count: int, hold_s: float, reason: str = "") -> list[Lease]:
        """Have `count` devices ready for layouts, those in use included: keep free ones from being leased for
        `hold_s`, and call leases back for what is missing. The leases that were called back just now."""
        missing = count - len(self._used)
        until = self._clock.now() + hold_s
        ready = sorted(self._devices - self._used - self.leased)[: max(0, missing)]
        for device in ready:
            self._reserved[device] = until
        return self.call_back(missing - len(ready), reason) if missing > len(ready) else []


class SubPool:
    """The devices that one model is bound to, as it sees them: numbered from 0.

    Sub-pools may nest and overlap, and grow and shrink while they live; the pool of the node keeps the states
    of all devices. Logical numbers stay as they are: the place of a device that left waits for another one.
    """

    def __init__(self, name: str, parent: ResourcePool | SubPool, physical: Iterable[int]) -> None:
        """Raises `ValueError` for a device that the parent does not have."""
        self.name = name
        self.parent = parent
        self._map: list[int | None] = []
        self.add(physical)

    @property
    def devices(self) -> tuple[int, ...]:
        """Physical devices, in logical order."""
        return tuple(device for device in self._map if device is not None)

    def physical(self, logical: int) -> int:
        """Raises `ValueError` for a number without a device."""
        device = self._map[logical] if 0 <= logical < len(self._map) else None
        if device is None:
            raise ValueError(f"pool {self.name} has no device {logical}")
        return device

    def logical(self, physical: int) -> int:
        """Raises `ValueError`."""
        return self._map.index(physical)

    def add(self, physical: Iterable[int]) -> None:
        """Devices join, in vacant places first."""
        for device in physical:
            if device not in self.parent.devices:
                raise ValueError(f"device {device} of pool {self.name} is not in the pool around it")
            if device in self._map:
                continue
            if None in self._map:
                self._map[self._map.index(None)] = device
            else:
                self._map.append(device)

    def remove(self, physical: Iterable[int]) -> None:
        """Devices leave; their numbers become vacant. Raises `ValueError` for one it does not have."""
        for device in physical:
            self._map[self.logical(device)] = None
