"""The engine as a process, over sockets and shared memory, with fake workers on the other ends."""

from __future__ import annotations

import math
import mmap
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from dynamictp.messages import (
    Body,
    EngineReady,
    EngineStart,
    Outputs,
    SamplingParams,
    SetLayout,
    Shutdown,
    Snapshot,
    SubmitRequest,
    SwitchStatus,
    WorkerGone,
    WorkerHello,
    WorkerStarted,
)
from dynamictp.testing.fake_worker import FakeArena, FakeCluster, reference_tokens
from dynamictp.transport import ZmqLink, engine_address, worker_address, zmq_link
from dynamictp.worker.comm.control import bytes_needed, open_control
from tests.engine.engine_simulation import HEADS, PAGE, VOCAB, engine_start

pytestmark = pytest.mark.multi


class EngineProcess:
    """An engine process, with this process as its server and its workers."""

    def __init__(self, start: EngineStart, folder: Path) -> None:
        self.start = start
        self._folder = folder
        self.seen: list[Body] = []
        self._context = zmq.Context[zmq.Socket[bytes]](1)
        address = engine_address(folder, start.incarnation)
        self._server = zmq_link(self._context, address, bind=False, incarnation=1)
        size = bytes_needed(start.comm_slots, start.devices)
        self._control = os.memfd_create("control")
        os.ftruncate(self._control, size)
        file = folder / "engine.json"
        file.write_bytes(msgspec.json.encode(start))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "dynamictp.engine", "--start", str(file)),
                *("--sockets", str(folder), "--control-fd", str(self._control)),
            ],
            pass_fds=(self._control,),
            env={**os.environ, "DYNAMICTP_CHECK": "1"},
        )
        self._workers: list[ZmqLink] = []
        self.cluster = FakeCluster(start.devices, FakeArena(start.arena.pages, PAGE, HEADS), VOCAB)
        self._poller = zmq.Poller()
        self._poller.register(self._server.socket, zmq.POLLIN)
        for device in range(start.devices):
            self._workers.append(self._connect(device, 1))

    def _connect(self, device: int, incarnation: int) -> ZmqLink:
        """One life of a worker."""
        address = worker_address(self._folder, device, incarnation, self.start.incarnation)
        link = zmq_link(self._context, address, bind=False, incarnation=incarnation)
        link.send(WorkerHello(device, incarnation, 1))
        self._poller.register(link.socket, zmq.POLLIN)
        return link

    def replace_worker(self, device: int) -> None:
        """A worker dies and its next life begins, as a supervisor tells it."""
        before = self.cluster.workers[device].incarnation
        incarnation = self.cluster.replace(device).incarnation
        self._poller.unregister(self._workers[device].socket)
        self._workers[device].close()
        self.send(WorkerGone(device, before, "exit code -9"))
        self.send(WorkerStarted(device, incarnation))
        self._workers[device] = self._connect(device, incarnation)

    def send(self, body: Body) -> None:
        self._server.send(body)

    def run(self, until: Callable[[], bool]) -> None:
        """Play the workers until the condition holds."""
        while not until():
            assert self._poller.poll(math.ceil(20e3)), "the engine says nothing any more"
            for device, link in enumerate(self._workers):
                while (body := link.receive()) is not None:
                    self.cluster.deliver(device, body)
            while jobs := self.cluster.startable():
                for job in jobs:
                    self.cluster.begin(job)
                    for device, answer in self.cluster.finish(job, 0.001):
                        self._workers[device].send(answer)
            while (body := self._server.receive()) is not None:
                self.seen.append(body)

    def tokens(self, request_id: str) -> list[int]:
        outputs = [body for body in self.seen if isinstance(body, Outputs)]
        return [event.token for out in outputs for event in out.tokens if event.request_id == request_id]

    def ended(self) -> set[str]:
        return {end.request_id for body in self.seen if isinstance(body, Outputs) for end in body.ends}

    def control_words(self) -> list[tuple[int, int]]:
        block = open_control(mmap.mmap(self._control, 0), self.start.comm_slots, self.start.devices)
        return [block.control(slot) for slot in range(self.start.comm_slots)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._control)
        self._context.destroy(linger=0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(engine_start(devices=2, legal_degrees=(1, 2)), tmp_path)
    yield process
    process.close()


def submit(engine: EngineProcess, name: str, prompt: list[int], count: int) -> list[int]:
    """Returns what must come out."""
    tokens = array("I", prompt).tobytes()
    engine.send(SubmitRequest(name, 1, tokens, len(prompt), SamplingParams(3, count), 0.0))
    return reference_tokens(prompt, 3, count, heads=HEADS, vocab=VOCAB)


def test_streams_and_switches_over_sockets(engine: EngineProcess) -> None:
    engine.run(lambda: any(isinstance(body, EngineReady) for body in engine.seen))
    assert os.getpriority(os.PRIO_PROCESS, engine.process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5
    expected = {f"r{n}": submit(engine, f"r{n}", [n, 7, 8], 60) for n in range(4)}
    engine.run(lambda: len(engine.tokens("r0")) > 5)
    engine.send(SetLayout("s1", "tp2"))
    engine.run(lambda: any(isinstance(b, SwitchStatus) and b.outcome == "closed" for b in engine.seen))
    assert (2, 1) in engine.control_words()
    engine.run(lambda: engine.ended() == set(expected))
    for name, tokens in expected.items():
        assert engine.tokens(name) == tokens
    snapshots = [body for body in engine.seen if isinstance(body, Snapshot)]
    assert snapshots[-1].layout == "tp2"
    engine.send(Shutdown())
    assert engine.process.wait(20) == 0


def test_a_worker_s_next_life_has_a_link_of_its_own(engine: EngineProcess) -> None:
    engine.run(lambda: any(isinstance(body, EngineReady) for body in engine.seen))
    expected = {f"r{n}": submit(engine, f"r{n}", [n, 7, 8], 60) for n in range(4)}
    for _ in range(3):
        before = len(engine.tokens("r0"))
        engine.run(lambda: len(engine.tokens("r0")) > before + 5)  # noqa: B023
        engine.replace_worker(0)
    engine.run(lambda: engine.ended() == set(expected))
    for name, tokens in expected.items():
        assert engine.tokens(name) == tokens
    assert engine.process.poll() is None


def test_sigint_is_left_to_the_supervisor_and_sigterm_ends_the_engine(engine: EngineProcess) -> None:
    engine.run(lambda: any(isinstance(body, EngineReady) for body in engine.seen))
    engine.process.send_signal(signal.SIGINT)
    expected = submit(engine, "r", [1], 5)
    engine.run(lambda: engine.tokens("r") == expected)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(20) == 0


def test_a_layout_that_can_not_be_ends_the_engine_with_its_exit_code(tmp_path: Path) -> None:
    engine = EngineProcess(engine_start(devices=2, layout="2*tp1", comm_slots=1), tmp_path)
    assert engine.process.wait(20) == 2
    engine.close()
