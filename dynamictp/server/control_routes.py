"""The operator's endpoints of the control plane: leases, decisions, parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamictp.control.config import build_control
from dynamictp.control.pool import Lease, Level
from dynamictp.errors import BadRequest, ConfigError
from dynamictp.server.answers import json_response
from dynamictp.server.control_plane import ControlPlane
from dynamictp.server.fields import Fields, parse_object
from dynamictp.server.service import Service

MAX_WAIT_S = 600.0
MAX_NOTICE_S = 3600.0
MOST_DECISIONS = 10_000


@dataclass(frozen=True)
class LeaseRequest:
    """`POST /admin/leases`."""

    devices: int
    level: Level
    notice_s: float
    grace_s: float
    wait_s: float


def parse_lend(fields: Fields, devices: int) -> LeaseRequest:
    """Raises `BadRequest`. `devices` are those of the pool."""
    fields.require("devices", "a number of devices")
    count = fields.integer("devices", 1, devices) or 1
    level = cast(Level, fields.choice("level", ("standby", "released"), "standby"))
    notice_s = fields.number("notice_s", 0, MAX_NOTICE_S)
    grace_s = fields.number("grace_s", 0, MAX_NOTICE_S)
    wait_s = fields.number("wait_s", 0, MAX_WAIT_S) or 0.0
    fields.finish()
    return LeaseRequest(
        devices=count,
        level=level,
        notice_s=10.0 if notice_s is None else notice_s,
        grace_s=10.0 if grace_s is None else grace_s,
        wait_s=wait_s,
    )


class ControlRoutes:
    """Endpoints over one `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("/admin/leases", self.leases, methods=["GET"]),
            Route("/admin/leases", self.lend, methods=["POST"]),
            Route("/admin/leases/{id}", self.lease, methods=["GET"]),
            Route("/admin/leases/{id}", self.renew, methods=["PUT"]),
            Route("/admin/leases/{id}", self.give_back, methods=["DELETE"]),
            Route("/admin/decisions", self.decisions, methods=["GET"]),
            Route("/admin/journal", self.journal, methods=["GET"]),
            Route("/admin/config", self.config, methods=["GET"]),
            Route("/admin/config", self.reload, methods=["PUT"]),
        ]

    # ------------------------------------------------------------ leases

    async def leases(self, request: Request) -> Response:
        desk = self._service.desk
        return json_response(
            {"leases": [self._shown(lease) for lease in desk.pool.leases], "free": desk.pool.free}
        )

    async def lend(self, request: Request) -> Response:
        service = self._service
        async with service.bodies.reading(request) as body:
            wanted = parse_lend(Fields(parse_object(body)), service.devices)
        service.client.check_open()
        lease = await service.desk.lease(
            wanted.devices,
            wanted.level,
            notice_s=wanted.notice_s,
            grace_s=wanted.grace_s,
            wait_s=wanted.wait_s,
        )
        return json_response(self._shown(lease), 201)

    async def lease(self, request: Request) -> Response:
        return json_response(self._shown(self._service.desk.pool.get(request.path_params["id"])))

    async def renew(self, request: Request) -> Response:
        return json_response(self._shown(self._service.desk.renew(request.path_params["id"])))

    async def give_back(self, request: Request) -> Response:
        return json_response(self._shown(self._service.desk.give_back(request.path_params["id"])))

    def _shown(self, lease: Lease) -> dict[str, Any]:
        """Times are seconds from now; there is a deadline while it is being revoked."""
        now = self._service.clock.now()
        info = self._service.device_info()
        shown: dict[str, Any] = {
            "id": lease.id,
            "devices": lease.devices,
            "cores": sorted({core for d in lease.devices if d in info for core in info[d].cores}),
            "level": lease.level,
            "state": lease.state,
            "notice_s": lease.notice_s,
            "grace_s": lease.grace_s,
            "expires_s": max(0.0, lease.expires_s - now),
        }
        if lease.deadline_s is not None:
            shown["deadline_s"] = max(0.0, lease.deadline_s - now)
        return shown

    # ------------------------------------------------------------ the planner

    async def decisions(self, request: Request) -> Response:
        """The last decisions, the latest first; with `snapshots=1` also what each was based on."""
        last = _number(request, "last", 20)
        with_snapshots = _number(request, "snapshots", 0)
        plane = self._plane()
        shown = []
        for entry in reversed(plane.journal.last(last)):
            decision = msgspec.to_builtins(entry.decision)
            if with_snapshots:
                decision["snapshot"] = msgspec.to_builtins(entry.snapshot)
            shown.append(decision)
        return json_response({"decisions": shown})

    async def journal(self, request: Request) -> Response:
        """All that is kept, as lines that can be replayed."""
        lines = b"\n".join(self._plane().journal.lines()) + b"\n"
        return Response(lines, media_type="application/jsonl")

    async def config(self, request: Request) -> Response:
        return json_response({"config": msgspec.to_builtins(self._plane().config)})

    async def reload(self, request: Request) -> Response:
        """Replace some parameters; the others stay."""
        plane = self._plane()
        async with self._service.bodies.reading(request) as body:
            given = parse_object(body)
        values = msgspec.to_builtins(plane.config)
        if isinstance(given.get("slo"), dict):
            given = {**given, "slo": {**values["slo"], **given["slo"]}}
        try:
            plane.reload(build_control({**values, **given}))
        except ConfigError as error:
            raise BadRequest(str(error), code="bad_config") from error
        return json_response({"config": msgspec.to_builtins(plane.config)})

    def _plane(self) -> ControlPlane:
        plane = self._service.plane
        if plane is None:
            raise BadRequest(
                f"mode {self._service.mode} has no planner; start the server with --mode dynamic or dry-run",
                code="no_planner",
            )
        return plane


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > MOST_DECISIONS:
        raise BadRequest(f"{name} must be a number from 0 to {MOST_DECISIONS}, not '{text[:40]}'", param=name)
    return int(text)
