"""The HTTP application: routes, the error envelope, request ids."""

from __future__ import annotations

import re
import secrets

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import dynamictp
from dynamictp.errors import DynamicTPError
from dynamictp.server.access import Access, Gate
from dynamictp.server.admin_routes import AdminRoutes
from dynamictp.server.answers import json_response, on_error
from dynamictp.server.control_bodies import QUERIES
from dynamictp.server.control_routes import ControlRoutes
from dynamictp.server.fields import query_of
from dynamictp.server.layout_view import observed_of
from dynamictp.server.observe_routes import ObserveRoutes
from dynamictp.server.openai_routes import OpenAIRoutes
from dynamictp.server.openapi import openapi
from dynamictp.server.roster import Roster
from dynamictp.server.service import Service

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def create_app(
    served: Service | Roster, *, api: bool = True, admin: bool = True, access: Access | None = None
) -> FastAPI:
    """The application of one server, with its only model or all of them. Without `api` or `admin` those
    routes do not exist: an admin port of its own serves `api=False`. Without `access` nobody is asked for a
    key or a name.
    """
    roster = Roster.of(served)

    async def root(request: Request) -> Response:
        """For whoever opens the bare address: where things are on this port."""
        places = {"description": "/openapi.json", "ready": "/ready"}
        if api:
            places |= {"models": "/v1/models", "chat": "/v1/chat/completions", "text": "/v1/completions"}
        if admin:
            places |= {"dashboard": "/dashboard", "metrics": "/metrics", "layout": "/admin/layout"}
        return json_response({"name": "DynamicTP", "version": dynamictp.__version__, "paths": places})

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        roster.check_ready()
        return json_response({"status": "ready", "layout": observed_of(roster)})

    async def version(request: Request) -> Response:
        return json_response({"version": dynamictp.__version__, "server": "dynamictp"})

    async def description(request: Request) -> Response:
        vocab = max(service.facts.vocab for service in roster.services)
        return json_response(openapi(vocab, roster.first.devices, api=api, admin=admin))

    operator = AdminRoutes(roster)

    routes = [
        Route("/", root, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/openapi.json", description, methods=["GET"]),
        *(OpenAIRoutes(roster).routes() if api else ()),
        *((*operator.routes(), *ControlRoutes(roster).routes()) if admin else ()),
        *(ObserveRoutes(roster).routes() if admin else ()),
        *(operator.public() if access and access.public_metrics and not admin else ()),
    ]
    app = FastAPI(
        title="DynamicTP",
        version=dynamictp.__version__,
        routes=_merge_methods(routes),
        redirect_slashes=False,
        # The interactive pages load scripts from outside; a server of models must work without a network.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    for kind in (DynamicTPError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    if access is not None:
        app.add_middleware(Gate, access=access)
    app.add_middleware(RequestIds)
    return app


def _merge_methods(routes: list[Route]) -> list[BaseRoute]:
    """One route per path, so that a wrong method is told all the right ones, and a query that nobody reads is
    refused."""
    by_path: dict[str, list[Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, []).append(route)
    return [_dispatch(group) for group in by_path.values()]


def _dispatch(group: list[Route]) -> Route:
    endpoints = {method: route.endpoint for route in group for method in route.methods or ()}
    without_query = group[0].path.startswith("/admin/") and group[0].path not in QUERIES

    async def by_method(request: Request) -> Response:
        if without_query:
            query_of(request).finish()  # `?wait=closed` would change nothing, and say nothing
        response: Response = await endpoints[request.method](request)
        return response

    return Route(group[0].path, by_method, methods=list(endpoints))


class RequestIds:
    """Gives every answer an `x-request-id`: the client's, if it is a plain token, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        # Logs carry the id that the client sees.
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()

        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)
