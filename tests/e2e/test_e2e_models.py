"""Two models in one real server: the embedded one under two names, on three devices."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamictp.testing.server_process import ServerProcess
from tests.e2e.live import Api, run_cli, until

pytestmark = pytest.mark.e2e

CONFIG = """
mode: static
devices: 3
kv_memory: 1GiB
crash_budget: 1
models:
  - {name: big, path: demo, layout: tp2, kv_share: 2}
  - {name: small, path: demo, layout: tp1}
"""
PROMPT = "The lighthouse keeper counted the ships that"
TOKENS, MANY_TOKENS = 24, 200
"""Many: what is done to a stream meets it while it runs, however slowly that is done."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("models") / "models.yaml"
    file.write_text(CONFIG)
    with ServerProcess("serve", "--config", str(file)) as server:
        yield server
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit(15.0) == 0
        server.wait_output_end()


@pytest.fixture
def models(server: ServerProcess) -> Iterator[Api]:
    with Api(server.url) as api:
        yield api


def answer(api: Api, model: str, tokens: int = TOKENS) -> dict[str, Any]:
    choice: dict[str, Any] = api.complete(
        PROMPT, tokens, model=model, logprobs=1, ignore_eos=True, return_token_ids=True
    )["choices"][0]
    return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def worker_of(api: Api, model: str) -> int:
    pid: int = next(d["pid"] for d in api.layout()["devices"] if d["model"] == model)
    return pid


def test_both_answer_with_the_bits_of_a_server_of_one(models: Api, api: Api, server: ServerProcess) -> None:
    assert [card["id"] for card in models.http.get("/v1/models").json()["data"]] == ["big", "small"]
    assert models.layout()["observed"] == "big:tp2+small:tp1"
    reference = answer(api, "demo")
    assert answer(models, "big") == answer(models, "small") == reference
    started = [line for line in server.lines if " tokens, ready after" in line]
    assert [line.split(":")[0] for line in started] == ["big", "small"]
    assert "KV 0.67 GiB" in started[0]
    assert "KV 0.33 GiB" in started[1]


def test_devices_move_to_the_other_model_and_back_under_streams(models: Api) -> None:
    reference = answer(models, "small", MANY_TOKENS)
    with (
        models.stream(PROMPT, MANY_TOKENS, model="big", ignore_eos=True, return_token_ids=True) as (
            big,
            ours,
        ),
        models.stream(PROMPT, MANY_TOKENS, model="small", ignore_eos=True, return_token_ids=True) as (
            small,
            theirs,
        ),
    ):
        next(ours)
        next(theirs)
        moved = run_cli("layout", "set", "big:tp1+small:tp2", "--url", models.url)
        assert moved.returncode == 0, moved.stderr
        assert "small:tp1 -> small:tp2: closed" in moved.stdout
        shown = run_cli("layout", "show", "--url", models.url).stdout
        assert "big:tp1+small:tp2" in shown
        list(ours)
        list(theirs)
    assert big.tokens == small.tokens == reference["tokens"]
    reference = answer(models, "small")
    assert answer(models, "big") == reference
    assert {device["model"] for device in models.layout()["devices"]} == {"big", "small"}
    models.set_layout("big:tp2+small:tp1")
    assert answer(models, "big") == reference
    assert "big" in run_cli("top", models.url, "--once").stdout


def test_a_killed_worker_of_one_leaves_the_streams_of_the_other_alone(
    models: Api, server: ServerProcess
) -> None:
    """And so does a killed engine."""
    reference = answer(models, "small", MANY_TOKENS)["tokens"]
    engines = {pid for pid, line in server.children().items() if "dynamictp.engine" in line}
    victim = worker_of(models, "big")
    went_on: list[dict[str, Any]] = []

    def stream(name: str, *, kill: int) -> None:
        with models.stream(PROMPT, MANY_TOKENS, model=name, ignore_eos=True, return_token_ids=True) as (
            own,
            events,
        ):
            next(events)
            if kill:
                os.kill(kill, signal.SIGKILL)
            list(events)
        assert own.tokens == reference
        went_on.append({"model": name, **own.served})

    for kill in (victim, engine_of(server)):
        other = threading.Thread(target=stream, args=("big",), kwargs={"kill": kill})
        other.start()
        stream("small", kill=0)
        other.join()
    assert len(went_on) == 4
    assert {(e["recomputes"], e["handovers"]) for e in went_on if e["model"] == "small"} == {(0, 0)}
    assert [e["recomputes"] for e in went_on if e["model"] == "big"] == [1, 1]
    until(lambda: models.http.get("/ready").status_code == 200, "big serves again")
    assert len(engines & set(server.children())) == 1
    until(lambda: not models.in_use(), "rows and pages are free")


def test_a_model_that_crashes_too_often_leaves_its_devices_to_the_other(
    models: Api, server: ServerProcess
) -> None:
    """It is the engine's second crash."""
    os.kill(engine_of(server), signal.SIGKILL)
    until(lambda: models.layout()["observed"] == "small:tp1", "big is given up")
    refused = models.http.post("/v1/completions", json={"model": "big", "prompt": PROMPT})
    assert refused.status_code == 503
    assert "engine" in refused.json()["error"]["message"]
    assert models.put_layout("small:tp2@0,1", wait="closed").status_code == 200
    assert models.layout()["observed"] == "small:tp2"
    answer(models, "small")
    assert sum("dynamictp.engine" in line for line in server.children().values()) == 1


def engine_of(server: ServerProcess) -> int:
    """The engine of `big`: whose start file names it."""
    for pid, line in server.children().items():
        if "dynamictp.engine" in line:
            file = line.split("--start ")[1].split()[0]
            if '"model":"big"' in Path(file).read_text():
                return pid
    raise AssertionError("big has no engine")
