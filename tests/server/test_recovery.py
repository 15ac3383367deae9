"""The engine goes and comes back: requests wait, switches end, silence is noticed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq

from dynamictp.clock import ManualClock, SystemClock
from dynamictp.errors import CapacityError
from dynamictp.messages import (
    CancelRequest,
    EngineReady,
    Outputs,
    SamplingParams,
    SubmitRequest,
    SwitchStatus,
    WorkerGone,
    pack_tokens,
    unpack_tokens,
)
from dynamictp.server import recovery as module
from dynamictp.server.engine_client import EngineClient
from dynamictp.server.metrics import Metrics
from dynamictp.server.recovery import Recovery
from dynamictp.server.sender import Sender
from dynamictp.server.switches import SwitchBoard
from dynamictp.transport import engine_address, memory_link_pair, zmq_link
from tests.server.test_engine_client import SENDER, Pair, Recorder, event


async def test_requests_wait_for_the_next_engine_and_go_on(tmp_path: Path) -> None:
    pair, sink, late = Pair(), Recorder(), Recorder()
    board = SwitchBoard("x")
    recovery = Recovery(pair.client, board.engine_lost, SystemClock(), hang_s=2.0)
    pair.say(EngineReady("tp1", 10, 100))
    pair.submit(sink)
    pair.say(Outputs(tokens=(event(0, 5),)))
    board.on_status(SwitchStatus("s1", "tp1", "tp2", "prepare"))
    board.on_status(SwitchStatus("s0", "tp1", "tp1", "drain", "committed"))
    recovery.engine_lost("gone")
    assert not pair.client.is_ready
    assert (board.get("s1").outcome, board.get("s1").error) == ("failed", "the engine restarted")
    assert board.get("s0").outcome == "closed"
    assert not recovery.send(WorkerGone(0, 1, "it died too"))
    pair.submit(late, request_id="late")
    pair.client.submit("cancelled", pack_tokens([1]), SamplingParams(1, 1), Recorder(), sender=SENDER)
    pair.client.cancel("cancelled")
    context = zmq.Context[zmq.Socket[bytes]]()
    address = engine_address(tmp_path, 2)
    link = zmq_link(context, address, bind=False, incarnation=1)
    recovery.engine_started(link)
    assert recovery.send(WorkerGone(0, 2, "and again"))
    # Only now does the engine listen: nothing is lost.
    engine = zmq_link(context, address, bind=True, incarnation=2)
    heard = []
    while len(heard) < 3:
        assert engine.wait(10.0)
        heard.append(engine.receive())
    first, second, third = heard
    assert isinstance(first, SubmitRequest)
    assert (first.request_id, first.attempt, unpack_tokens(first.tokens)) == ("r", 2, [7, 8, 5])
    assert isinstance(second, SubmitRequest)
    assert second.request_id == "late"
    assert third == WorkerGone(0, 2, "and again")
    pair.client.detach()
    for end in (link, engine):
        end.close()
    context.term()


async def test_the_layout_to_begin_with_is_the_last_committed_one() -> None:
    pair = Pair()
    recovery = Recovery(pair.client, SwitchBoard("x").engine_lost, SystemClock(), hang_s=2.0)
    pair.say(EngineReady("tp1", 10, 100))
    assert recovery.layout == "tp1"
    pair.engine.send(SwitchStatus("s1", "tp1", "tp2", "prepare"))
    pair.engine.send(SwitchStatus("s2", "tp1", "3*tp1", "commit", "committed"))
    pair.engine.send(SwitchStatus("s0", "tp3", "tp2", "close", "closed"))
    pair.client._link._drain()
    assert recovery.layout == "3*tp1"


async def test_an_engine_that_is_silent_is_killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.0)
    clock = ManualClock(100.0)
    client = EngineClient(clock, Metrics(), on_switch=lambda status: None)
    recovery = Recovery(client, SwitchBoard("x").engine_lost, clock, hang_s=2.0)
    killed: list[str] = []
    watching = asyncio.create_task(recovery.watch(killed.append))

    async def let_pass(seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            clock.advance(0.25)
            for _ in range(3):
                await asyncio.sleep(0)

    left, engine = memory_link_pair(on_left=client.wake)
    client.attach(left)
    engine.send(EngineReady("tp1", 10, 100))
    await let_pass(3.5)
    assert killed == []
    await let_pass(2.0)
    assert len(killed) == 1
    recovery.engine_lost("killed")
    await let_pass(60.0)
    assert len(killed) == 1
    # This process itself was stopped for an hour.
    left, engine = memory_link_pair(on_left=client.wake)
    client.attach(left)
    recovery._away = False
    engine.send(EngineReady("tp1", 10, 100))
    await let_pass(1.0)
    clock.advance(3600.0)
    await let_pass(1.0)
    assert len(killed) == 1
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_an_engine_without_a_core_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.0)
    clock = ManualClock(100.0)
    client = EngineClient(clock, Metrics(), on_switch=lambda status: None)
    waited = [7.0]
    recovery = Recovery(
        client, SwitchBoard("x").engine_lost, clock, hang_s=2.0, core_wait_s=lambda: waited[0]
    )
    killed: list[str] = []
    watching = asyncio.create_task(recovery.watch(killed.append))

    async def let_pass(seconds: float, share: float) -> None:
        for _ in range(int(seconds / 0.25)):
            clock.advance(0.25)
            waited[0] += share * 0.25
            for _ in range(3):
                await asyncio.sleep(0)

    left, engine = memory_link_pair(on_left=client.wake)
    client.attach(left)
    engine.send(EngineReady("tp1", 10, 100))
    await let_pass(40.0, 1.0)
    assert killed == []
    await let_pass(5.0, 0.0)
    assert len(killed) == 1
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_deadlines_pass_while_the_engine_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.0)
    clock = ManualClock(100.0)
    client = EngineClient(clock, Metrics(), on_switch=lambda status: None)
    recovery = Recovery(client, SwitchBoard("x").engine_lost, clock, hang_s=2.0)
    watching = asyncio.create_task(recovery.watch(lambda reason: None))
    soon, later, patient = Recorder(), Recorder(), Recorder()

    async def pass_to(time_s: float) -> None:
        clock.advance(time_s - clock.now())
        for _ in range(3):
            await asyncio.sleep(0)

    left, engine = memory_link_pair(on_left=client.wake)
    client.attach(left)
    engine.send(EngineReady("tp1", 10, 100))
    await client.wait_ready()
    for name, sink, deadline_s in (
        ("soon", soon, 101.0),
        ("later", later, 103.0),
        ("patient", patient, None),
    ):
        sender = Sender(100.0, deadline_s=deadline_s)
        client.submit(name, pack_tokens([1]), SamplingParams(1, 1), sink, sender=sender)
    await pass_to(101.0)
    assert soon.end is None  # a matter of the engine's
    recovery.engine_lost("gone")
    await pass_to(101.25)
    assert soon.end is not None
    assert (soon.end.reason, soon.end.status) == ("error", 504)
    # The next one is there, but does not serve yet: it is told.
    left, engine = memory_link_pair(on_left=client.wake)
    client.attach(left)
    client.resubmit_all()
    await pass_to(103.0)
    assert later.end == soon.end
    assert patient.end is None
    heard = []
    while (body := engine.receive()) is not None:
        heard.append(
            (type(body), body.request_id) if isinstance(body, (SubmitRequest, CancelRequest)) else body
        )
    assert heard == [(SubmitRequest, "later"), (SubmitRequest, "patient"), (CancelRequest, "later")]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_closed_admission_lets_what_runs_finish() -> None:
    pair, sink = Pair(), Recorder()
    pair.say(EngineReady("tp1", 10, 100))
    pair.submit(sink)
    pair.client.close_admission("stopping")
    with pytest.raises(CapacityError, match="stopping") as refused:
        pair.client.check_room(SENDER, (1,))
    assert refused.value.status == 503
    idle = asyncio.create_task(pair.client.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    pair.client.cancel("r")
    await idle
    assert sink.end is None
    assert [type(body) for body in pair.heard()] == [SubmitRequest, CancelRequest]
