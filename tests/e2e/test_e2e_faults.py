"""A real server loses workers and its engine, is stopped in mid-stream, and serves on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from dynamictp.testing.server_process import ServerProcess
from tests.e2e.live import Api, Stream, until

pytestmark = pytest.mark.e2e

POISON = 4242
SHOWN: dict[str, Any] = {"logprobs": 1, "return_token_ids": True, "ignore_eos": True}
PROMPTS = ("A short history of Rome:", "The recipe begins with")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    arguments = ("serve", "demo", "--devices", "2", "--layout", "tp2", "--kv-memory", "256MiB")
    with ServerProcess(*arguments, environment={"DYNAMICTP_FAULT": "signal"}) as running:
        yield running


@pytest.fixture
def api(server: ServerProcess) -> Iterator[Api]:
    with Api(server.url) as client:
        until(lambda: whole(client, server), "workers and a spare", 60.0)
        yield client
        until(lambda: not client.in_use(), "rows and pages free", 60.0)


def whole(api: Api, server: ServerProcess) -> bool:
    """The layout serves, every device has a worker, and a spare stands by."""
    if api.http.get("/ready").status_code != 200:
        return False
    layout = api.layout()
    pids = {device["pid"] for device in layout["devices"]}
    states = [domain["state"] for domain in layout["domains"]]
    return None not in pids and states == ["serving"] and bool(workers(server) - pids)


def workers(server: ServerProcess) -> set[int]:
    return {pid for pid, command in server.children().items() if "-m dynamictp.worker " in command}


def niceness(server: ServerProcess) -> dict[str, set[int]]:
    """Of engine and workers."""
    found: dict[str, set[int]] = {}
    for pid, command in server.children().items():
        role = command.split(" -m ")[1].split()[0]
        found.setdefault(role, set()).add(os.getpriority(os.PRIO_PROCESS, pid))
    return found


def strike(api: Api, server: ServerProcess, victim: str, number: signal.Signals) -> None:
    if victim == "engine":
        pids = [pid for pid, command in server.children().items() if "-m dynamictp.engine " in command]
    else:
        pids = [device["pid"] for device in api.layout()["devices"]]
    os.kill(pids[-1], number)


def read_tokens(stream: Stream, events: Iterator[None], more: int) -> None:
    wanted = len(stream.tokens) + more
    while len(stream.tokens) < wanted:
        next(events)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("worker", signal.SIGKILL),
        ("worker", signal.SIGSTOP),
        ("worker", signal.SIGUSR1),
        ("worker", signal.SIGUSR2),
        ("engine", signal.SIGKILL),
        ("engine", signal.SIGSTOP),
    ],
)
def test_streams_keep_every_bit_over_a_fault(
    api: Api, server: ServerProcess, victim: str, number: signal.Signals
) -> None:
    before = niceness(server)
    crashes = api.metric("dtp_process_crashes_total", process=victim)
    with api.stream(PROMPTS[0], 100, **SHOWN) as first, api.stream(PROMPTS[1], 100, **SHOWN) as second:
        for stream, events in (first, second):
            read_tokens(stream, events, 5)
        strike(api, server, victim, number)
        for _, events in (first, second):
            list(events)
    until(lambda: whole(api, server), "everything is there again", 60.0)
    assert niceness(server) == before
    # SIGUSR1 makes a step raise: that worker lives.
    died = number != signal.SIGUSR1
    assert api.metric("dtp_process_crashes_total", process=victim) == crashes + died
    assert api.layout()["observed"] == "tp2"
    for prompt, (stream, _) in zip(PROMPTS, (first, second), strict=True):
        assert stream.done
        choice = api.complete(prompt, 100, **SHOWN)["choices"][0]
        assert stream.tokens == choice["token_ids"]
        assert stream.logprobs == choice["logprobs"]["token_logprobs"]
        assert stream.served["recomputes"] > 0 or not stream.served["handovers"]


def test_a_spare_that_dies_is_replaced(api: Api, server: ServerProcess) -> None:
    (spare,) = workers(server) - {device["pid"] for device in api.layout()["devices"]}
    os.kill(spare, signal.SIGKILL)
    until(lambda: spare not in workers(server), "the old one is gone")
    until(lambda: whole(api, server), "a new spare", 60.0)


def test_a_layout_set_by_hand_survives_the_engine(api: Api, server: ServerProcess) -> None:
    assert api.put_layout("tp1", wait="closed").status_code == 200
    crashes = api.metric("dtp_process_crashes_total", process="engine")
    strike(api, server, "engine", signal.SIGKILL)
    # The time in which the server is not ready may pass between two looks; the count stays.
    until(lambda: api.metric("dtp_process_crashes_total", process="engine") > crashes, "the engine is away")
    assert api.complete("Still", 4)["usage"]["completion_tokens"] == 4
    assert api.layout()["observed"] == "tp1"
    api.set_layout("tp2")


@pytest.mark.parametrize("way", ["raise-on", "exit-on"])
def test_a_poison_request_fails_alone(way: str) -> None:
    arguments = ("serve", "demo", "--devices", "1", "--layout", "tp1", "--kv-memory", "256MiB")
    environment = {"DYNAMICTP_FAULT": f"{way}:{POISON}"}
    with ServerProcess(*arguments, environment=environment) as server, Api(server.url) as api:
        with api.stream(PROMPTS[0], 120, **SHOWN) as (stream, events):
            read_tokens(stream, events, 3)
            body = {"prompt": [9, POISON, 11], "max_tokens": 4}
            poisoned = api.http.post("/v1/completions", json=body)
            list(events)
        assert poisoned.status_code == 500
        assert "failed 3 times" in poisoned.json()["error"]["message"]
        assert len(stream.tokens) == 120
        choice = api.complete(PROMPTS[0], 120, **SHOWN)["choices"][0]
        assert stream.tokens == choice["token_ids"]


def test_a_worker_that_always_dies_ends_the_server_with_a_reason() -> None:
    arguments = ("serve", "demo", "--devices", "1", "--layout", "tp1", "--kv-memory", "256MiB")
    environment = {"DYNAMICTP_FAULT": f"exit-on:{POISON}"}
    with ServerProcess(*arguments, "--crash-budget", "1", environment=environment) as server:
        with Api(server.url) as api:
            response = api.http.post("/v1/completions", json={"prompt": [9, POISON], "max_tokens": 4})
        assert response.status_code == 503
        assert server.wait_exit(15.0) == 1
        assert "worker 0 ended unexpectedly with exit code 66, and more than 1" in server.wait_output_end()
