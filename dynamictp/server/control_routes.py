"""The operator's endpoints of the control plane: leases, decisions, parameters."""

from __future__ import annotations

from collections.abc import Sequence
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
from dynamictp.server.roster import Roster
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
    """Endpoints over the models of one server."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._desk = roster.shares.desk

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
        desk = self._desk
        return json_response(
            {"leases": [self._shown(lease) for lease in desk.pool.leases], "free": desk.pool.free}
        )

    async def lend(self, request: Request) -> Response:
        async with self._roster.bodies.reading(request) as body:
            wanted = parse_lend(Fields(parse_object(body)), self._roster.first.devices)
        self._roster.check_open()
        lease = await self._desk.lease(
            wanted.devices,
            wanted.level,
            notice_s=wanted.notice_s,
            grace_s=wanted.grace_s,
            wait_s=wanted.wait_s,
        )
        return json_response(self._shown(lease), 201)

    async def lease(self, request: Request) -> Response:
        return json_response(self._shown(self._desk.pool.get(request.path_params["id"])))

    async def renew(self, request: Request) -> Response:
        return json_response(self._shown(self._desk.renew(request.path_params["id"])))

    async def give_back(self, request: Request) -> Response:
        return json_response(self._shown(self._desk.give_back(request.path_params["id"])))

    def _shown(self, lease: Lease) -> dict[str, Any]:
        """Times are seconds from now; there is a deadline while it is being revoked."""
        now = self._roster.clock.now()
        info = self._roster.first.device_info()
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
        """The last decisions, the latest first; with `snapshots=1` also what each was based on. With several
        models those of all, or of the one that `model` names."""
        last = _number(request, "last", 20)
        with_snapshots = _number(request, "snapshots", 0)
        shown = []
        for service in self._planned(request):
            for entry in self._plane(service).journal.last(last):
                decision = msgspec.to_builtins(entry.decision)
                if with_snapshots:
                    decision["snapshot"] = msgspec.to_builtins(entry.snapshot)
                if self._roster.several:
                    decision["model"] = service.model
                shown.append(decision)
        shown.sort(key=lambda decision: decision["time_s"])
        return json_response({"decisions": shown[::-1][:last]})

    async def journal(self, request: Request) -> Response:
        """All that is kept, as lines that can be replayed: of one model."""
        service = self._roster.pick(request.query_params.get("model"))
        lines = b"\n".join(self._plane(service).journal.lines()) + b"\n"
        return Response(lines, media_type="application/jsonl")

    async def config(self, request: Request) -> Response:
        return json_response({"config": msgspec.to_builtins(self._plane(self._roster.first).config)})

    async def reload(self, request: Request) -> Response:
        """Replace some parameters, for all models; the others stay."""
        plane = self._plane(self._roster.first)
        async with self._roster.bodies.reading(request) as body:
            given = parse_object(body)
        values = msgspec.to_builtins(plane.config)
        if isinstance(given.get("slo"), dict):
            given = {**given, "slo": {**values["slo"], **given["slo"]}}
        try:
            config = build_control({**values, **given})
            for service in self._roster.services:
                self._plane(service).reload(config)
        except ConfigError as error:
            raise BadRequest(str(error), code="bad_config") from error
        return json_response({"config": msgspec.to_builtins(plane.config)})

    def _planned(self, request: Request) -> Sequence[Service]:
        """The model that the request names, else all. Raises `NotFound`."""
        name = request.query_params.get("model")
        return self._roster.services if name is None else (self._roster.pick(name),)

    @staticmethod
    def _plane(service: Service) -> ControlPlane:
        plane = service.plane
        if plane is None:
            raise BadRequest(
                f"mode {service.mode} has no planner; start the server with --mode dynamic or dry-run",
                code="no_planner",
            )
        return plane


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > MOST_DECISIONS:
        raise BadRequest(f"{name} must be a number from 0 to {MOST_DECISIONS}, not '{text[:40]}'", param=name)
    return int(text)
