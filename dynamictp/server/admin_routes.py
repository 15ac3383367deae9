"""The operator's endpoints: layout, switches, metrics."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamictp.errors import BadRequest, NotFound
from dynamictp.messages import SwitchStatus
from dynamictp.server.answers import envelope, json_response
from dynamictp.server.fields import Fields, parse_object
from dynamictp.server.layout_orders import LayoutOrders, degrees_of
from dynamictp.server.layout_view import observed_of, show_layout, show_switch, show_switches
from dynamictp.server.metrics import CONTENT_TYPE
from dynamictp.server.roster import Roster
from dynamictp.server.roster_metrics import RosterMetrics
from dynamictp.server.service import Service
from dynamictp.server.switches import Wait, Wanted, check_layout, describe

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
    """Endpoints over the models of one server."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._orders = LayoutOrders(roster)
        self._metrics = RosterMetrics(roster) if roster.several else None

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
        text = self._metrics.render() if self._metrics is not None else self._roster.first.metrics.render()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def layout(self, request: Request) -> Response:
        return json_response(show_layout(self._roster))

    async def set_layout(self, request: Request) -> Response:
        async with self._roster.bodies.reading(request) as body:
            wanted = parse_set_layout(Fields(parse_object(body)))
        if wanted.layout.strip() == "auto":
            return self._unpin()
        if self._roster.several:
            return await self._set_layouts(wanted)
        service, board = self._roster.first, self._roster.first.switches
        most, pool = service.share.most, service.devices
        layout = check_layout(wanted.layout, degrees_of(service), most, service.model, pool=pool)
        service.client.check_open()
        await service.desk.recall(layout, service.switch_wait_s)
        status = board.start(
            Wanted(str(layout), wanted.ramp, wanted.drain_deadline_s),
            service.observed,
            service.client.send,
            ramp=service.ramp,
        )
        board.pinned = service.mode != "static"
        if wanted.until == "none":
            return json_response({"switch": self._shown(status.switch_id)}, 202)
        ended = await board.wait(status.switch_id, wanted.until, service.switch_wait_s)
        return _answer(ended, status.switch_id, self._shown(status.switch_id))

    async def _set_layouts(self, wanted: LayoutChange) -> Response:
        """A switch for each model that the layout names; `switch` is the one that got least far."""
        roster, wait_s = self._roster, self._roster.first.switch_wait_s
        parts = self._orders.check(wanted.layout)
        await roster.shares.desk.recall(self._orders.combined(parts), wait_s)
        orders = self._orders.start(parts, ramp=wanted.ramp, drain_deadline_s=wanted.drain_deadline_s)
        for order in orders:
            order.service.switches.pinned = roster.first.mode != "static"
        until: Wait = wanted.until
        ended = await asyncio.gather(
            *(order.service.switches.wait(order.switch_id, until, wait_s) for order in orders)
        )
        shown = [show_switch(roster, order.service, order.switch_id) for order in orders]
        if until == "none":
            return json_response({"switch": shown[0], "switches": shown}, 202)
        worst = max(range(len(orders)), key=lambda i: _BADNESS.get(_outcome(ended[i]), 0))
        return _answer(ended[worst], orders[worst].switch_id, shown[worst], switches=shown)

    async def switches(self, request: Request) -> Response:
        return json_response({"switches": show_switches(self._roster)})

    async def switch(self, request: Request) -> Response:
        return json_response({"switch": self._shown(request.path_params["id"])})

    async def cancel_switch(self, request: Request) -> Response:
        switch_id = request.path_params["id"]
        service = self._owner(switch_id)
        service.switches.cancel(switch_id, service.client.send)
        if service.switches.pinned:
            # What was asked for by hand is taken back by hand.
            service.switches.wanted = Wanted(service.observed)
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
        """Hand the layouts back to the planners."""
        mode = self._roster.first.mode
        if mode != "dynamic":
            raise BadRequest(
                f"'auto' gives the layout to the planner, and mode {mode} has none that acts; "
                "name a layout, or start the server with --mode dynamic",
                param="layout",
            )
        for service in self._roster.services:
            service.switches.pinned = False
            service.switches.wanted = None
            if service.plane is not None:
                service.plane.unpin()
        layout = observed_of(self._roster)
        noop = SwitchStatus("", layout, layout, "", "noop")
        return json_response({"switch": describe(noop), "pinned": False})

    def _owner(self, switch_id: str) -> Service:
        """The model whose switch it is. Raises `NotFound`."""
        for service in self._roster.services:
            with contextlib.suppress(NotFound):
                service.switches.get(switch_id)
                return service
        raise NotFound(f"there is no switch '{switch_id}'", code="switch_not_found")

    def _shown(self, switch_id: str) -> dict[str, object]:
        return show_switch(self._roster, self._owner(switch_id), switch_id)


_BADNESS = {"": 4, "failed": 3, "rolled_back": 2, "cancelled": 1}


def _outcome(status: SwitchStatus | None) -> str:
    return status.outcome if status is not None else ""


def _answer(
    status: SwitchStatus | None,
    switch_id: str,
    switch: dict[str, object],
    *,
    switches: list[dict[str, object]] | None = None,
) -> Response:
    """The answer to a wait, with the switch as it is shown; None when the time was up first. `switches`: all
    of one order, with several models."""
    more = {"switch": switch} if switches is None else {"switch": switch, "switches": switches}
    outcome = _outcome(status)
    if status is None:
        message = f"switch {switch_id} goes on; look at /admin/switches/{switch_id}"
        body = envelope(message, "timeout_error", code="switch_wait_timeout")
        return json_response({**body, **more, "switch": {"id": switch_id}}, 504)
    if outcome == "failed":
        message = f"switch {switch_id} failed: {status.error or 'no reason given'}"
        return json_response({**envelope(message, "server_error", code="switch_failed"), **more}, 500)
    if outcome == "rolled_back":
        message = f"switch {switch_id} was rolled back: {status.error}"
        return json_response({**envelope(message, "conflict_error", code="switch_rolled_back"), **more}, 409)
    if outcome == "cancelled":
        message = f"switch {switch_id} was cancelled"
        return json_response({**envelope(message, "conflict_error", code="switch_cancelled"), **more}, 409)
    return json_response(more)
