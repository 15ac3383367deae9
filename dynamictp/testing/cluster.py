"""The whole data plane in one process: the real engine and real workers as threads, on a random model.

The caller plays the server: it sends messages and gets the engine's. Messages travel as encoded bytes.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal, Self

import torch

from dynamictp.clock import SystemClock
from dynamictp.engine.core import EngineCore
from dynamictp.facts import ModelFacts
from dynamictp.messages import Body, EngineReady, EngineStart, RampSettings, Shutdown
from dynamictp.testing.harness import TINY, LockstepNode
from dynamictp.transport import MemoryLink, memory_link_pair
from dynamictp.worker.core import WorkerCore

JOIN_S = 10.0


class ThreadedCluster:
    """Engine in the caller's thread, a thread per worker. A context manager; ready when entered."""

    def __init__(
        self,
        facts: ModelFacts = TINY,
        *,
        devices: int,
        layout: str = "tp1",
        blocks: int = 64,
        page_tokens: int = 16,
        max_num_seqs: int = 16,
        max_batched_tokens: int = 64,
        kernel_level: str = "",
        ramp: RampSettings | None = None,
    ) -> None:
        self._node = LockstepNode(
            facts,
            devices=devices,
            dtype="bf16",
            blocks=blocks,
            page_tokens=page_tokens,
            max_tokens=max_batched_tokens,
            max_rows=max_num_seqs,
            kernel_level=kernel_level,
        )
        self._arrived = threading.Event()
        self._links: list[MemoryLink] = []
        self._threads: list[threading.Thread] = []
        start = EngineStart(
            facts=facts,
            arena=self._node.arena_facts,
            devices=devices,
            layout=layout,
            legal_degrees=tuple(range(1, devices + 1)),
            max_model_len=facts.max_context,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            comm_slots=2 * devices + 4,
            ramp=ramp or RampSettings(),
        )
        self.core = EngineCore(start, SystemClock(), _NodeControl(self._node))

    def __enter__(self) -> Self:
        for device, worker in enumerate(self._node.workers):
            ours, theirs = memory_link_pair(on_left=self._arrived.set)
            self._links.append(ours)
            thread = threading.Thread(target=_work, args=(worker, theirs), name=f"device-{device}")
            thread.start()
            self._threads.append(thread)
            self.core.on_worker(device, self._node.hello(device))
        while not any(isinstance(body, EngineReady) for body in self.pump(5.0)):
            pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self._links:
            link.send(Shutdown())
        for thread in self._threads:
            thread.join(JOIN_S)
        self._node.close()

    def send(self, body: Body) -> None:
        """A message of the server."""
        self.core.on_server(body)

    def pump(self, timeout_s: float) -> list[Body]:
        """One turn of the engine after a message, or after `timeout_s`; what it says to the server."""
        wait_s = min(timeout_s, max(0.0, self.core.next_deadline() - SystemClock().now()))
        if not self.core.to_workers:
            self._arrived.wait(wait_s)
        self._arrived.clear()
        for device, link in enumerate(self._links):
            while (body := link.receive()) is not None:
                self.core.on_worker(device, body)
        self.core.turn()
        for device, body in self.core.to_workers:
            self._links[device].send(body)
        self.core.to_workers.clear()
        answers, self.core.to_server = self.core.to_server, []
        return answers


class _NodeControl:
    """The engine's control words in the node's memory."""

    def __init__(self, node: LockstepNode) -> None:
        self._node = node

    def set(self, slot: int, epoch: int, state: Literal[0, 1, 2]) -> None:
        self._node.control.set_control(slot, epoch, state)

    def progress(self, device: int) -> tuple[int, int, int, float]:
        return self._node.control.progress(device)


def _work(worker: WorkerCore, link: MemoryLink) -> None:
    """A worker's loop, as its process has it."""
    torch.set_num_threads(1)
    while True:
        link.wait(None)
        body = link.receive()
        if isinstance(body, Shutdown):
            worker.close()
            return
        if body is not None:
            for answer in worker.handle(body):
                link.send(answer)
