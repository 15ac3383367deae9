"""The models of one server, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamictp.clock import Clock
from dynamictp.errors import BadRequest, CapacityError, NotFound
from dynamictp.observe.machine import MachineMetrics
from dynamictp.server.bodies import Bodies
from dynamictp.server.engine_client import CLOSED_RETRY_S
from dynamictp.server.service import Service
from dynamictp.server.shares import DeviceShares


class Roster:
    """Holds the services; each owns its model. They share the devices, and the memory of request bodies."""

    def __init__(self, services: Iterable[Service]) -> None:
        """At least one; several have joined the same `DeviceShares`."""
        self._services = {service.model: service for service in services}
        self.first = next(iter(self._services.values()))
        """Whom to ask for what all have in common."""
        self.machine = MachineMetrics()
        """Of the server's process and the node, where several models have figures of their own."""

    @classmethod
    def of(cls, served: Service | Roster) -> Roster:
        """A service alone is a roster of one."""
        return served if isinstance(served, Roster) else cls([served])

    @property
    def services(self) -> Sequence[Service]:
        """In the order of the configuration."""
        return tuple(self._services.values())

    @property
    def living(self) -> Sequence[Service]:
        """Those that have not failed for good."""
        members = {share.name for share in self.shares.all}
        return tuple(service for service in self.services if service.model in members)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._services)

    @property
    def several(self) -> bool:
        return len(self._services) > 1

    @property
    def clock(self) -> Clock:
        return self.first.clock

    @property
    def shares(self) -> DeviceShares:
        return self.first.shares

    @property
    def bodies(self) -> Bodies:
        return self.first.bodies

    # ------------------------------------------------------------ which model

    def pick(self, name: str | None) -> Service:
        """The service of that name; None is the only one. Raises `NotFound`, `BadRequest`."""
        if not self.several:
            self.first.check_model(name)
            return self.first
        if name is None:
            raise BadRequest(
                f"'model' is needed: this server has {_listed(self.names)}",
                param="model",
                code="model_required",
            )
        try:
            return self._services[name]
        except KeyError:
            raise NotFound(
                f"the model '{name[:128]}' does not exist here; this server has {_listed(self.names)}",
                param="model",
                code="model_not_found",
            ) from None

    def of_body(self, body: Mapping[str, Any]) -> Service:
        """The service that a request's body names. With one model the name is checked where it is parsed."""
        if not self.several:
            return self.first
        name = body.get("model")
        if name is not None and not isinstance(name, str):
            raise BadRequest("model must be a text", param="model")
        return self.pick(name)

    # ------------------------------------------------------------ state of all

    def check_open(self) -> None:
        """Raises `CapacityError` when no model takes requests at all."""
        refusals: list[CapacityError] = []
        for service in self.services:
            try:
                service.client.check_open()
            except CapacityError as error:
                refusals.append(error)
        if len(refusals) == len(self._services):
            raise refusals[0]

    def check_ready(self) -> None:
        """Raises `CapacityError` unless every model serves."""
        for service in self.services:
            client, who = service.client, f"{service.model}: " if self.several else ""
            if client.failure is not None:
                raise CapacityError(f"{who}the engine has failed: {client.failure}", retry_after_s=10)
            if client.closed is not None:
                raise CapacityError(client.closed, retry_after_s=CLOSED_RETRY_S)
            if not client.is_ready:
                raise CapacityError(f"{who}the engine is not ready yet")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
