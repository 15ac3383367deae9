"""Real worker processes over shared memory: the same bits as threads, slots given from degree to degree."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
import zmq

from dynamictp import native
from dynamictp.messages import (
    ArenaFacts,
    Body,
    CloseDomain,
    CommHandle,
    DomainBroken,
    DomainOpened,
    DomainProven,
    NewRow,
    OpenDomain,
    ProveDomain,
    RowStep,
    StepPlan,
    StepResult,
    WorkerHello,
)
from dynamictp.testing.harness import TINY, LockstepNode, random_weights
from dynamictp.transport import ZmqLink, worker_address, zmq_link
from dynamictp.worker.comm.control import ControlState, WorkerState, bytes_needed, open_control
from dynamictp.worker.comm.shm import create_shared
from dynamictp.worker.orders import Begin, Connect, Go, Order, encode_order
from dynamictp.worker.start import WorkerStart, exchange_slot_bytes
from tests.harness.conversation import Request, make_blocks, random_prompt, run

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(native.load() is None, reason="communicators need the native extension"),
]

DEVICES, SLOTS, BLOCKS, MAX_TOKENS, MAX_ROWS = 3, 2, 16, 64, 8
ANSWER_S = 60.0


class Node:
    """The memory and the processes that a supervisor would own, and the engine's ends of the links."""

    def __init__(self, folder: Path) -> None:
        self.index, self.weights = random_weights(TINY, 0, "bf16")
        self.arena = arena = ArenaFacts(BLOCKS * TINY.kv_heads, 16, "bf16")
        page_bytes = 2 * TINY.layers * 16 * TINY.head_dim * 2
        sizes = {
            "weights": self.index.total_bytes,
            "arena": arena.pages * page_bytes,
            "exchange": SLOTS * exchange_slot_bytes(TINY, "bf16", MAX_TOKENS, MAX_ROWS, DEVICES),
            "control": bytes_needed(SLOTS, DEVICES),
        }
        self.fds = {name: create_shared(name, size) for name, size in sizes.items()}
        with mmap.mmap(self.fds["weights"], 0) as mapping:
            mapping[: self.index.total_bytes] = self.weights.tobytes()
        self.control = open_control(mmap.mmap(self.fds["control"], 0), SLOTS, DEVICES)
        self.context = zmq.Context[zmq.Socket[bytes]](1)
        self.links: list[ZmqLink] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.orders: list[int] = []
        for device in range(DEVICES):
            self._begin(folder, device)

    def start(self, device: int, incarnation: int = 1) -> WorkerStart:
        return WorkerStart(
            facts=TINY,
            dtype="bf16",
            index=self.index,
            arena=self.arena,
            device=device,
            devices=DEVICES,
            incarnation=incarnation,
            cores=(),
            max_tokens=MAX_TOKENS,
            max_rows=MAX_ROWS,
            comm_slots=SLOTS,
            deadline_s=30.0,
            spin=0,
        )

    def spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        """A process without orders, and the pipe for them."""
        theirs, ours = os.pipe()
        descriptors = {**self.fds, "orders": theirs}
        arguments = [f"--{name}-fd={fd}" for name, fd in descriptors.items()]
        command = [sys.executable, "-m", "dynamictp.worker"]
        process = subprocess.Popen([*command, *arguments], pass_fds=tuple(descriptors.values()))
        os.close(theirs)
        return process, ours

    def _begin(self, folder: Path, device: int) -> None:
        file = folder / f"worker-{device}.json"
        file.write_bytes(msgspec.json.encode(self.start(device)))
        address = worker_address(folder, device, 1, 1)
        self.links.append(zmq_link(self.context, address, bind=True, incarnation=1))
        process, orders = self.spawn()
        self.processes.append(process)
        self.orders.append(orders)
        self.order(device, Begin(str(file), address))

    def order(self, device: int, order: Order) -> None:
        os.write(self.orders[device], encode_order(order))

    def release(self) -> None:
        """The weights are there."""
        for device in range(DEVICES):
            self.order(device, Go())

    def answers(self, device: int) -> Body:
        link = self.links[device]
        assert link.wait(ANSWER_S), f"no answer of worker {device}"
        body = link.receive()
        assert body is not None
        return body

    def open(self, epoch: int, members: tuple[int, ...], comm: CommHandle) -> None:
        self.control.set_control(comm.slot, epoch, ControlState.LIVE)
        for rank, device in enumerate(members):
            body = OpenDomain(epoch, "", len(members), rank, members, comm, control_slot=comm.slot)
            self.links[device].send(body)
        for device in members:
            opened = self.answers(device)
            assert isinstance(opened, DomainOpened), opened
            assert opened.weight_bytes_copied == 0
        for device in members:
            self.links[device].send(ProveDomain(epoch, 0))
        assert isinstance(self.answers(members[0]), DomainProven)

    def close_domain(self, epoch: int, members: tuple[int, ...]) -> None:
        for device in members:
            self.links[device].send(CloseDomain(epoch))
        for device in members:
            self.answers(device)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for link in self.links:
            link.close()
        self.context.term()
        for fd in (*self.fds.values(), *self.orders):
            os.close(fd)


class Remote:
    """A domain of processes with the `step` of a lock-step domain."""

    def __init__(self, node: Node, epoch: int, members: tuple[int, ...]) -> None:
        self.node, self.epoch, self.members, self.steps = node, epoch, members, 0

    def step(self, rows: list[RowStep], new: list[NewRow]) -> StepResult:
        self.steps += 1
        for device in self.members:
            self.node.links[device].send(StepPlan(self.epoch, self.steps, tuple(rows), tuple(new)))
        return cast(StepResult, self.node.answers(self.members[0]))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("node"))
    try:
        assert not any(link.wait(0) for link in made.links), "no worker speaks before the weights are there"
        made.release()
        for device in range(DEVICES):
            hello = made.answers(device)
            assert hello == WorkerHello(device, 1, made.processes[device].pid)
        yield made
    finally:
        made.stop()


def requests() -> list[Request]:
    pages = np.arange(BLOCKS * TINY.kv_heads)
    return [
        Request(i, random_prompt(i, length, TINY.vocab), blocks=make_blocks(4, 3, pages[12 * i :]))
        for i, length in enumerate((5, 33, 40))
    ]


def test_processes_give_the_bits_of_threads(node: Node) -> None:
    expected = requests()
    with LockstepNode(dtype="bf16", weights=(node.index, node.weights), devices=1) as threads:
        run(threads.open(1), expected, 8)
    moving = requests()
    # Slot 0 goes from a group of two to one of three and back to two others: each forgets the last one's
    # arrivals. In the end the last one's communicator, parked meanwhile, is used again.
    two, three, other = CommHandle(1, 0), CommHandle(2, 0), CommHandle(3, 0)
    for epoch, members, comm in (
        (1, (0, 1), two),
        (2, (2, 1, 0), three),
        (3, (2, 0), other),
        (4, (2, 0), other),
    ):
        node.open(epoch, members, comm)
        run(Remote(node, epoch, members), moving, 2)  # type: ignore[arg-type]
        node.close_domain(epoch, members)
    assert [r.output for r in moving] == [r.output for r in expected]
    assert [r.logprobs for r in moving] == [r.logprobs for r in expected]


def test_a_worker_alone_needs_no_group(node: Node) -> None:
    node.open(10, (1,), CommHandle(10, 1))
    (request, *_) = requests()
    run(Remote(node, 10, (1,)), [request], 3)  # type: ignore[arg-type]
    node.close_domain(10, (1,))
    assert len(request.output) == 3


def test_a_revoked_domain_ends_at_once(node: Node) -> None:
    node.open(20, (0, 1), CommHandle(20, 1))
    node.control.set_control(1, 20, ControlState.ABORTED)
    (request, *_) = requests()
    plan = StepPlan(20, 1, (RowStep(0, 0, 5, True),), (request.as_new(),))
    for device in (0, 1):
        node.links[device].send(plan)
        broken = node.answers(device)
        assert isinstance(broken, DomainBroken)
        assert not broken.culprit
    node.close_domain(20, (0, 1))
    node.open(21, (0, 1), CommHandle(21, 1))
    node.close_domain(21, (0, 1))


def test_workers_leave_interrupts_to_the_supervisor(node: Node) -> None:
    os.kill(node.processes[1].pid, signal.SIGINT)
    node.open(30, (1,), CommHandle(30, 1))
    node.close_domain(30, (1,))
    assert node.processes[1].poll() is None


def test_another_engine_finds_a_worker_without_domains(node: Node, tmp_path: Path) -> None:
    """Last, since the worker's link is another one afterwards."""
    node.open(40, (0, 1), CommHandle(40, 1))
    address = worker_address(tmp_path, 0, 1, 2)
    node.links[0].close()
    node.links[0] = zmq_link(node.context, address, bind=True, incarnation=2)
    node.order(0, Connect(address))
    assert node.answers(0) == WorkerHello(0, 1, node.processes[0].pid)
    assert node.control.progress(0)[:3] == (0, 0, WorkerState.IDLE)
    node.open(41, (0,), CommHandle(41, 1))
    (request, *_) = requests()
    run(Remote(node, 41, (0,)), [request], 3)  # type: ignore[arg-type]
    assert len(request.output) == 3
    begun, _, state, _ = node.control.progress(0)
    assert (begun, state) == (5, WorkerState.IDLE)


def test_orders_that_came_while_it_was_imported_are_all_carried_out(node: Node, tmp_path: Path) -> None:
    """Its engine is lost before it gets to serve that one."""
    addresses = [worker_address(tmp_path, 1, 2, engine) for engine in (1, 2)]
    node.links[1].close()
    node.links[1] = zmq_link(node.context, addresses[1], bind=True, incarnation=2)
    node.processes[1].kill()
    node.processes[1].wait()
    os.close(node.orders[1])
    start = tmp_path / "worker-1.json"
    process, node.orders[1] = node.spawn()
    node.processes[1] = process
    start.write_bytes(msgspec.json.encode(node.start(1, incarnation=2)))
    for order in (Begin(str(start), addresses[0]), Go(), Connect(addresses[1])):
        node.order(1, order)
    assert node.answers(1) == WorkerHello(1, 2, process.pid)


def test_a_worker_ends_with_its_supervisor_s_pipe(node: Node) -> None:
    os.close(node.orders[2])
    assert node.processes[2].wait(20) == 0
    del node.orders[2]
