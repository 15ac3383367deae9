"""Leases over HTTP, with a fake engine; and the command that runs on one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from dynamictp.cli.lease import Holder
from dynamictp.clock import ManualClock
from dynamictp.control.pool import EXPIRE_S, Lease
from dynamictp.errors import ResourceError
from dynamictp.messages import SetDevices, SetLayout
from dynamictp.server import leases
from dynamictp.server.leases import AlwaysAwake
from dynamictp.server.service import DeviceInfo
from tests.server.server_stack import Stack, on_port, running_stack


@pytest.fixture
async def dynamic() -> AsyncIterator[Stack]:
    async with running_stack(mode="dynamic") as stack:
        yield stack


async def lend(stack: Stack, devices: int = 1, **more: Any) -> httpx.Response:
    return await stack.http.post("/admin/leases", json={"devices": devices, **more})


async def device_states(stack: Stack) -> list[tuple[str, str | None]]:
    state = (await stack.http.get("/admin/layout")).json()
    return [(device["state"], device["lease"]) for device in state["devices"]]


async def until_sent(stack: Stack, *, leased: tuple[int, ...]) -> None:
    """The engine was told."""
    while SetDevices(leased) not in stack.engine.received:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_device_is_lent_and_returned(stack: Stack) -> None:
    stack.service.device_info = lambda: {1: DeviceInfo((5, 6), 77)}
    assert await device_states(stack) == [("serving", None), ("standby", None)]
    response = await lend(stack)
    assert response.status_code == 201
    lease = response.json()
    assert (lease["devices"], lease["cores"], lease["state"]) == ([1], [5, 6], "active")
    assert (lease["level"], lease["notice_s"], lease["grace_s"]) == ("standby", 10.0, 10.0)
    assert 14 < lease["expires_s"] <= 15
    await until_sent(stack, leased=(1,))
    assert await device_states(stack) == [("serving", None), ("leased", lease["id"])]
    listed = (await stack.http.get("/admin/leases")).json()
    assert [entry["id"] for entry in listed["leases"]] == [lease["id"]]
    assert listed["free"] == []
    assert 'dtp_devices{state="leased"} 1.0' in (await stack.http.get("/metrics")).text
    path = f"/admin/leases/{lease['id']}"
    assert (await stack.http.put(path)).json()["state"] == "active"
    assert (await stack.http.delete(path)).status_code == 200
    await until_sent(stack, leased=())
    assert (await stack.http.get(path)).status_code == 404
    assert (await stack.http.put(path)).json()["error"]["code"] == "lease_not_found"


async def test_what_is_not_free_is_a_409_that_says_what_is(stack: Stack) -> None:
    refused = await lend(stack, 2)
    assert refused.status_code == 409
    assert refused.json()["free"] == [1]
    assert refused.json()["error"]["code"] == "devices_leased"


async def test_one_may_wait_for_a_device(stack: Stack) -> None:
    first = (await lend(stack)).json()
    waiting = asyncio.create_task(lend(stack, wait_s=30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await stack.http.delete(f"/admin/leases/{first['id']}")
    assert (await waiting).status_code == 201
    late = await lend(stack, wait_s=0.01)
    assert late.status_code == 409


async def test_nothing_is_lent_while_the_layout_changes(stack: Stack) -> None:
    stack.engine.hold_switches = True
    await stack.http.put("/admin/layout", json={"layout": "tp2", "wait": "none"})
    refused = await lend(stack)
    assert refused.status_code == 409
    assert "layout is changing" in refused.json()["error"]["message"]
    waiting = asyncio.create_task(lend(stack, wait_s=30))
    stack.engine.release_switches()
    while stack.service.observed != "tp2":  # noqa: ASYNC110
        await asyncio.sleep(0)
    await stack.http.put("/admin/layout", json={"layout": "tp1", "wait": "closed"})
    assert (await waiting).status_code == 201


async def test_bad_fields_are_a_400(stack: Stack) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "devices"),
        ({"devices": 0}, "devices"),
        ({"devices": 3}, "devices"),
        ({"devices": 1, "level": "off"}, "level"),
        ({"devices": 1, "notice_s": -1}, "notice_s"),
        ({"devices": 1, "wait_s": 1e9}, "wait_s"),
        ({"devices": 1, "hold": 1}, "hold"),
    ]
    for body, param in bad:
        response = await stack.http.post("/admin/leases", json=body)
        assert response.status_code == 400, body
        assert response.json()["error"]["param"] == param


async def test_static_mode_does_not_take_a_leased_device_back(stack: Stack) -> None:
    lease = (await lend(stack)).json()
    refused = await stack.http.put("/admin/layout", json={"layout": "tp2"})
    assert refused.status_code == 409
    assert "leased (1)" in refused.json()["error"]["message"]
    placed = await stack.http.put("/admin/layout", json={"layout": "tp1@1"})
    assert placed.status_code == 409
    assert (await stack.http.get(f"/admin/leases/{lease['id']}")).json()["state"] == "active"
    assert not [body for body in stack.engine.received if isinstance(body, SetLayout)]


async def test_dynamic_mode_calls_leases_back_for_a_layout_set_by_hand(dynamic: Stack) -> None:
    lease = (await lend(dynamic, notice_s=3, grace_s=2)).json()
    path = f"/admin/leases/{lease['id']}"
    setting = asyncio.create_task(dynamic.http.put("/admin/layout", json={"layout": "tp2", "wait": "closed"}))
    while (shown := (await dynamic.http.get(path)).json())["state"] == "active":  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert 2 < shown["deadline_s"] <= 3
    assert not setting.done()
    await dynamic.http.delete(path)
    assert (await setting).json()["switch"]["outcome"] == "closed"
    commands = [b for b in dynamic.engine.received if isinstance(b, SetDevices | SetLayout)]
    assert [type(body) for body in commands] == [SetDevices, SetDevices, SetLayout]


async def test_a_released_device_sleeps_until_it_is_back(stack: Stack) -> None:
    class Power:
        asleep: list[int] = []  # noqa: RUF012

        def sleep(self, device: int) -> None:
            self.asleep.append(device)

        def wake(self, device: int) -> None:
            self.asleep.remove(device)

    power = stack.service.desk.power = Power()
    lease = (await lend(stack, level="released")).json()
    assert power.asleep == [1]
    await stack.http.delete(f"/admin/leases/{lease['id']}")
    assert power.asleep == []


async def test_a_holder_that_dies_loses_its_devices_and_the_engine_is_told() -> None:
    clock = ManualClock(100.0)

    class Power(AlwaysAwake):
        asleep: ClassVar[list[int]] = []

        def sleep(self, device: int) -> None:
            self.asleep.append(device)

        def wake(self, device: int) -> None:
            self.asleep.remove(device)

    async with running_stack(clock=clock) as stack:
        desk = stack.service.desk
        desk.power = power = Power()
        lease = (await lend(stack, level="released")).json()
        await until_sent(stack, leased=(1,))
        # The engine dies too; the next one is told which devices it may not use.
        stack.service.engine_lost()
        assert sorted(desk.pool.leased) == [1]
        clock.advance(EXPIRE_S)
        while desk.pool.leases:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert power.asleep == []
        await until_sent(stack, leased=())
        assert (await stack.http.put(f"/admin/leases/{lease['id']}")).status_code == 404


async def test_a_look_for_lost_leases_that_fails_is_not_the_last_one(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "CHECK_S", 0.0)
    desk, looks = stack.service.desk, 0
    tick = desk.pool.tick

    def failing() -> list[Lease]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ResourceError("can't start worker 1")
        return tick()

    monkeypatch.setattr(desk.pool, "tick", failing)
    await lend(stack)
    async with asyncio.timeout(10):
        while looks < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert desk.pool.leases


# ------------------------------------------------------------ the command


@pytest.fixture
def signals() -> Iterator[None]:
    """The command's handlers are for a process of its own."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("answer", [None, 503])
def test_a_command_ends_when_the_server_is_lost_for_so_long(answer: int | None, tmp_path: Path) -> None:
    """Whether it is gone or only says that it can't: by then the devices may be someone else's."""
    asked: list[str] = []
    times = count(0.0, 5.0)

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        if answer is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(answer, json={"error": {}})

    with httpx.Client(transport=httpx.MockTransport(serve), base_url="http://gone") as http:
        granted = {"id": "l1", "cores": [], "devices": [1]}
        holder = Holder(http, granted, grace_s=1.0, now=lambda: next(times))
        pid = tmp_path / "pid"
        assert holder.run(("sh", "-c", f"echo $$ > {pid}; exec sleep 600")) == 76
    assert asked[:2] == ["PUT", "PUT"]
    assert len(asked) >= 3
    assert not _alive(int(pid.read_text()))


async def test_a_command_does_not_outlive_the_one_that_renews_its_lease(stack: Stack, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    async with on_port(stack) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dynamictp", "lease", "--url", url, "--", "sh", "-c",
            f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600",
        )  # fmt: skip
        while not pid.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        process.kill()
        await process.wait()
        while _alive(int(pid.read_text())):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    (lease,) = stack.service.desk.pool.leases
    assert lease.state == "active"  # until it was not renewed for long enough


async def run_lease(url: str, *command: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dynamictp", "lease", "--url", url, *options, "--", *command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_command_runs_on_the_cores_of_its_devices(stack: Stack) -> None:
    core = max(os.sched_getaffinity(0))
    stack.service.device_info = lambda: {1: DeviceInfo((core,), 77)}
    script = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['DYNAMICTP_DEVICES']); exit(7)"
    async with on_port(stack) as url:
        code, out, err = await run_lease(url, sys.executable, "-c", script)
    assert (code, out, err) == (7, f"[{core}] 1\n", "")
    assert stack.service.desk.pool.leases == ()


async def test_exit_codes_tell_why_a_command_did_not_run(stack: Stack) -> None:
    async with on_port(stack) as url:
        code, _, err = await run_lease(url, "true", options=("--devices", "2"))
        assert (code, "2 devices are asked for, free: 1" in err) == (75, True)
        code, _, err = await run_lease(url, "/no/such/program")
        assert (code, "No such file" in err) == (127, True)
        code, _, _ = await run_lease(url, sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
        assert code == 128 + 9
    assert stack.service.desk.pool.leases == ()
    code, _, err = await run_lease("http://127.0.0.1:1", "true")
    assert (code, "is the server running" in err) == (1, True)


async def test_a_called_back_command_is_told_and_then_killed_with_its_children(
    dynamic: Stack, tmp_path: Path
) -> None:
    """It ignores SIGTERM, as does its child."""
    script = tmp_path / "stubborn.py"
    pids = tmp_path / "pids"
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: open('told', 'a').close())\n"
        "child = os.fork()\n"
        "with open('pids', 'a') as file: print(os.getpid(), file=file)\n"
        "while True: time.sleep(1)\n"
    )
    async with on_port(dynamic) as url:
        running = asyncio.create_task(
            run_lease(
                url, "sh", "-c", f"cd {tmp_path} && exec {sys.executable} {script}",
                options=("--grace", "1", "--notice", "30"),
            )
        )  # fmt: skip
        while not pids.exists() or len(pids.read_text().split()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        dynamic.service.desk.pool.call_back(1)
        code, _, _ = await running
    assert code == 76
    assert (tmp_path / "told").exists()
    assert dynamic.service.desk.pool.leases == ()
    for pid in map(int, pids.read_text().split()):
        assert not _alive(pid)


async def test_a_command_that_ends_when_it_is_told_to_still_counts_as_revoked(dynamic: Stack) -> None:
    async with on_port(dynamic) as url:
        running = asyncio.create_task(run_lease(url, "sleep", "600"))
        while not dynamic.service.desk.pool.leases:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        dynamic.service.desk.pool.call_back(1, "the planner wants tp2 (grow_predicted)")
        shown = (await dynamic.http.get("/admin/leases")).json()["leases"][0]
        assert (shown["state"], shown["reason"]) == ("revoking", "the planner wants tp2 (grow_predicted)")
        code, _, said = await running
    assert code == 76
    assert "device 1 is called back: the planner wants tp2 (grow_predicted)" in said


def _alive(pid: int) -> bool:
    """It runs: the zombie of an orphan that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
