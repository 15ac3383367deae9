"""Layouts set by hand where several models share the devices: a switch for each model that is named.

A model whose new layout needs devices that another one has waits, in phase `devices`, until that one has left
them. Models that are not named stay as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from dynamictp.control.sharing import deadlocked
from dynamictp.errors import LayoutRefused, SwitchConflict
from dynamictp.layout import Layout, LayoutSpec, Shape, legal_specs
from dynamictp.messages import SetLayout
from dynamictp.server.model_layouts import Parts, of_model, split
from dynamictp.server.roster import Roster
from dynamictp.server.service import Service
from dynamictp.server.switches import Wanted, check_layout

LOOK_S = 0.25
"""Between looks at the other switches of an order: their failing frees no device, and so tells nobody."""
_LOST = ("failed", "cancelled", "rolled_back")


@dataclass(frozen=True)
class Order:
    """One model's switch."""

    service: Service
    layout: Layout | LayoutSpec
    command: SetLayout

    @property
    def switch_id(self) -> str:
        return self.command.switch_id


class LayoutOrders:
    """Owner of the switches that wait for devices. Lives in the event loop."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self, text: str) -> Parts:
        """The layout of each named model. Raises `LayoutRefused`, which lists the legal ones."""
        with self._listing_legal():
            parts = split(text, self._roster.names)
            for model, layout in parts.items():
                _check_part(self._roster.pick(model), layout)
            self._check_fit(parts)
        return parts

    def combined(self, parts: Parts) -> Layout | LayoutSpec:
        """All that has to fit the pool: the parts, and what the other models can't do without."""
        placed = [part for part in parts.values() if isinstance(part, Layout)]
        if placed:
            return Layout(tuple(domain for part in placed for domain in part.domains))
        shapes = [shape for part in parts.values() if isinstance(part, LayoutSpec) for shape in part.shapes]
        others = sum(self._least(service) for service in self._others(parts))
        return LayoutSpec((*shapes, *([Shape(1)] * others)))

    def start(self, parts: Parts, *, ramp: bool, drain_deadline_s: float) -> tuple[Order, ...]:
        """Begin a switch of each model, those that have their devices at once. Raises `SwitchConflict` while
        one of them has a switch in flight, `CapacityError` when one has no engine to command, `LayoutRefused`
        when another order has taken the devices since `check`."""
        services = {model: self._roster.pick(model) for model in parts}
        for service in services.values():
            service.client.check_open()
            running = service.switches.in_flight
            if running is not None:
                raise SwitchConflict(
                    f"switch {running.switch_id} to {of_model(running.to_layout, service.model)} has not "
                    "committed yet",
                    switch_id=running.switch_id,
                )
        # Leases may have been waited for since the check. From here to the announcements nothing is.
        with self._listing_legal():
            self._check_fit(parts)
        orders = []
        for model, layout in parts.items():
            board = services[model].switches
            wanted = Wanted(str(layout), ramp, drain_deadline_s)
            status = board.announce(wanted, services[model].observed)
            command = wanted.command(status.switch_id, services[model].ramp)
            orders.append(Order(services[model], layout, command))
        self._roster.shares.settle()
        for order in orders:
            if not _begin(order):
                task = asyncio.create_task(self._wait_for_devices(order, orders))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return tuple(orders)

    # ------------------------------------------------------------ within

    async def _wait_for_devices(self, order: Order, orders: Sequence[Order]) -> None:
        board = order.service.switches
        while not board.get(order.switch_id).outcome:
            lost = next((other for other in orders if _outcome(other) in _LOST), None)
            if lost is not None:
                why = f"{lost.service.model} did not leave its devices: switch {lost.switch_id}"
                status = board.get(order.switch_id)
                board.on_status(msgspec.structs.replace(status, outcome="failed", error=why))
            elif _begin(order):
                return
            else:
                await self._roster.shares.wait(LOOK_S)

    @contextmanager
    def _listing_legal(self) -> Iterator[None]:
        """A refusal within lists the legal layouts of all models."""
        try:
            yield
        except LayoutRefused as error:
            legal = tuple(
                of_model(str(spec), service.model)
                for service in self._roster.services
                for spec in legal_specs(degrees_of(service), service.share.most)
            )
            raise LayoutRefused(error.message, legal=legal) from error

    def _check_fit(self, parts: Parts) -> None:
        self._check_room(parts)
        self._check_places(parts)

    def _others(self, parts: Parts) -> list[Service]:
        return [service for service in self._roster.services if service.model not in parts]

    @staticmethod
    def _least(service: Service) -> int:
        """Devices that a model which is not named keeps."""
        need = service.need()
        return 1 if need.flexible else need.devices

    def _check_room(self, parts: Parts) -> None:
        shares = self._roster.shares
        taken = {model: _devices(part) for model, part in parts.items()}
        living = {share.name for share in shares.all}
        taken |= {other.model: self._least(other) for other in self._others(parts) if other.model in living}
        if sum(taken.values()) > len(shares.pool.devices):
            listed = ", ".join(f"{model} {count}" for model, count in taken.items())
            raise LayoutRefused(f"the layouts take {listed} devices; the pool has {len(shares.pool.devices)}")

    def _check_places(self, parts: Parts) -> None:
        """Placed layouts must not need what models that are not named use or are to get, nor each other's for
        ever."""
        shares = self._roster.shares
        wanted = {model: part.devices for model, part in parts.items() if isinstance(part, Layout)}
        used = {share.name: share.used for share in shares.all}
        for other in self._others(parts):
            if other.model not in used:
                continue
            for model, devices in wanted.items():
                theirs = devices & (used[other.model] | other.need().at)
                if theirs:
                    raise LayoutRefused(
                        f"device {min(theirs)} is in use by {other.model}, whose layout must then be given "
                        f"beside that of {model}"
                    )
        free = frozenset(shares.pool.devices).difference(*used.values())
        held = {model: used.get(model, frozenset()) for model in wanted}
        stuck = deadlocked(wanted, held, free)
        if stuck:
            raise LayoutRefused(
                f"{', '.join(stuck)} would wait for each other's devices: move one of them to free devices, "
                "or make one smaller, first"
            )


def degrees_of(service: Service) -> tuple[int, ...]:
    """Legal degrees, as the engine says once it is there."""
    engine = service.client.engine
    return (engine.legal_degrees if engine else ()) or service.legal_degrees


def _check_part(service: Service, layout: Layout | LayoutSpec) -> None:
    most, pool = service.share.most, service.devices
    try:
        check_layout(str(layout), degrees_of(service), most, service.model, pool=pool)
    except LayoutRefused as error:
        raise LayoutRefused(f"{service.model}: {error.message}") from error


def _begin(order: Order) -> bool:
    """Send the command if the model has the devices; False when it must wait."""
    service = order.service
    if not service.share.has(order.layout):
        return False
    if not service.switches.command(order.command, service.observed, service.client.send):
        status = service.switches.get(order.switch_id)
        service.switches.on_status(
            msgspec.structs.replace(status, outcome="failed", error="the engine is restarting")
        )
    return True


def _outcome(order: Order) -> str:
    return order.service.switches.get(order.switch_id).outcome


def _devices(layout: Layout | LayoutSpec) -> int:
    return len(layout.devices) if isinstance(layout, Layout) else layout.devices
