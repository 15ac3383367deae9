"""The live page and its history."""

from __future__ import annotations

import time
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from dynamictp.server.answers import json_response
from dynamictp.server.control_bodies import parse_history
from dynamictp.server.fields import query_of
from dynamictp.server.roster import Roster

PAGE = "dashboard.html"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'"
)
"""The page holds all it needs and asks only this server."""


class ObserveRoutes:
    """Endpoints over the models of one server."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._page = (resources.files("dynamictp.observe") / "data" / PAGE).read_text(encoding="utf-8")

    def routes(self) -> list[Route]:
        return [
            Route("/dashboard", self.dashboard, methods=["GET"]),
            Route("/admin/history", self.history, methods=["GET"]),
        ]

    async def dashboard(self, request: Request) -> Response:
        return HTMLResponse(
            self._page,
            headers={
                "content-security-policy": POLICY,
                "cache-control": "no-cache",
                "x-frame-options": "DENY",
                "x-content-type-options": "nosniff",
            },
        )

    async def history(self, request: Request) -> Response:
        """Points after `since`, a Unix time; by field. With several models, of the one that `model` names,
        else of the first."""
        asked = parse_history(query_of(request))
        service = self._roster.first if asked.model is None else self._roster.pick(asked.model)
        machine = service.metrics.machine
        shown = {
            "now": time.time(),
            "model": service.model,
            "points": service.metrics.history.columns(asked.since),
            "crashes": {"counts": machine.crashes, "last": machine.last_crash},
        }
        if self._roster.several:
            shown["models"] = self._roster.names
        return json_response(shown)
