"""The operator's endpoints of the control plane: leases, decisions, parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamictp.control.config import build_control, check_pool
from dynamictp.control.pool import Lease
from dynamictp.errors import BadRequest, ConfigError
from dynamictp.server.answers import json_response
from dynamictp.server.control_bodies import (
    Config,
    DecisionEntry,
    Decisions,
    LeaseAnswer,
    Leases,
    parse_decisions,
    parse_journal,
    parse_lease,
    parse_reload,
)
from dynamictp.server.control_plane import ControlPlane
from dynamictp.server.fields import Fields, parse_object, query_of
from dynamictp.server.roster import Roster
from dynamictp.server.service import Service


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
        return json_response(Leases([self._shown(lease) for lease in desk.pool.leases], desk.pool.free))

    async def lend(self, request: Request) -> Response:
        async with self._roster.bodies.reading(request) as body:
            wanted = parse_lease(Fields(parse_object(body)), self._roster.first.devices)
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

    def _shown(self, lease: Lease) -> LeaseAnswer:
        now = self._roster.clock.now()
        info = self._roster.first.device_info()
        return LeaseAnswer(
            id=lease.id,
            devices=lease.devices,
            cores=sorted({core for d in lease.devices if d in info for core in info[d].cores}),
            level=lease.level,
            state=lease.state,
            notice_s=lease.notice_s,
            grace_s=lease.grace_s,
            expires_s=max(0.0, lease.expires_s - now),
            deadline_s=msgspec.UNSET if lease.deadline_s is None else max(0.0, lease.deadline_s - now),
            reason=lease.reason or msgspec.UNSET,
        )

    # ------------------------------------------------------------ the planner

    async def decisions(self, request: Request) -> Response:
        """The last decisions, the latest first; with `snapshots=1` also what each was based on. With several
        models those of all, or of the one that `model` names."""
        asked = parse_decisions(query_of(request))
        began_at = time.time() - self._roster.clock.now()
        shown = [
            DecisionEntry(
                **msgspec.structs.asdict(entry.decision),
                decided_at=began_at + entry.decision.time_s,
                snapshot=entry.snapshot if asked.snapshots else msgspec.UNSET,
                model=service.model if self._roster.several else msgspec.UNSET,
            )
            for service in self._planned(asked.model)
            for entry in self._plane(service).journal.last(asked.last)
        ]
        shown.sort(key=lambda decision: decision.time_s, reverse=True)
        return json_response(Decisions(shown[: asked.last]))

    async def journal(self, request: Request) -> Response:
        """All that is kept, as lines that can be replayed: of one model."""
        service = self._roster.pick(parse_journal(query_of(request)))
        lines = b"\n".join(self._plane(service).journal.lines()) + b"\n"
        return Response(lines, media_type="application/jsonl")

    async def config(self, request: Request) -> Response:
        return json_response(Config(self._plane(self._roster.first).config))

    async def reload(self, request: Request) -> Response:
        """Replace some parameters, for all models; the others stay."""
        plane = self._plane(self._roster.first)
        async with self._roster.bodies.reading(request) as body:
            given = parse_reload(Fields(parse_object(body)))
        values = msgspec.to_builtins(plane.config)
        given["slo"] = {**values["slo"], **given.get("slo", {})}
        try:
            config = build_control({**values, **given})
            check_pool(config, self._roster.first.devices)
            for service in self._roster.services:
                self._plane(service).reload(config)
        except ConfigError as error:
            raise BadRequest(str(error), code="bad_config") from error
        return json_response(Config(plane.config))

    def _planned(self, name: str | None) -> Sequence[Service]:
        """The model of that name, else all. Raises `NotFound`."""
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
