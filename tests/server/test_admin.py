"""Layouts and switches over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from dynamictp.errors import LayoutRefused
from dynamictp.messages import FirstAdmission, SetLayout
from dynamictp.server.service import DeviceInfo
from dynamictp.server.switches import check_layout
from tests.server.server_stack import Stack


async def put(stack: Stack, layout: Any, **more: Any) -> httpx.Response:
    return await stack.http.put("/admin/layout", json={"layout": layout, **more})


async def until_in_flight(stack: Stack) -> str:
    """Id of the switch in flight, once there is one."""
    while stack.service.switches.in_flight is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return stack.service.switches.in_flight.switch_id


async def test_layout_shows_domains_and_devices(stack: Stack) -> None:
    stack.service.device_info = lambda: {0: DeviceInfo((3,), 77)}
    state = (await stack.http.get("/admin/layout")).json()
    assert state["mode"] == "static"
    assert state["pinned"] is False
    assert state["legal_layouts"] == ["tp1", "tp2", "tp1+tp1"]
    assert (state["target"], state["observed"], state["waiting"], state["switch"]) == (
        "tp1",
        "tp1",
        0,
        None,
    )
    assert state["domains"] == [
        {
            "id": "d1",
            "epoch": 1,
            "model": "tiny",
            "tp": 1,
            "pp": 1,
            "devices": [0],
            "state": "serving",
            "running": 0,
            "kv_pages_used": 0,
            "kv_pages_cap": 0,
        }
    ]
    assert state["devices"] == [
        {
            "id": 0,
            "state": "serving",
            "cores": [3],
            "pid": 77,
            "domain": "d1",
            "domains": ["d1"],
            "lease": None,
        },
        {
            "id": 1,
            "state": "standby",
            "cores": [],
            "pid": None,
            "domain": None,
            "domains": [],
            "lease": None,
        },
    ]


async def test_a_switch_reports_its_phases(stack: Stack) -> None:
    response = await put(stack, "tp2", wait="closed", drain_deadline_s=1.5)
    assert response.status_code == 200
    switch = response.json()["switch"]
    assert (switch["from"], switch["to"], switch["outcome"]) == ("tp1", "tp2", "closed")
    assert switch["phases_ms"]["drain"] == 3.0
    assert switch["weight_bytes_copied"] == 0
    command = next(message for message in stack.engine.received if isinstance(message, SetLayout))
    assert (command.layout, command.drain_deadline_s, command.reason) == ("tp2", 1.5, "admin")
    again = await stack.http.get(f"/admin/switches/{switch['id']}")
    assert again.json()["switch"] == switch
    assert switch["began_at"] <= switch["committed_at"] <= switch["ended_at"]
    assert switch["first_admitted_ms"] is None
    stack.engine.link.send(FirstAdmission(switch["id"], 12.5))
    while switch["first_admitted_ms"] is None:
        await asyncio.sleep(0)
        switch = (await stack.http.get(f"/admin/switches/{switch['id']}")).json()["switch"]
    assert (switch["first_admitted_ms"], switch["outcome"]) == (12.5, "closed")
    state = (await stack.http.get("/admin/layout")).json()
    assert (state["target"], state["observed"]) == ("tp2", "tp2")
    noop = await put(stack, " tp2 ")
    assert noop.json()["switch"]["outcome"] == "noop"
    served = await stack.post("/v1/completions", prompt="x", max_tokens=1)
    assert served.headers["x-dynamictp-tp"] == "2"


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("tp3", "degree 1, 2"),
        ("tp2+tp1", "the pool has 2"),
        ("2*tp2", "the pool has 2"),
        ("tp2pp2", "pipeline stages"),
        ("other:tp1", "model here is 'tiny'"),
        ("tp1@2", "names device 2"),
        ("tp2@0,0", "twice"),
        ("tp1@0+tp1", "not placed"),
        ("two", "no shape"),
        ("", "no shape"),
        ("tp1+" * 300, "1024 characters"),
    ],
)
async def test_an_illegal_layout_is_a_422_with_the_legal_ones(stack: Stack, layout: str, reason: str) -> None:
    response = await put(stack, layout)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["legal_layouts"] == ["tp1", "tp2", "tp1+tp1"]
    assert reason in error["message"]
    assert "tp1, tp2, tp1+tp1" in error["message"]
    assert not [message for message in stack.engine.received if isinstance(message, SetLayout)]


async def test_a_placed_layout_moves_a_domain(stack: Stack) -> None:
    switch = (await put(stack, "tp1@1", wait="closed")).json()["switch"]
    assert (switch["to"], switch["outcome"]) == ("tp1@1", "closed")
    state = (await stack.http.get("/admin/layout")).json()
    assert (state["target"], state["observed"]) == ("tp1@1", "tp1")
    assert [domain["devices"] for domain in state["domains"]] == [[1]]
    # Shapes alone leave the domain where it is; named devices are where it has to be.
    assert (await put(stack, "tp1")).json()["switch"]["outcome"] == "noop"
    assert (await put(stack, "tp1@0")).json()["switch"]["outcome"] != "noop"


async def test_bad_fields_are_a_400(stack: Stack) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "layout"),
        ({"layout": 2}, "layout"),
        ({"layout": "tp1", "wait": "forever"}, "wait"),
        ({"layout": "tp1", "ramp": "yes"}, "ramp"),
        ({"layout": "tp1", "drain_deadline_s": -1}, "drain_deadline_s"),
        ({"layout": "tp1", "drain": 1}, "drain"),
        ({"layout": "auto"}, "layout"),
    ]
    for body, param in bad:
        response = await stack.http.put("/admin/layout", json=body)
        assert response.status_code == 400, body
        assert response.json()["error"]["param"] == param


async def test_one_switch_in_flight(stack: Stack) -> None:
    stack.engine.hold_switches = True
    first = asyncio.create_task(put(stack, "tp2"))
    switch_id = await until_in_flight(stack)
    assert (await stack.http.get("/admin/layout")).json()["switch"]["id"] == switch_id
    second = await put(stack, "tp1+tp1")
    assert second.status_code == 409
    assert second.json()["switch"] == {"id": switch_id}
    stack.engine.release_switches()
    assert (await first).json()["switch"]["outcome"] in ("committed", "closed")


async def test_wait_none_answers_at_once_and_a_long_wait_is_a_504(stack: Stack) -> None:
    stack.engine.hold_switches = True
    response = await put(stack, "tp2", wait="none")
    assert response.status_code == 202
    switch_id = response.json()["switch"]["id"]
    stack.engine.release_switches()
    done = await stack.service.switches.wait(switch_id, "closed", 5)
    assert done is not None
    assert done.outcome == "closed"
    stack.engine.hold_switches = True
    stack.service.switch_wait_s = 0.01
    late = await put(stack, "tp1")
    assert late.status_code == 504
    assert late.json()["switch"]["id"] == stack.service.switches.in_flight.switch_id  # type: ignore[union-attr]


async def test_a_switch_can_be_taken_back_before_its_commit(stack: Stack) -> None:
    stack.engine.hold_switches = True
    waiting = asyncio.create_task(put(stack, "tp2"))
    switch_id = await until_in_flight(stack)
    response = await stack.http.delete(f"/admin/switches/{switch_id}")
    assert response.json()["switch"]["outcome"] == "cancelled"
    assert (await waiting).status_code == 409
    assert (await stack.http.delete(f"/admin/switches/{switch_id}")).status_code == 409
    assert (await stack.http.get("/admin/switches/nope")).status_code == 404
    assert (await stack.http.delete("/admin/switches/nope")).status_code == 404


async def test_an_engine_restart_fails_the_switch_in_flight(stack: Stack) -> None:
    stack.engine.hold_switches = True
    waiting = asyncio.create_task(put(stack, "tp2"))
    await until_in_flight(stack)
    stack.service.switches.engine_lost()
    response = await waiting
    assert response.status_code == 500
    assert "restarted" in response.json()["error"]["message"]
    assert stack.service.switches.in_flight is None


async def test_pin_and_auto_in_dynamic_mode(stack: Stack) -> None:
    stack.service.mode = "dynamic"
    await put(stack, "tp2", wait="closed")
    assert (await stack.http.get("/admin/layout")).json()["pinned"] is True
    released = await put(stack, "auto")
    assert (released.status_code, released.json()["switch"]["outcome"]) == (200, "noop")
    assert (await stack.http.get("/admin/layout")).json()["pinned"] is False


def test_huge_layouts_are_refused_quickly() -> None:
    with pytest.raises(LayoutRefused):
        check_layout("+".join(["9999*tp1024"] * 20), (1, 2), 2, "tiny")


def test_a_degree_that_the_other_models_leave_no_devices_for_says_so() -> None:
    with pytest.raises(LayoutRefused, match=r"tp2: .* at degree 1, as it may take 1 of the 2 devices; legal"):
        check_layout("tp2", (1,), 1, "tiny", pool=2)
