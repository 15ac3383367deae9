"""Exactly-once tokens, engine restarts, lost links, and the ZeroMQ socket in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.clock import ManualClock, SystemClock
from dynamictp.errors import CapacityError
from dynamictp.messages import (
    CancelRequest,
    DomainStatus,
    EngineReady,
    Outputs,
    PromptLogprobs,
    RequestEnd,
    SamplingParams,
    ServedBy,
    Snapshot,
    SubmitRequest,
    TokenEvent,
    pack_tokens,
    unpack_tokens,
)
from dynamictp.server.engine_client import EngineClient
from dynamictp.server.live_request import Ended
from dynamictp.server.metrics import Metrics
from dynamictp.server.sender import Sender
from dynamictp.testing.fake_engine import FakeEngine, counting
from dynamictp.transport import MemoryLink, memory_link_pair, zmq_link

SERVED = ServedBy("d1", 1, 1, 1)


class Recorder:
    """A sink that keeps what it gets, and may want to stop."""

    def __init__(self, stop_after: int = 1 << 30) -> None:
        self.tokens: list[int] = []
        self.served: list[ServedBy] = []
        self.end: Ended | None = None
        self.ended = asyncio.Event()
        self._stop_after = stop_after

    def on_token(self, event: TokenEvent) -> bool:
        self.tokens.append(event.token)
        self.served.append(event.served)
        return len(self.tokens) >= self._stop_after

    def on_prompt_logprobs(self, part: PromptLogprobs) -> None:
        raise AssertionError("not asked for")

    def on_end(self, end: Ended) -> None:
        assert self.end is None
        self.end = end
        self.ended.set()


SENDER = Sender(0.0)


def make_client() -> EngineClient:
    return EngineClient(ManualClock(), Metrics(), on_switch=lambda status: None)


def event(position: int, token: int | None = None, attempt: int = 1, request_id: str = "r") -> TokenEvent:
    return TokenEvent(request_id, attempt, position, position if token is None else token, SERVED)


class Pair:
    """A client on a memory link whose far end the test plays."""

    def __init__(self) -> None:
        self.client = make_client()
        left, self.engine = memory_link_pair()
        self.client.attach(left)

    def say(self, *bodies: Outputs | EngineReady | Snapshot) -> None:
        for body in bodies:
            self.engine.send(body)
        self.client._link._drain()

    def heard(self) -> Iterator[object]:
        while (body := self.engine.receive()) is not None:
            yield body

    def submit(self, sink: Recorder, max_tokens: int = 10, request_id: str = "r") -> None:
        self.client.submit(
            request_id,
            pack_tokens([7, 8]),
            SamplingParams(1, max_tokens, stop_ids=(99,)),
            sink,
            sender=SENDER,
        )


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 2), st.sampled_from("rx")), max_size=40),
)
def test_each_token_counts_once_and_in_order(arrivals: list[tuple[int, int, str]]) -> None:
    async def run() -> None:
        pair, sink = Pair(), Recorder()
        pair.submit(sink)
        for position, attempt, request_id in arrivals:
            pair.say(Outputs(tokens=(event(position, position, attempt, request_id),)))
        expected = 0
        for position, attempt, request_id in arrivals:
            expected += (position, attempt, request_id) == (expected, 1, "r")
        assert sink.tokens == list(range(expected))
        assert pair.client.dropped_events == len(arrivals) - expected

    asyncio.run(run())


async def test_a_sink_that_has_enough_is_cancelled_and_late_tokens_are_dropped() -> None:
    pair, sink = Pair(), Recorder(stop_after=2)
    pair.submit(sink)
    pair.say(Outputs(tokens=tuple(event(position) for position in range(4))))
    assert sink.tokens == [0, 1]
    assert [type(body) for body in pair.heard()] == [SubmitRequest, CancelRequest]
    pair.say(Outputs(ends=(RequestEnd("r", 1, "cancelled", 4),)))
    assert sink.end is None
    assert pair.client.dropped_events == 2
    assert pair.client.live == 0


async def test_an_end_that_claims_more_tokens_than_arrived_is_an_error() -> None:
    pair, sink = Pair(), Recorder()
    pair.submit(sink)
    pair.say(Outputs(tokens=(event(0), event(2)), ends=(RequestEnd("r", 1, "length", 3),)))
    assert sink.end is not None
    assert sink.end.reason == "error"


async def test_resubmission_carries_what_was_emitted() -> None:
    pair, sink, full, stopped = Pair(), Recorder(), Recorder(), Recorder()
    pair.submit(sink)
    pair.submit(full, max_tokens=1, request_id="full")
    pair.submit(stopped, request_id="stopped")
    pair.say(
        Outputs(
            tokens=(
                event(0, 5),
                event(1, 6),
                event(0, 5, request_id="full"),
                event(0, 99, request_id="stopped"),
            )
        )
    )
    pair.client.detach()
    left, engine = memory_link_pair()
    pair.client.attach(left)
    pair.client.resubmit_all()
    pair.engine = engine
    (again,) = pair.heard()
    assert isinstance(again, SubmitRequest)
    assert (again.request_id, again.attempt, again.prompt_len) == ("r", 2, 2)
    assert unpack_tokens(again.tokens) == [7, 8, 5, 6]
    # These two had all their tokens before the engine went: only the end was missing.
    assert full.end == Ended("length")
    assert stopped.end == Ended("stop")
    pair.say(Outputs(tokens=(event(2, 50, attempt=1), event(2, 51, attempt=2))))
    assert sink.tokens == [5, 6, 51]
    live = pair.client._live["r"]
    assert live.past is not None
    assert live.past.recomputes == 1


async def test_log_probabilities_of_a_prompt_are_asked_for_again_until_the_first_token() -> None:
    pair, sampling = Pair(), SamplingParams(1, 10, prompt_logprobs=3)
    pair.client.submit("r", pack_tokens([7, 8]), sampling, Recorder(), sender=SENDER)
    pair.client.resubmit_all()
    pair.say(Outputs(tokens=(event(0, 5, attempt=2),)))
    pair.client.resubmit_all()
    sent = [body.sampling for body in pair.heard() if isinstance(body, SubmitRequest)]
    assert sent == [sampling, sampling, SamplingParams(1, 10)]


async def test_requests_wait_while_the_engine_is_away() -> None:
    pair, sink = Pair(), Recorder()
    pair.say(EngineReady("tp1", 10, 100))
    assert pair.client.is_ready
    pair.client.detach()
    assert not pair.client.is_ready
    pair.client.check_room(SENDER, (1,))
    pair.submit(sink)
    left, pair.engine = memory_link_pair()
    pair.client.attach(left)
    pair.client.resubmit_all()
    assert [type(body) for body in pair.heard()] == [SubmitRequest]


async def test_a_failed_engine_ends_every_request() -> None:
    pair, sink = Pair(), Recorder()
    with pytest.raises(CapacityError, match="loading"):
        pair.client.check_room(SENDER, (1,))
    pair.say(EngineReady("tp1", 10, 100))
    pair.submit(sink)
    pair.client.fail_all("gone")
    assert sink.end is not None
    assert (sink.end.reason, sink.end.status) == ("error", 503)
    with pytest.raises(CapacityError, match="gone"):
        pair.client.check_room(SENDER, (1,))


async def test_a_gap_in_the_sequence_loses_the_link_and_says_so() -> None:
    pair = Pair()
    lost: list[str] = []
    pair.client.on_link_lost = lost.append
    pair.engine.encode(Outputs())
    pair.say(Outputs())
    assert len(lost) == 1
    assert not pair.client.send(CancelRequest("x", 1))


async def test_a_sink_that_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def on_token(self, event: TokenEvent) -> bool:
            raise RuntimeError("bug")

    pair, broken, sink = Pair(), Broken(), Recorder()
    pair.submit(broken, request_id="broken")
    pair.submit(sink)
    pair.say(Outputs(tokens=(event(0, request_id="broken"), event(0))))
    assert sink.tokens == [0]
    assert broken.end is not None
    assert broken.end.reason == "error"
    assert "could not be handled" in caplog.text


async def test_a_message_that_can_not_be_handled_does_not_hold_up_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair, sink = Pair(), Recorder()
    pair.submit(sink)
    impossible = DomainStatus("d1", 1, "", 2, 1, (0,), "serving")
    pair.say(
        Snapshot(0.0, "tp2", 0, 0, 0, (impossible,), (), 0, 0, 0),
        Outputs(tokens=(event(0),)),
    )
    assert sink.tokens == [0]
    assert "could not be handled" in caplog.text


async def test_many_messages_leave_room_for_other_tasks() -> None:
    pair, sink = Pair(), Recorder()
    pair.submit(sink, max_tokens=1000)
    for position in range(500):
        pair.engine.send(Outputs(tokens=(event(position),)))
    pair.client._link._drain()
    assert 0 < len(sink.tokens) < 500
    while len(sink.tokens) < 500:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_wake_from_another_thread() -> None:
    client = make_client()
    left, right = memory_link_pair(on_left=client.wake)
    client.attach(left)

    def engine(link: MemoryLink) -> None:
        link.send(EngineReady("tp1", 10, 100))

    thread = threading.Thread(target=engine, args=(right,))
    thread.start()
    async with asyncio.timeout(5):
        assert (await client.wait_ready()).max_model_len == 100
    thread.join()


async def test_over_zeromq_nothing_is_missed(tmp_path: Path) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    client = EngineClient(SystemClock(), Metrics(), on_switch=lambda status: None)
    address = f"ipc://{tmp_path}/engine.sock"
    link = zmq_link(context, address, bind=True, incarnation=1)
    far = zmq_link(context, address, bind=False, incarnation=1)
    engine, stop = FakeEngine(far, counting(260)), threading.Event()
    thread = threading.Thread(target=engine.run, args=(stop,))
    client.attach(link)
    thread.start()
    try:
        async with asyncio.timeout(20):
            await client.wait_ready()
            sinks = {f"r{i}": Recorder() for i in range(40)}
            for request_id, sink in sinks.items():
                client.submit(request_id, pack_tokens([1]), SamplingParams(3, 50), sink, sender=SENDER)
                await asyncio.sleep(0)
            for sink in sinks.values():
                await sink.ended.wait()
                assert sink.end == Ended("length")
                assert sink.tokens == [counting(260)([1], SamplingParams(3, 50), p) for p in range(50)]
    finally:
        stop.set()
        thread.join()
        client.detach()
        link.close()
        far.close()
        context.term()


async def test_a_vanished_peer_never_blocks_the_event_loop(tmp_path: Path) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    client = make_client()
    lost: list[str] = []
    client.on_link_lost = lost.append
    link = zmq_link(context, f"ipc://{tmp_path}/engine.sock", bind=True, incarnation=1)
    client.attach(link)
    client.submit("r", pack_tokens([1]), SamplingParams(1, 1), Recorder(), sender=SENDER)
    assert len(lost) == 1
    assert client.live == 1
    link.close()
    context.term()
