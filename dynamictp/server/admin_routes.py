"""The operator's endpoints: layout, switches, metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamictp.errors import BadRequest
from dynamictp.layout import legal_specs
from dynamictp.messages import DeviceStatus, DomainStatus, SwitchStatus
from dynamictp.server.answers import envelope, json_response
from dynamictp.server.fields import Fields, parse_object
from dynamictp.server.metrics import CONTENT_TYPE
from dynamictp.server.service import DeviceInfo, Service
from dynamictp.server.switches import Wait, check_layout, describe

MAX_DRAIN_S = 86_400.0
MAX_LAYOUT_CHARS = 4096


@dataclass(frozen=True)
class LayoutChange:
    """`PUT /admin/layout`, its layout still as text."""

    layout: str
    until: Wait
    ramp: bool
    drain_deadline_s: float


def parse_set_layout(fields: Fields) -> LayoutChange:
    """Raises `BadRequest`."""
    fields.require("layout", "a layout such as tp2, or auto")
    change = LayoutChange(
        layout=fields.text("layout", MAX_LAYOUT_CHARS) or "",
        until=cast(Wait, fields.choice("wait", ("none", "commit", "closed"), "commit")),
        ramp=fields.flag("ramp"),
        drain_deadline_s=fields.number("drain_deadline_s", 0, MAX_DRAIN_S) or 0.0,
    )
    fields.finish()
    return change


class AdminRoutes:
    """Endpoints over one `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            *self.public(),
            Route("/admin/layout", self.layout, methods=["GET"]),
            Route("/admin/layout", self.set_layout, methods=["PUT"]),
            Route("/admin/switches", self.switches, methods=["GET"]),
            Route("/admin/switches/{id}", self.switch, methods=["GET"]),
            Route("/admin/switches/{id}", self.cancel_switch, methods=["DELETE"]),
        ]

    def public(self) -> list[Route]:
        """What `--public-metrics` shows on a port without the rest."""
        return [Route("/metrics", self.metrics, methods=["GET"])]

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def layout(self, request: Request) -> Response:
        service = self._service
        snapshot, board = service.client.snapshot, service.switches
        in_flight = board.in_flight
        devices, states, pool = service.device_info(), service.desk.states(), service.desk.pool
        leases = {device: lease.id for lease in pool.leases for device in lease.devices}
        plane = service.plane
        return json_response(
            {
                "mode": service.mode,
                "pinned": board.pinned,
                "target": board.target or service.observed,
                "observed": service.observed,
                "legal_layouts": [str(spec) for spec in legal_specs(self._degrees(), service.devices)],
                "waiting": snapshot.waiting if snapshot else 0,
                "switch": self._shown(in_flight.switch_id) if in_flight else None,
                "barred": [
                    {"layout": bar.layout, "for_s": bar.until_s - service.clock.now()}
                    for bar in (plane.reconciler.bars() if plane is not None else ())
                ],
                "domains": [_domain(d, service.model) for d in snapshot.domains] if snapshot else [],
                "devices": [
                    {
                        **_device(d, snapshot.domains, devices.get(d.id, DeviceInfo())),
                        "state": states[d.id],
                        "lease": leases.get(d.id),
                    }
                    for d in snapshot.devices
                ]
                if snapshot
                else [],
            }
        )

    async def set_layout(self, request: Request) -> Response:
        service, board = self._service, self._service.switches
        async with service.bodies.reading(request) as body:
            wanted = parse_set_layout(Fields(parse_object(body)))
        if wanted.layout.strip() == "auto":
            return self._unpin()
        layout = check_layout(wanted.layout, self._degrees(), service.devices, service.model)
        service.client.check_open()
        await service.desk.recall(layout, service.switch_wait_s)
        status = board.start(
            layout,
            service.observed,
            service.client.send,
            ramp=wanted.ramp,
            drain_deadline_s=wanted.drain_deadline_s,
        )
        board.pinned = service.mode != "static"
        if wanted.until == "none":
            return json_response({"switch": self._shown(status.switch_id)}, 202)
        ended = await board.wait(status.switch_id, wanted.until, service.switch_wait_s)
        return _answer(ended, status.switch_id, self._shown(status.switch_id))

    async def switches(self, request: Request) -> Response:
        board = self._service.switches
        return json_response(
            {"switches": [describe(status, board.times(status.switch_id)) for status in board.known]}
        )

    async def switch(self, request: Request) -> Response:
        return json_response({"switch": self._shown(request.path_params["id"])})

    async def cancel_switch(self, request: Request) -> Response:
        service, switch_id = self._service, request.path_params["id"]
        service.switches.cancel(switch_id, service.client.send)
        if service.switches.pinned:
            # What was asked for by hand is taken back by hand.
            service.switches.target = service.observed
        status = await service.switches.wait(switch_id, "commit", service.switch_wait_s)
        switch = self._shown(switch_id)
        if status is None:
            return _answer(None, switch_id, switch)
        if status.outcome not in ("cancelled", "failed", "rolled_back"):
            message = f"switch {switch_id} committed before it could be cancelled"
            body = envelope(message, "conflict_error", code="switch_conflict")
            return json_response({**body, "switch": switch}, 409)
        return json_response({"switch": switch})

    def _unpin(self) -> Response:
        """Hand the layout back to the planner."""
        service = self._service
        if service.mode != "dynamic":
            raise BadRequest(
                f"'auto' gives the layout to the planner, and mode {service.mode} has none that acts; "
                "name a layout, or start the server with --mode dynamic",
                param="layout",
            )
        service.switches.pinned = False
        service.switches.target = None
        if service.plane is not None:
            service.plane.unpin()
        observed = service.observed
        noop = SwitchStatus("", observed, observed, "", "noop")
        return json_response({"switch": describe(noop), "pinned": False})

    def _shown(self, switch_id: str) -> dict[str, object]:
        board = self._service.switches
        return describe(board.get(switch_id), board.times(switch_id))

    def _degrees(self) -> tuple[int, ...]:
        engine = self._service.client.engine
        return (engine.legal_degrees if engine else ()) or self._service.legal_degrees


def _answer(status: SwitchStatus | None, switch_id: str, switch: dict[str, object]) -> Response:
    """The answer to a wait, with the switch as it is shown; None when the time was up first."""
    if status is None:
        message = f"switch {switch_id} goes on; look at /admin/switches/{switch_id}"
        body = envelope(message, "timeout_error", code="switch_wait_timeout")
        return json_response({**body, "switch": {"id": switch_id}}, 504)
    if status.outcome == "failed":
        message = f"switch {switch_id} failed: {status.error or 'no reason given'}"
        return json_response(
            {**envelope(message, "server_error", code="switch_failed"), "switch": switch}, 500
        )
    if status.outcome == "rolled_back":
        message = f"switch {switch_id} was rolled back: {status.error}"
        return json_response(
            {**envelope(message, "conflict_error", code="switch_rolled_back"), "switch": switch}, 409
        )
    if status.outcome == "cancelled":
        message = f"switch {switch_id} was cancelled"
        return json_response(
            {**envelope(message, "conflict_error", code="switch_cancelled"), "switch": switch}, 409
        )
    return json_response({"switch": switch})


def _domain(domain: DomainStatus, model: str) -> dict[str, Any]:
    return {
        "id": domain.id,
        "epoch": domain.epoch,
        "model": domain.model or model,
        "tp": domain.tp,
        "pp": domain.pp,
        "devices": domain.devices,
        "state": domain.state,
        "running": domain.running,
        "kv_pages_used": domain.kv_pages_used,
        "kv_pages_cap": domain.kv_pages_cap,
    }


def _device(device: DeviceStatus, domains: tuple[DomainStatus, ...], info: DeviceInfo) -> dict[str, Any]:
    """`domain` is the one that takes new requests, when a draining one shares the device."""
    serving = {domain.id for domain in domains if domain.state == "serving"}
    chosen = next((d for d in device.domains if d in serving), device.domains[0] if device.domains else None)
    return {
        "id": device.id,
        "cores": info.cores,
        "pid": info.pid,
        "domain": chosen,
        "domains": device.domains,
    }
