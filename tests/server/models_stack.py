"""A server of several models over fake engines, in one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from dynamictp.clock import SystemClock
from dynamictp.control.values import Mode
from dynamictp.layout import Layout, LayoutSpec, parse_layout
from dynamictp.messages import SetDevices, SetLayout
from dynamictp.model.chat import ChatTemplate
from dynamictp.server.app import create_app
from dynamictp.server.roster import Roster
from dynamictp.server.service import Service
from dynamictp.server.shares import DeviceShares
from dynamictp.testing.fake_engine import FakeEngine
from dynamictp.transport import memory_link_pair
from tests.server.server_stack import TEMPLATE, VOCAB, byte_tokenizer, facts, speaking


@dataclass
class ModelsStack:
    roster: Roster
    engines: Mapping[str, FakeEngine]
    http: httpx.AsyncClient

    async def say(self, model: str | None, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        return await self.http.post(
            path, json={"prompt": "hi", **({"model": model} if model else {}), **more}
        )

    async def put(self, layout: str, **more: Any) -> httpx.Response:
        return await self.http.put("/admin/layout", json={"layout": layout, "wait": "closed", **more})

    async def layout(self) -> dict[str, Any]:
        state: dict[str, Any] = (await self.http.get("/admin/layout")).json()
        return state

    def held(self) -> dict[str, set[int]]:
        return {share.name: set(share.held) for share in self.roster.shares.all}

    def told(self, model: str) -> list[SetDevices | SetLayout]:
        """Commands to a model's engine about layouts and devices, in order."""
        return [b for b in self.engines[model].received if isinstance(b, SetDevices | SetLayout)]


@asynccontextmanager
async def running_models(
    layouts: Mapping[str, str],
    *,
    devices: int = 3,
    mode: Mode = "static",
    priorities: Mapping[str, int] | None = None,
    announce: bool = True,
) -> AsyncIterator[ModelsStack]:
    """A model for each of `layouts`, which says its own name."""
    shares = DeviceShares(devices, SystemClock(), revocable=mode == "dynamic")
    services = [
        Service.create(
            model=name,
            tokenizer=byte_tokenizer(),
            template=ChatTemplate(TEMPLATE, special_tokens={}),
            facts=facts(),
            devices=devices,
            legal_degrees=(1, 2),
            mode=mode,
            start_layout=layout,
            shares=shares,
            priority=(priorities or {}).get(name, 0),
            most_devices=devices - len(layouts) + 1,
        )
        for name, layout in layouts.items()
    ]
    shares.begin()
    engines = {service.model: _engine(service, devices) for service in services}
    if announce:
        for service in services:
            engines[service.model].start()
            await service.client.wait_ready()
    roster = Roster(services)
    transport = httpx.ASGITransport(create_app(roster), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield ModelsStack(roster, engines, http)
    for service in services:
        service.client.detach()
    await shares.desk.close()


def _engine(service: Service, devices: int) -> FakeEngine:
    fake: list[FakeEngine] = []
    left, right = memory_link_pair(service.client.wake, lambda: fake[0].arrived() if fake else None)
    held = sorted(service.share.held)
    wanted = parse_layout(service.start_layout)
    if isinstance(wanted, LayoutSpec):
        text = "+".join(f"{s}@{','.join(str(held.pop(0)) for _ in range(s.devices))}" for s in wanted.shapes)
        wanted = Layout.parse(text)
    fake.append(
        FakeEngine(
            right, speaking(service.model), vocab=VOCAB, devices=devices, layout=str(wanted),
            leased=frozenset(service.share.excluded),
        )
    )  # fmt: skip
    service.client.attach(left)
    return fake[0]
