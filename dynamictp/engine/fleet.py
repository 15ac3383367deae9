"""Workers and domains: opening, proving, closing, and taking a failed domain apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from dynamictp.clock import Clock
from dynamictp.engine.comms import ABORTED, FREE, LIVE, CommunicatorPool, ControlWords, Key
from dynamictp.engine.domain import Domain
from dynamictp.engine.pages import Block
from dynamictp.engine.requests import RequestBook
from dynamictp.kv import quota_blocks
from dynamictp.layout import PlacedShape
from dynamictp.messages import (
    Body,
    CloseDomain,
    CommHandle,
    DomainClosed,
    EngineStart,
    OpenDomain,
    ProveDomain,
    WorkerHello,
    WorkerLost,
)

EPOCHS_PER_INCARNATION = 1 << 20
"""Epochs and communicator ids of an engine's life do not meet those of the next one."""
_NO_COMM = CommHandle(-1, -1)


class Fleet:
    """Owner of the workers' incarnations, the domains, their communicators and control words.

    `domains` holds a domain from its making until every member has left it. `send(device, body)` queues a
    message; `lost` reports a worker that the supervisor must replace.
    """

    def __init__(
        self,
        start: EngineStart,
        *,
        quota: Callable[[int], int],
        comms: CommunicatorPool,
        control: ControlWords,
        book: RequestBook,
        clock: Clock,
        send: Callable[[int, Body], None],
        lost: Callable[[WorkerLost], None],
    ) -> None:
        self.devices = start.devices
        self.domains: dict[int, Domain] = {}
        self.incarnations: dict[int, int] = {}
        self.busy_s = [0.0] * start.devices
        """Seconds that each device spent in completed steps."""
        self._quota = quota
        self._max_rows = min(start.max_num_seqs, start.max_batched_tokens)
        self._model = start.model
        self._comms = comms
        self._control = control
        self._book = book
        self._clock = clock
        self._send = send
        self._lost = lost
        self._next_epoch = 1 + (start.incarnation - 1) * EPOCHS_PER_INCARNATION
        self._reported: set[tuple[int, int]] = set()
        # A worker of an earlier engine's domains may still write pages until it says hello or is reaped.
        there = start.workers or (1,) * start.devices
        self._unheard = {device for device, incarnation in enumerate(there) if incarnation}

    def complete(self, without: Collection[int] = ()) -> bool:
        """Every device has a worker, or is one of `without`."""
        return all(device in self.incarnations or device in without for device in range(self.devices))

    def has_workers(self, devices: Iterable[int]) -> bool:
        """Each of the devices has a worker."""
        return all(device in self.incarnations for device in devices)

    def live(self) -> Iterator[Domain]:
        """Domains that serve or drain."""
        return (d for d in tuple(self.domains.values()) if d.state in {"serving", "draining"})

    # ------------------------------------------------------------ opening

    def make(self, placed: PlacedShape) -> Domain:
        """A new domain that no one knows of yet."""
        quota = self._quota(len(placed.devices))
        domain = Domain(self._next_epoch, placed, _NO_COMM, (), self._max_rows, quota)
        self._next_epoch += 1
        return domain

    def can_open(self, domains: list[Domain]) -> bool:
        """Their workers are there and so is a communicator for each; no worker is left from before."""
        there = all(self.has_workers(domain.devices) for domain in domains)
        return there and not self._unheard and len(domains) <= self._comms.room

    def open(self, domain: Domain) -> None:
        """Have the members build views, then join the communicator. Needs `can_open`."""
        comm = self._comms.get(self._key(domain))
        if comm is None:
            raise RuntimeError(f"no communicator slot is free for {domain.placed}")
        domain.comm = comm
        domain.incarnations = tuple(self.incarnations[device] for device in domain.devices)
        self.domains[domain.epoch] = domain
        self._control.set(comm.slot, domain.epoch, LIVE)
        for rank, device in enumerate(domain.devices):
            self._send(
                device,
                OpenDomain(
                    domain.epoch, self._model, domain.tp, rank, domain.devices, comm, comm.slot,
                    domain.placed.shape.pp,
                ),
            )  # fmt: skip

    def prove(self, domain: Domain) -> None:
        """Queue the first collective; at the same place of every member's queue."""
        for device in domain.devices:
            self._send(device, ProveDomain(domain.epoch, domain.next_step))
        domain.next_step += 1

    # ------------------------------------------------------------ closing

    def close(self, domain: Domain) -> None:
        """End the epoch of a domain without requests; `on_closed` collects the members' answers."""
        domain.become("closed")
        for device in domain.devices:
            self._send(device, CloseDomain(domain.epoch))

    def on_closed(self, message: DomainClosed) -> None:
        domain = self.domains.get(message.epoch)
        if domain is not None and domain.state in {"closed", "failed"}:
            domain.closed_by.add(message.rank)
            self._forget_if_left(domain)

    def _forget_if_left(self, domain: Domain) -> None:
        """Once every member has left (or is dead), its communicator and quarantined pages are free."""
        if len(domain.closed_by) < len(domain.devices):
            return
        del self.domains[domain.epoch]
        self._control.set(domain.comm.slot, domain.epoch, FREE)
        current = tuple(self.incarnations.get(device) for device in domain.devices)
        if domain.state == "closed" and current == domain.incarnations:
            self._comms.park(domain.comm)
        else:
            self._comms.discard(domain.comm)
        for blocks in domain.quarantine:
            self._book.free(blocks)
        domain.quarantine.clear()

    # ------------------------------------------------------------ failing

    def fail(self, domain: Domain) -> None:
        """Take a broken domain apart: wake its members out of every wait, queue its requests again.

        Pages that its steps in flight may still touch wait in quarantine until each member has left.
        """
        told = domain.state == "closed"
        domain.become("failed")
        domain.retired_s = self._clock.now()
        self._control.set(domain.comm.slot, domain.epoch, ABORTED)
        for request in (*domain.running, *domain.leaving):
            domain.quarantine.append(request.blocks)
            self._book.lost(request, crashed=request.in_flight > 0)
        domain.in_flight.clear()
        if not told:
            for rank, device in enumerate(domain.devices):
                if rank not in domain.closed_by and device in self.incarnations:
                    self._send(device, CloseDomain(domain.epoch))
        self._forget_if_left(domain)

    def on_hello(self, message: WorkerHello) -> list[Domain]:
        """A worker is there. If it replaces another, that one is dead: its domains, to be failed."""
        known = self.incarnations.get(message.device)
        if known is not None and message.incarnation <= known:
            return []
        self._unheard.discard(message.device)
        self.incarnations[message.device] = message.incarnation
        self._comms.forget(message.device)
        return self._left_by(message.device, message.incarnation)

    def lose(self, device: int, reason: str) -> list[Domain]:
        """The worker can't be used any more: report it lost. Its domains, to be failed.

        It may still touch memory, so what it held stays in quarantine until it is reaped.
        """
        incarnation = self.incarnations.pop(device, None)
        if incarnation is None:
            return []
        self._report_lost(device, incarnation, reason)
        self._comms.forget(device)
        return [d for d in tuple(self.domains.values()) if device in d.devices and d.state != "failed"]

    def lose_unheard(self, device: int, incarnation: int, reason: str) -> None:
        """A worker that never said hello is of no use either."""
        self._report_lost(device, incarnation, reason)

    def reaped(self, device: int, incarnation: int) -> list[Domain]:
        """The supervisor has reaped that life of the device's worker. Its domains, to be failed."""
        if self.incarnations.get(device, 0) > incarnation:
            return []
        self._unheard.discard(device)
        self.incarnations.pop(device, None)
        self._comms.forget(device)
        return self._left_by(device, incarnation + 1)

    def worked(self, domain: Domain, seconds: float) -> None:
        for device in domain.devices:
            self.busy_s[device] += seconds

    def held_blocks(self) -> Iterator[list[Block]]:
        """Blocks of every request that has some, and those in quarantine."""
        for domain in self.domains.values():
            for request in (*domain.running, *domain.leaving):
                yield request.blocks
            yield from domain.quarantine

    def check_integrity(self) -> None:
        for domain in self.domains.values():
            domain.check_integrity()
        self._comms.check_integrity({domain.comm.slot for domain in self.domains.values()})

    def _left_by(self, device: int, incarnation: int) -> list[Domain]:
        """Domains that the device's earlier worker was in. It is dead, so it has left them all."""
        dead: list[Domain] = []
        for domain in tuple(self.domains.values()):
            if device not in domain.devices:
                continue
            rank = domain.devices.index(device)
            if domain.incarnations[rank] >= incarnation:
                continue
            domain.closed_by.add(rank)
            if domain.state == "failed":
                self._forget_if_left(domain)
            else:
                # A closed one too: its other members may wait for the dead one in a queued proof.
                dead.append(domain)
        return dead

    def _report_lost(self, device: int, incarnation: int, reason: str) -> None:
        if (device, incarnation) not in self._reported:
            self._reported.add((device, incarnation))
            self._lost(WorkerLost(device, incarnation, reason))

    def _key(self, domain: Domain) -> Key:
        return tuple((device, self.incarnations[device]) for device in domain.devices)


def quota_rule(arena_blocks: int, devices: int, cap: float) -> Callable[[int], int]:
    """Blocks that a domain of so many devices may name; at least one."""
    return lambda domain_devices: max(1, quota_blocks(arena_blocks, devices, domain_devices, cap))
