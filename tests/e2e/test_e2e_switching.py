"""The layout changes under running streams, by the command line and by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.e2e.live import Api, Stream, run_cli, until

pytestmark = pytest.mark.e2e

PROMPTS = ("A short history of Rome:", "The recipe begins with", "Rain fell on")
SHOWN: dict[str, Any] = {"logprobs": 1, "return_token_ids": True, "ignore_eos": True}
ENDLESS = 4000
"""More tokens than a test waits for: such streams are closed by the client, so that none ends too early."""


def read_tokens(stream: Stream, events: Iterator[None], more: int) -> None:
    """Take events until there are that many more tokens."""
    wanted = len(stream.tokens) + more
    while len(stream.tokens) < wanted:
        next(events)


def assert_undisturbed(api: Api, prompt: str, stream: Stream) -> None:
    """The stream's tokens and log-probabilities are, bit by bit, those of a run without switches."""
    choice = api.complete(prompt, len(stream.tokens), **SHOWN)["choices"][0]
    assert stream.tokens == choice["token_ids"]
    assert stream.logprobs == choice["logprobs"]["token_logprobs"]


def test_streams_keep_every_bit_over_a_switch_by_the_command_line(api: Api) -> None:
    with ExitStack() as running:
        streams = [running.enter_context(api.stream(prompt, ENDLESS, **SHOWN)) for prompt in PROMPTS]
        for stream, events in streams:
            read_tokens(stream, events, 4)
        done = run_cli("layout", "set", "tp2", "--url", api.url)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("tp1 -> tp2: closed\n")
        assert "commit " in done.stdout
        assert "handovers 3, recomputes 0, weight bytes copied 0" in done.stdout
        assert api.layout()["observed"] == "tp2"
        for stream, events in streams:
            read_tokens(stream, events, 8)
    until(lambda: not api.in_use(), "streams are gone")
    for prompt, (stream, _) in zip(PROMPTS, streams, strict=True):
        assert_undisturbed(api, prompt, stream)
    api.set_layout("tp1")
    for prompt, (stream, _) in zip(PROMPTS, streams, strict=True):
        assert_undisturbed(api, prompt, stream)


def test_headers_last_chunks_and_metrics_tell_of_a_switch(api: Api) -> None:
    def switches() -> float:
        return api.metric("dtp_tp_switches_total", from_="tp1", to="tp2", outcome="committed")

    before = switches()
    assert api.metric("dtp_tp_degree") == 1
    # Long enough to be there at the commit, however slowly that comes.
    with api.stream(PROMPTS[0], 200, **SHOWN) as (stream, events):
        next(events)
        switch = api.put_layout("tp2", wait="closed").json()["switch"]
        list(events)
    assert (switch["outcome"], switch["handovers"]) == ("closed", 1)
    assert stream.done
    # Headers leave with the first token; the last chunk says what came after.
    assert stream.headers["x-dynamictp-tp"] == "1"
    served = stream.served
    assert served.pop("domain") != stream.headers["x-dynamictp-domain"]
    assert served == {"tp": 2, "tp_min": 1, "tp_max": 2, "handovers": 1, "recomputes": 0}
    assert api.metric("dtp_tp_degree") == 2
    assert switches() == before + 1
    assert api.metric("dtp_tp_switch_phase_seconds_count", phase="commit") > 0
    assert api.metric("dtp_generation_tokens_total", domain="tp2@0,1") > 0
    with api.stream(PROMPTS[0], 2) as (stream, events):
        list(events)
    assert stream.headers["x-dynamictp-tp"] == "2"
    assert (stream.served["tp_min"], stream.served["tp_max"]) == (2, 2)


def test_show_prints_domains_and_devices(api: Api) -> None:
    api.set_layout("tp1+tp1")
    shown = run_cli("layout", "show", "--url", api.url)
    assert shown.returncode == 0, shown.stderr
    assert "mode static" in shown.stdout
    assert "layout tp1+tp1" in shown.stdout
    state = api.layout()
    assert [domain["state"] for domain in state["domains"]] == ["serving", "serving"]
    for device in state["devices"]:
        assert str(device["pid"]) in shown.stdout
        assert device["domain"] in shown.stdout


def test_one_stream_through_every_layout_of_two_devices(api: Api) -> None:
    with api.stream(PROMPTS[0], ENDLESS, **SHOWN) as (stream, events):
        for layout in ("tp1+tp1", "tp2", "tp1", "tp2"):
            read_tokens(stream, events, 3)
            api.set_layout(layout)
        read_tokens(stream, events, 4)
    assert_undisturbed(api, PROMPTS[0], stream)


def test_a_drain_deadline_lets_a_stream_end_where_it_is(api: Api) -> None:
    with api.stream(PROMPTS[1], 30, **SHOWN) as (stream, events):
        next(events)
        response = api.put_layout("tp2", wait="commit", drain_deadline_s=60)
        assert response.status_code == 200, response.text
        switch = response.json()["switch"]
        assert switch["outcome"] in ("committed", "closed")
        list(events)
    assert (stream.served["tp_max"], stream.served["handovers"]) == (1, 0)
    until(
        lambda: api.http.get(f"/admin/switches/{switch['id']}").json()["switch"]["outcome"] == "closed",
        "the old domain is closed",
    )


def test_setting_the_layout_in_force_changes_nothing(api: Api) -> None:
    domains = [(domain["id"], domain["epoch"]) for domain in api.layout()["domains"]]
    response = api.put_layout("tp1", wait="closed")
    assert (response.status_code, response.json()["switch"]["outcome"]) == (200, "noop")
    assert [(domain["id"], domain["epoch"]) for domain in api.layout()["domains"]] == domains


def test_a_stream_moves_to_the_devices_that_are_named(api: Api) -> None:
    with api.stream(PROMPTS[0], ENDLESS, **SHOWN) as (stream, events):
        for layout, devices in (("tp1@1", [[1]]), ("tp2@1,0", [[1, 0]]), ("demo:tp2@0,1", [[0, 1]])):
            read_tokens(stream, events, 3)
            response = api.put_layout(layout, wait="closed")
            assert (response.status_code, response.json()["switch"]["outcome"]) == (200, "closed")
            until(lambda: [d["devices"] for d in api.layout()["domains"]] == devices, layout)  # noqa: B023
        read_tokens(stream, events, 4)
    assert_undisturbed(api, PROMPTS[0], stream)


def test_without_a_wait_the_switch_is_followed_by_its_id(api: Api) -> None:
    response = api.put_layout("tp2", wait="none")
    assert response.status_code == 202
    path = f"/admin/switches/{response.json()['switch']['id']}"
    until(lambda: api.http.get(path).json()["switch"]["outcome"] == "closed", "the switch is closed")
    switch = api.http.get(path).json()["switch"]
    assert (switch["from"], switch["to"], switch["weight_bytes_copied"]) == ("tp1", "tp2", 0)
    assert {"prepare_views", "prepare_communicator", "proof", "commit"} <= switch["phases_ms"].keys()
    assert switch["first_admitted_ms"] is None
    api.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).raise_for_status()
    admitted_ms = api.http.get(path).json()["switch"]["first_admitted_ms"]
    assert admitted_ms > sum(switch["phases_ms"][phase] for phase in ("proof", "commit", "drain", "close"))
    unknown = api.http.get("/admin/switches/nonsense")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "switch_not_found")


async def test_a_second_switch_meanwhile_is_a_conflict(api: Api) -> None:
    """The window is milliseconds, so pairs are sent until one of them meets inside it."""
    async with httpx.AsyncClient(base_url=api.url, timeout=60) as http:

        async def put(layout: str) -> httpx.Response:
            return await http.put("/admin/layout", json={"layout": layout, "wait": "closed"})

        for _ in range(50):
            pair = await asyncio.gather(put("tp2"), put("tp1+tp1"))
            refused = [response for response in pair if response.status_code == 409]
            if refused:
                break
    assert len(refused) == 1
    body = refused[0].json()
    assert body["error"]["code"] == "switch_conflict"
    accepted = next(response for response in pair if response.status_code == 200)
    assert body["switch"]["id"] == accepted.json()["switch"]["id"]


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ("tp3", "tp3"),
        ("tp1+tp2", "3 devices"),
        ("tp64", "degree"),
        ("tp1pp2", "pp"),
        ("other:tp1", "demo"),
        ("tp0", "tp0"),
        ("", "layout"),
        ("nonsense", "nonsense"),
        ("tp2@1,2", "names device 2"),
        ("tp1@0+tp1", "not placed"),
        ("9999*tp9999", "9999"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_those_that_do(api: Api, layout: str, named: str) -> None:
    response = api.put_layout(layout)
    assert response.status_code == 422
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("layout_error", "layout", "illegal_layout")
    assert named in error["message"]
    assert error["legal_layouts"] == ["tp1", "tp2", "tp1+tp1"]
    assert api.layout()["observed"] == "tp1"


def test_the_command_line_says_which_layouts_are_legal(api: Api) -> None:
    done = run_cli("layout", "set", "tp3", "--url", api.url)
    assert done.returncode == 1
    assert "legal layouts: tp1, tp2, tp1+tp1" in done.stderr
    assert "Traceback" not in done.stderr
