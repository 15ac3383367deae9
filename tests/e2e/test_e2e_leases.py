"""Leases on a real server in static mode: who may use what, workers that sleep or end, and their return."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from dynamictp.testing.server_process import ServerProcess
from tests.e2e.live import Api, run_cli, until

pytestmark = pytest.mark.e2e


def test_a_leased_command_has_its_cores_and_the_server_the_others(api: Api) -> None:
    cores = api.layout()["devices"][1]["cores"]
    done = run_cli(
        "lease", "--url", api.url, "--", "python", "-c", "import os; print(sorted(os.sched_getaffinity(0)))"
    )
    assert (done.returncode, done.stdout) == (0, f"{cores}\n"), done.stderr
    lease = api.http.post("/admin/leases", json={"devices": 1})
    assert lease.status_code == 201
    assert run_cli("lease", "--url", api.url, "--", "true").returncode == 75
    refused = api.put_layout("tp2")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "devices_leased")
    assert "leased" in run_cli("layout", "show", "--url", api.url).stdout
    api.http.delete(f"/admin/leases/{lease.json()['id']}")
    api.set_layout("tp2")


def test_the_worker_of_a_leased_device_sleeps(api: Api) -> None:
    lease = api.http.post("/admin/leases", json={"devices": 1}).json()
    state = api.layout()
    (device,) = [device for device in state["devices"] if device["state"] == "leased"]
    assert device["lease"] == lease["id"]
    worker = psutil.Process(device["pid"])
    # Its imports may be young; then it is at rest.
    until(lambda: worker.status() == psutil.STATUS_SLEEPING, "the worker sleeps")
    before = worker.num_ctx_switches().voluntary
    spent_s = sum(worker.cpu_times()[:2])
    api.complete("A short history of Rome:", 64, ignore_eos=True)
    assert sum(worker.cpu_times()[:2]) - spent_s < 0.2
    assert worker.num_ctx_switches().voluntary - before < 20
    api.http.delete(f"/admin/leases/{lease['id']}")


def test_a_released_device_gives_its_worker_up_and_is_back_for_a_switch(api: Api) -> None:
    pid = api.layout()["devices"][1]["pid"]
    lease = api.http.post("/admin/leases", json={"devices": 1, "level": "released"}).json()
    until(lambda: not psutil.pid_exists(pid), "the worker has ended")
    assert api.layout()["devices"][1]["pid"] is None
    api.complete("Rain fell on", 8)
    api.http.delete(f"/admin/leases/{lease['id']}")
    response = api.put_layout("tp2", wait="closed")
    assert response.json()["switch"]["outcome"] == "closed", response.text
    assert api.layout()["devices"][1]["pid"] not in (None, pid)
    api.complete("Rain fell on", 8)


def test_a_restarted_engine_leaves_a_leased_device_alone() -> None:
    arguments = ("serve", "demo", "--devices", "2", "--kv-memory", "512MiB")
    with ServerProcess(*arguments) as server, Api(server.url) as api:
        moved = api.put_layout("tp1@1", wait="closed")
        assert moved.status_code == 200, moved.text
        lease = api.http.post("/admin/leases", json={"devices": 1, "level": "released"}).json()
        assert lease["devices"] == [0]
        os.kill(engine_of(server), signal.SIGKILL)
        # The time in which the server is not ready may pass between two looks; the count stays.
        until(lambda: api.metric("dtp_process_crashes_total", process="engine"), "the engine is gone")
        until(lambda: api.http.get("/ready").status_code == 200, "the next one serves")
        until(lambda: [d["devices"] for d in api.layout()["domains"]] == [[1]], "device 1 serves")
        api.complete("Rain fell on", 8)
        api.http.delete(f"/admin/leases/{lease['id']}")
        assert api.put_layout("tp2", wait="closed").json()["switch"]["outcome"] == "closed"
        kill_the_engine_in_mid_ramp(server, api)


def kill_the_engine_in_mid_ramp(server: ServerProcess, api: Api) -> None:
    """The layout before it serves again, and a stream of the new side goes on."""
    ramp = api.put_layout("tp1", wait="none", ramp=True).json()["switch"]["id"]
    path = f"/admin/switches/{ramp}"
    until(lambda: api.http.get(path).json()["switch"]["ramp_share"] > 0, "the ramp begins")
    engine = engine_of(server)
    with api.stream("Rain fell on", 160, ignore_eos=True) as (stream, events):
        next(events)
        os.kill(engine, signal.SIGKILL)
        assert stream.headers["x-dynamictp-tp"] == "1"
        list(events)
    assert stream.done
    assert (stream.served["tp"], stream.served["recomputes"]) == (2, 1)
    assert api.layout()["observed"] == "tp2"
    assert api.http.get(path).json()["switch"]["outcome"] == "failed"


def engine_of(server: ServerProcess) -> int:
    return next(pid for pid, line in server.children().items() if "dynamictp.engine" in line)
