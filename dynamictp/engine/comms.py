"""Communicators: slots of the exchange memory, ids, and the parked ones; and the control words."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Literal, Protocol

from dynamictp.messages import CommHandle

Key = tuple[tuple[int, int], ...]
"""Ordered (device, worker incarnation): rank i of the communicator is entry i."""

FREE: Literal[0] = 0
LIVE: Literal[1] = 1
ABORTED: Literal[2] = 2


class ControlWords(Protocol):
    """Words in shared memory: those that tell workers, at dequeue and in every wait, whether an epoch lives,
    and those in which workers publish their progress."""

    def set(self, slot: int, epoch: int, state: Literal[0, 1, 2]) -> None: ...

    def progress(self, device: int) -> tuple[int, int, int, float]:
        """(messages begun, layer, state: 0 idle, 1 computing, 2 waiting, seconds since the last change)."""
        ...


class NullControlWords:
    """No shared memory: enough where every domain has one rank, which never waits for a peer."""

    def set(self, slot: int, epoch: int, state: Literal[0, 1, 2]) -> None:
        """Nothing to tell."""

    def progress(self, device: int) -> tuple[int, int, int, float]:
        """Nothing is known: as if the worker had executed all it was sent."""
        return sys.maxsize, 0, 0, 0.0


class CommunicatorPool:
    """Owner of communicator ids and slots. Ids are never reused.

    A communicator is in use, parked (its members keep it, quiesced, for the same members in the same order)
    or gone. Parked ones give way, least recently parked first.
    """

    def __init__(self, slots: int, first_id: int = 1) -> None:
        self.slots = slots
        self._free = list(reversed(range(slots)))
        self._next_id = first_id
        self._used: dict[int, tuple[Key, CommHandle]] = {}
        self._parked: OrderedDict[Key, CommHandle] = OrderedDict()

    @property
    def room(self) -> int:
        """How many more communicators can be had now."""
        return len(self._free) + len(self._parked)

    def get(self, key: Key) -> CommHandle | None:
        """The parked one of these members, or a new one; None when every slot is in use."""
        handle = self._parked.pop(key, None)
        if handle is None:
            if not self.room:
                return None
            slot = self._free.pop() if self._free else self._parked.popitem(last=False)[1].slot
            handle = CommHandle(self._next_id, slot)
            self._next_id += 1
        self._used[handle.id] = (key, handle)
        return handle

    def park(self, handle: CommHandle) -> None:
        """Keep a quiesced communicator: every member closed its domain and is past its last collective."""
        key, _ = self._used.pop(handle.id)
        if key in self._parked:
            self._free.append(handle.slot)
        else:
            self._parked[key] = handle

    def discard(self, handle: CommHandle) -> None:
        """Give up a communicator that broke or lost a member; no member uses its slot any more."""
        del self._used[handle.id]
        self._free.append(handle.slot)

    def forget(self, device: int) -> None:
        """The worker on `device` is gone: parked communicators with it are useless."""
        for key in [k for k in self._parked if any(member == device for member, _ in k)]:
            self._free.append(self._parked.pop(key).slot)

    def check_integrity(self, used: set[int]) -> None:
        """Raise RuntimeError unless exactly the slots `used` are in use and no slot is lost."""
        in_use = [handle.slot for _, handle in self._used.values()]
        parked = [handle.slot for handle in self._parked.values()]
        if set(in_use) != used or sorted(in_use + parked + self._free) != list(range(self.slots)):
            raise RuntimeError(f"slots in use {in_use} (expected {used}), parked {parked}, free {self._free}")
