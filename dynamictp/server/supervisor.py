"""The supervisor: creates the shared memory, starts loader, engine and workers, and ends them.

It owns the child processes and the memory; the engine owns what runs on them. Children die with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from dynamictp.config import ServeConfig
from dynamictp.errors import FatalError, ModelRefused, ResourceError
from dynamictp.messages import EngineStart
from dynamictp.model.weights import WeightIndex
from dynamictp.server.plan import NodePlan
from dynamictp.server.shared_memory import SharedMemory
from dynamictp.transport import ZmqLink, zmq_link
from dynamictp.worker.comm.control import bytes_needed as control_bytes
from dynamictp.worker.start import WorkerStart, exchange_slot_bytes

log = logging.getLogger(__name__)

STOP_S = 5.0
SPIN = 2000
"""Polls of a barrier before it yields, when every rank has a core of its own (measured)."""


class Supervisor:
    """Owner of the shared memory and of every child process of one server."""

    def __init__(
        self, config: ServeConfig, plan: NodePlan, index: WeightIndex, kernel_level: str = ""
    ) -> None:
        """`kernel_level` is the native kernels', empty for torch; `index` has the layout that they read."""
        self._config = config
        self._plan = plan
        self._index = index
        self._kernel_level = kernel_level
        self._folder = tempfile.TemporaryDirectory(prefix="dynamictp-")
        self._context = zmq.Context[zmq.Socket[bytes]](1)
        self._memory: dict[str, SharedMemory] = {}
        self._children: dict[str, Process] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set to a sentence when a child ends that should not have."""

    async def start(self, progress: Callable[[str], None]) -> ZmqLink:
        """Start everything; the returned link to the engine will carry `EngineReady`.

        Raises `ModelRefused` or `ResourceError`; `stop` must be called all the same.
        """
        self._create_memory()
        sockets = Path(self._folder.name)
        link = zmq_link(self._context, f"ipc://{sockets}/engine.sock", bind=True, incarnation=1)
        progress(f"starting engine and {self._plan.devices} worker(s)")
        await self._spawn_engine(sockets)
        gates = [await self._spawn_worker(device, sockets) for device in range(self._plan.devices)]
        progress(
            f"loading {self._config.model} ({self._index.total_bytes / 1e6:.0f} MB, {self._config.dtype})"
        )
        try:
            await self._load_weights()
            for gate in gates:
                os.write(gate, b"1")
        finally:
            for gate in gates:
                os.close(gate)
        return link

    async def stop(self) -> None:
        """End the children (politely, then not), free memory and sockets. May be called twice."""
        self._stopping = True
        for child in self._children.values():
            if child.returncode is None:
                child.send_signal(signal.SIGTERM)
        _, late = await asyncio.wait(self._watchers, timeout=STOP_S) if self._watchers else (set(), set())
        for child in self._children.values():
            if child.returncode is None:
                log.warning("process %d did not end in %.0f s and is killed", child.pid, STOP_S)
                child.kill()
        if late:
            await asyncio.wait(late)
        for memory in self._memory.values():
            memory.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    def pid(self, device: int) -> int | None:
        """Process id of a device's worker."""
        child = self._children.get(f"worker {device}")
        return None if child is None or child.returncode is not None else child.pid

    # ------------------------------------------------------------ memory

    def _create_memory(self) -> None:
        plan = self._plan
        slot = exchange_slot_bytes(
            plan.facts,
            self._config.dtype,
            self._config.max_batched_tokens,
            self._config.max_num_seqs,
            plan.devices,
            packed=bool(self._kernel_level),
        )
        control = control_bytes(plan.comm_slots, plan.devices)
        self._memory = {
            "weights": SharedMemory("weights", self._index.total_bytes),
            "arena": SharedMemory("arena", plan.arena_bytes),
            "exchange": SharedMemory("exchange", slot * plan.comm_slots),
            "control": SharedMemory("control", control),
        }

    # ------------------------------------------------------------ children

    async def _spawn_engine(self, sockets: Path) -> None:
        plan, config = self._plan, self._config
        start = EngineStart(
            facts=plan.facts,
            arena=plan.arena,
            devices=plan.devices,
            layout=str(plan.layout),
            legal_degrees=plan.degrees,
            mode=config.mode,
            max_model_len=plan.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_step_ms=config.max_step_ms,
            comm_slots=plan.comm_slots,
        )
        file = sockets / "engine.json"
        file.write_bytes(msgspec.json.encode(start))
        control = self._memory["control"].fd
        await self._spawn(
            "engine",
            [
                "dynamictp.engine",
                "--start",
                str(file),
                "--sockets",
                str(sockets),
                "--control-fd",
                str(control),
            ],
            (control,),
        )

    async def _spawn_worker(self, device: int, sockets: Path) -> int:
        """Returns the descriptor to write to once the weights are loaded."""
        plan, config = self._plan, self._config
        start = WorkerStart(
            facts=plan.facts,
            dtype=config.dtype,
            index=self._index,
            arena=plan.arena,
            device=device,
            devices=plan.devices,
            incarnation=1,
            cores=plan.cores[device],
            max_tokens=config.max_batched_tokens,
            max_rows=config.max_num_seqs,
            comm_slots=plan.comm_slots,
            deadline_s=config.collective_deadline_s,
            spin=0 if plan.oversubscribed else SPIN,
            kernel_level=self._kernel_level,
        )
        file = sockets / f"worker-{device}.json"
        file.write_bytes(msgspec.json.encode(start))
        ready, gate = os.pipe()
        descriptors = {f"{name}-fd": memory.fd for name, memory in self._memory.items()} | {"ready-fd": ready}
        arguments = [
            "dynamictp.worker",
            "--start",
            str(file),
            "--socket",
            f"ipc://{sockets}/worker-{device}.sock",
        ]
        for name, descriptor in descriptors.items():
            arguments += [f"--{name}", str(descriptor)]
        await self._spawn(f"worker {device}", arguments, tuple(descriptors.values()))
        os.close(ready)
        return gate

    async def _load_weights(self) -> None:
        memory = self._memory["weights"]
        parts = max(1, min(4, len({core for cores in self._plan.cores for core in cores})))
        loaders = []
        for part in range(parts):
            loaders.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "dynamictp.server.loader", "--model", self._config.model),
                    *("--dtype", self._config.dtype, "--layout", self._index.layout),
                    *("--fd", str(memory.fd), "--part", f"{part}/{parts}"),
                    pass_fds=(memory.fd,),
                    stderr=PIPE,
                )
            )
        try:
            for loader in loaders:
                _, errors = await loader.communicate()
                if loader.returncode:
                    text = errors.decode(errors="replace").strip()
                    if loader.returncode == ModelRefused.exit_code:
                        raise ModelRefused(text)
                    raise FatalError(f"loading the weights failed (exit {loader.returncode}): {text}")
        finally:
            for loader in loaders:
                if loader.returncode is None:
                    loader.kill()
                    await loader.wait()

    async def _spawn(self, name: str, arguments: list[str], descriptors: tuple[int, ...]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *arguments, pass_fds=descriptors, env=environment
            )
        except OSError as error:
            raise ResourceError(f"can't start {name}: {error.strerror}") from error
        self._children[name] = child
        watcher = asyncio.create_task(self._watch(name, child))
        self._watchers.add(watcher)

    async def _watch(self, name: str, child: Process) -> None:
        code = await child.wait()
        if not self._stopping and not self.failed.done():
            self.failed.set_result(f"{name} (process {child.pid}) ended unexpectedly with exit code {code}")
