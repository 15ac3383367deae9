"""The client against scripted peers: exact stamps, every way to fail, and no omission."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import pytest

from dynamictp.bench.client import Client, apportion, run_lowered
from dynamictp.bench.exchange import Origin
from dynamictp.bench.player import run_schedule
from dynamictp.bench.result import FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.clock import ManualClock, SystemClock
from tests.bench.scripted_server import Peer, scripted


class WatchedClock(ManualClock):
    """Tells when it is read. A client reads it once per arrival, so a peer can wait for bytes to land."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.read = asyncio.Event()

    def now(self) -> float:
        self.read.set()
        return super().now()


async def send(peer_url: str, request: Request | None = None, timeout_s: float = 30.0) -> Result:
    client = Client(peer_url, "m", timeout_s=timeout_s, return_token_ids=True)
    return await client.send(request or Request(0.0, "hello", 5), intended_s=SystemClock().now())


async def test_stamps_are_exact_on_an_injected_clock() -> None:
    clock = WatchedClock()

    async def script(peer: Peer) -> None:
        async def after(seconds: float, *ids: int, finish: str | None = None) -> None:
            clock.advance(seconds)
            clock.read.clear()
            await peer.tokens(*ids, finish=finish)
            await clock.read.wait()

        clock.read.clear()
        await peer.head(x_dynamictp_tp="2", x_dynamictp_domain="d7", x_request_id="r1")
        await clock.read.wait()
        await after(0.5, 11)
        await after(0.25, 12, 13)
        await after(1.0, 14, finish="length")
        await peer.usage(4, dynamictp={"choices": [{"domain": "d7", "tp": 2, "handovers": 1}]})
        await peer.end()

    async with scripted(script) as server:
        client = Client(server.url, "m", clock=clock, return_token_ids=True)
        seen = await client.send(Request(0.0, "hello", 4), intended_s=98.0)

    assert seen.failure is None
    assert (seen.intended_s, seen.sent_s) == (98.0, 100.0)
    assert seen.chunk_s == (100.5, 100.75, 101.75)
    assert seen.chunk_tokens == (1, 2, 1)
    assert (seen.ttft_s, seen.ttft_from_sent_s, seen.tpot_s) == (2.5, 0.5, 1.25 / 3)
    assert seen.token_ids == (11, 12, 13, 14)
    assert seen.text == " t11 t12 t13 t14"
    assert (seen.prompt_tokens, seen.completion_tokens, seen.finish_reason) == (3, 4, "length")
    assert (seen.tp, seen.domain, seen.request_id) == (2, "d7", "r1")
    assert seen.count_of("handovers") == 1


async def test_the_request_on_the_wire() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.tokens(1, finish="stop")
        await peer.end()

    async with scripted(script) as server:
        client = Client(server.url + "/base", "m", api_key="k")
        await client.send(Request(0.0, "hi", 5, endpoint="chat"), intended_s=0.0)
    (peer,) = server.requests
    assert peer.path == "/base/v1/chat/completions"
    assert peer.headers["authorization"] == "bearer k"
    assert peer.body["messages"] == [{"role": "user", "content": "hi"}]
    assert peer.body["stream_options"] == {"include_usage": True}


async def test_chat_chunks_and_running_usage_without_token_ids() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await peer.event({"choices": [{"delta": {"content": "a b"}}], "usage": {"completion_tokens": 2}})
        await peer.event({"choices": [{"delta": {"content": " c"}}], "usage": {"completion_tokens": 3}})
        await peer.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await peer.end()

    async with scripted(script) as server:
        seen = await send(server.url, Request(0.0, "hi", 5, endpoint="chat"))
    assert seen.failure is None
    assert seen.text == "a b c"
    assert seen.chunk_tokens == (2, 1)


async def test_usage_spreads_over_the_chunks_of_a_server_that_counts_only_at_the_end() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        for text in ("abcdef", "ab", "abcd"):
            await peer.event({"choices": [{"delta": {"content": text}}]})
        await peer.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        await peer.usage(9)
        await peer.end()

    async with scripted(script) as server:
        seen = await send(server.url, Request(0.0, "hi", 9, endpoint="chat"))
    assert seen.failure is None
    assert seen.chunk_tokens == (4, 2, 3)


async def test_the_end_of_the_sequence_is_not_spread() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.event({"choices": [{"delta": {"content": "a"}}]})
        await peer.event({"choices": [{"delta": {"reasoning_content": "b"}, "finish_reason": "stop"}]})
        await peer.usage(3)
        await peer.end()

    async with scripted(script) as server:
        seen = await send(server.url, Request(0.0, "hi", 9, endpoint="chat"))
    assert (seen.chunk_tokens, seen.text, seen.output_tokens) == ((1, 1), "ab", 3)


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [(3, [5, 1, 1], [1, 1, 1]), (10, [1, 1], [5, 5]), (7, [10, 0, 5], [4, 1, 2]), (4, [0, 0], [2, 2])],
)
def test_tokens_are_apportioned_by_text(total: int, weights: list[int], shares: list[int]) -> None:
    assert apportion(total, weights) == shares


async def test_what_runs_at_the_end_of_the_run_is_cut_and_keeps_its_tokens() -> None:
    left = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.tokens(1)
        with suppress(ConnectionError):
            await peer.reader.read()
        left.set()

    clock = SystemClock()
    async with scripted(script) as server:
        client = Client(server.url, "m", clock=clock, timeout_s=30.0, cut_s=clock.now() + 0.2)
        seen = await client.send(Request(0.0, "hello", 5), intended_s=clock.now())
        await left.wait()
        after = await client.send(Request(0.0, "too late", 5), intended_s=clock.now())
    assert len(server.requests) == 1
    assert seen.cut
    assert seen.output_tokens == 1
    assert after.cut


async def test_tenants_use_their_own_keys() -> None:
    async def script(peer: Peer) -> None:
        await peer.json({"error": {"message": "seen"}}, status=400)

    async with scripted(script) as server:
        client = Client(server.url, "m", api_key="all", tenant_keys={"gold": "au"})
        for tenant in ("gold", "other"):
            await client.send(Request(0.0, "x", 1, tenant=tenant), intended_s=0.0)
    assert [peer.headers["authorization"] for peer in server.requests] == ["bearer au", "bearer all"]


async def test_a_refusal_keeps_status_and_message() -> None:
    async def script(peer: Peer) -> None:
        await peer.json({"error": {"message": "no room", "type": "capacity"}}, status=503)

    async with scripted(script) as server:
        seen = await send(server.url)
    assert seen.failure is not None
    assert (seen.failure.kind, seen.failure.status, seen.failure.message) == ("refused", 503, "no room")


async def test_an_error_event_in_mid_stream_is_a_failure_that_keeps_its_tokens() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.tokens(1)
        await peer.event({"error": {"message": "domain lost", "code": 500}})
        await peer.end()

    async with scripted(script) as server:
        seen = await send(server.url)
    assert seen.failure is not None
    assert (seen.failure.kind, seen.failure.message) == (FailureKind.STREAM, "domain lost")
    assert seen.token_ids == (1,)


async def test_streams_that_just_end_are_truncated() -> None:
    async def closed(peer: Peer) -> None:
        await peer.head()
        await peer.tokens(1)

    async def no_done(peer: Peer) -> None:
        await closed(peer)
        await peer.raw(b"0\r\n\r\n")

    async def only_finish(peer: Peer) -> None:
        await peer.head()
        await peer.tokens(1, finish="stop")
        await peer.raw(b"0\r\n\r\n")

    async with scripted(only_finish) as server:
        assert (await send(server.url)).failure is None

    async def no_finish(peer: Peer) -> None:
        await closed(peer)
        await peer.end()

    for script in (closed, no_done, no_finish):
        async with scripted(script) as server:
            seen = await send(server.url)
        assert seen.failure is not None, script.__name__
        assert seen.failure.kind is FailureKind.TRUNCATED, script.__name__


async def test_token_ids_that_contradict_the_usage_are_a_failure() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.tokens(1, 2, finish="length")
        await peer.usage(5)
        await peer.end()

    async with scripted(script) as server:
        seen = await send(server.url)
    assert seen.failure is not None
    assert seen.failure.kind is FailureKind.PROTOCOL


@pytest.mark.parametrize("event", ["{not json", '{"choices": 3}', '"text"', '{"choices": [null]}'])
async def test_unreadable_events_are_a_failure(event: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.event(event)
        await peer.end()

    async with scripted(script) as server:
        seen = await send(server.url)
    assert seen.failure is not None
    assert seen.failure.kind is FailureKind.PROTOCOL


async def test_a_server_that_never_answers_times_out_and_sees_the_client_leave() -> None:
    left = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.tokens(1)
        with suppress(ConnectionError):
            await peer.reader.read()  # ends when the client closes
        left.set()

    async with scripted(script) as server:
        seen = await send(server.url, timeout_s=0.1)
        await left.wait()
    assert seen.failure is not None
    assert seen.failure.kind is FailureKind.TIMEOUT
    assert seen.token_ids == (1,)


async def test_no_server_is_a_connection_failure() -> None:
    async with scripted(lambda _peer: asyncio.sleep(0)) as server:
        url = server.url
    seen = await send(url)
    assert seen.failure is not None
    assert seen.failure.kind is FailureKind.CONNECTION


async def test_the_schedule_goes_on_while_the_server_stalls() -> None:
    """Open loop: every request is sent though none is answered, and the stall is in every TTFT."""
    clock = ManualClock(50.0)
    everyone = asyncio.Event()
    arrived = 0

    async def script(peer: Peer) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 4:
            clock.advance(10.0)
            everyone.set()
        await everyone.wait()
        await peer.head()
        await peer.tokens(1, finish="stop")
        await peer.end()

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        await asyncio.sleep(0)

    schedule = [Request(float(i), f"p{i}", 5) for i in (3, 0, 2, 1)]
    async with scripted(script) as server:
        client = Client(server.url, "m", clock=clock)
        results = await run_schedule(schedule, client, clock, sleep=sleep)
    assert [r.request.intended_s for r in results] == [0.0, 1.0, 2.0, 3.0]
    assert [r.intended_s for r in results] == [50.0, 51.0, 52.0, 53.0]
    assert [r.ttft_s for r in results] == [13.0, 12.0, 11.0, 10.0]


async def test_a_client_that_wakes_late_charges_the_delay_to_the_request() -> None:
    clock = ManualClock()

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.tokens(1, finish="stop")
        await peer.end()

    async def oversleep(seconds: float) -> None:
        clock.advance(seconds + 3.0)
        await asyncio.sleep(0)

    async with scripted(script) as server:
        client = Client(server.url, "m", clock=clock)
        (seen,) = await run_schedule([Request(1.0, "p", 5)], client, clock, sleep=oversleep)
    assert (seen.intended_s, seen.sent_s) == (1.0, 4.0)
    assert (seen.ttft_s, seen.ttft_from_sent_s) == (3.0, 0.0)


def test_origins() -> None:
    assert Origin.parse("http://h:8000/v/") == Origin("h", 8000, False, "/v")
    assert Origin.parse("https://[::1]") == Origin("::1", 443, True, "")
    assert b"host: [::1]:443\r\n" in Origin("::1", 443).post("/p", {}, b"")
    for bad in ("h:8000", "ftp://h", "http://"):
        with pytest.raises(ValueError, match="expected http"):
            Origin.parse(bad)


def test_only_the_load_thread_is_lowered_and_its_errors_come_back() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)

    async def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    async def fail() -> None:
        raise LookupError("from the load")

    assert run_lowered(priority, niceness=3) == min(own + 3, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    with pytest.raises(LookupError, match="from the load"):
        run_lowered(fail)
