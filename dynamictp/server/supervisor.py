"""The supervisor: creates the shared memory, starts loader, engine and workers, and ends them.

It owns the child processes and the memory; the engine owns what runs on them. Children die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import msgspec
import zmq

from dynamictp.config import ServeConfig
from dynamictp.errors import ConfigError, FatalError, ModelRefused, ResourceError
from dynamictp.messages import EngineStart
from dynamictp.model.weights import WeightIndex
from dynamictp.server.child import Child
from dynamictp.server.plan import NodePlan
from dynamictp.server.shared_memory import SharedMemory
from dynamictp.transport import ZmqLink, zmq_link
from dynamictp.worker.comm.control import bytes_needed as control_bytes
from dynamictp.worker.start import WorkerStart, exchange_slot_bytes

log = logging.getLogger(__name__)

STOP_S = 5.0
SPIN = 2000
"""Polls of a barrier before it yields, when every rank has a core of its own (measured)."""

_REFUSALS = (ConfigError, ModelRefused, ResourceError)


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
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._context = zmq.Context[zmq.Socket[bytes]](1)
        self._memory: dict[str, SharedMemory] = {}
        self._children: dict[str, Child] = {}
        self._stopping = False
        self.failed: asyncio.Future[FatalError] = asyncio.get_running_loop().create_future()
        """Set when a child ends that should not have."""

    async def start(self, progress: Callable[[str], None]) -> ZmqLink:
        """Start everything; the returned link to the engine will carry `EngineReady`.

        Raises `ModelRefused` or `ResourceError`; `stop` must be called all the same.
        """
        self._create_memory()
        self._folder = _socket_folder(self._plan.devices)
        sockets = Path(self._folder.name)
        link = zmq_link(self._context, f"ipc://{sockets}/engine.sock", bind=True, incarnation=1)
        progress(f"starting engine and {self._plan.devices} worker(s)")
        self._spawn_engine(sockets)
        ready, gate = os.pipe()
        try:
            for device in range(self._plan.devices):
                self._spawn_worker(device, sockets, ready)
            progress(
                f"loading {self._config.model} ({self._index.total_bytes / 1e6:.0f} MB, "
                f"{self._index.weights or self._index.dtype})"
            )
            await self._load_weights()
            # A byte for each worker. The pipe stays readable here, so this can't fail for one that has died.
            os.write(gate, b"1" * self._plan.devices)
        finally:
            os.close(gate)
            os.close(ready)
        return link

    async def stop(self) -> None:
        """End the children (politely, then not), free memory and sockets. May be called twice."""
        self._stopping = True
        await _end(self._children.values(), STOP_S)
        for memory in self._memory.values():
            memory.close()
        self._context.destroy(linger=0)
        if self._folder is not None:
            self._folder.cleanup()

    def pid(self, device: int) -> int | None:
        """Process id of a device's worker."""
        child = self._children.get(f"worker {device}")
        return child.pid if child is not None and child.running else None

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

    def _spawn_engine(self, sockets: Path) -> None:
        plan, config = self._plan, self._config
        start = EngineStart(
            facts=plan.facts,
            arena=plan.arena,
            devices=plan.devices,
            layout=str(plan.layout),
            legal_degrees=plan.degrees,
            model=config.model_name,
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
        self._spawn(
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

    def _spawn_worker(self, device: int, sockets: Path, ready: int) -> None:
        """The worker starts to serve when it has read a byte from the pipe `ready`."""
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
            threads=config.cores_per_device,
        )
        file = sockets / f"worker-{device}.json"
        file.write_bytes(msgspec.json.encode(start))
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
        self._spawn(f"worker {device}", arguments, tuple(descriptors.values()))

    async def _load_weights(self) -> None:
        """Raises `ModelRefused`, or `FatalError` when a loader fails otherwise."""
        memory = self._memory["weights"]
        parts = max(1, min(4, len({core for cores in self._plan.cores for core in cores})))
        with contextlib.ExitStack() as files:
            loaders: list[tuple[Child, IO[bytes]]] = []
            for part in range(parts):
                # A file, not a pipe: nobody has to read it for the loader to end.
                errors = files.enter_context(tempfile.TemporaryFile())
                arguments = [
                    *("dynamictp.server.loader", "--model", self._config.model),
                    *("--dtype", self._config.dtype, "--layout", self._index.layout),
                    *("--weights", self._index.weights),
                    *("--fd", str(memory.fd), "--part", f"{part}/{parts}"),
                ]
                child = Child("loader", arguments, descriptors=(memory.fd,), stderr=errors.fileno())
                loaders.append((child, errors))
            try:
                for child, output in loaders:
                    _check_loader(await asyncio.shield(child.ended), output)
            finally:
                await _end([child for child, _ in loaders], 0.0)

    def _spawn(self, name: str, arguments: list[str], descriptors: tuple[int, ...]) -> None:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        child = Child(name, arguments, descriptors=descriptors, environment=threads)
        self._children[name] = child
        child.ended.add_done_callback(lambda ended: self._on_ended(child, ended.result()))

    def _on_ended(self, child: Child, code: int) -> None:
        if self._stopping or self.failed.done():
            return
        # A child that refuses to start has said why on stderr.
        kind = next((error for error in _REFUSALS if error.exit_code == code), FatalError)
        self.failed.set_result(
            kind(f"{child.name} (process {child.pid}) ended unexpectedly with exit code {code}")
        )


def _socket_folder(devices: int) -> tempfile.TemporaryDirectory[str]:
    """A new owner-only folder. Raises `ResourceError` when there is no place for it."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="dynamictp-")
    except OSError as error:
        raise ResourceError(
            f"no folder for sockets: {error.strerror}; set TMPDIR to another place"
        ) from error
    if len(os.fsencode(f"{folder.name}/worker-{devices}.sock")) > zmq.IPC_PATH_MAX_LEN:
        folder.cleanup()
        raise ResourceError(
            f"the path {folder.name} is too long for sockets, whose paths have at most "
            f"{zmq.IPC_PATH_MAX_LEN} bytes; set TMPDIR to a shorter one"
        )
    return folder


async def _end(children: Iterable[Child], patience_s: float) -> None:
    """SIGTERM, a wait, SIGKILL for those that are late; returns when all are reaped."""
    running = {child.ended: child for child in children if child.running}
    if not running:
        return
    for child in running.values():
        child.signal(signal.SIGTERM)
    _, late = await asyncio.wait(running, timeout=patience_s)
    for ended in late:
        if patience_s:
            log.warning("%s did not end in %.0f s and is killed", running[ended].name, patience_s)
        running[ended].signal(signal.SIGKILL)
    if late:
        await asyncio.wait(late)


def _check_loader(code: int, errors: IO[bytes]) -> None:
    if not code:
        return
    errors.seek(0)
    text = errors.read().decode(errors="replace").strip()
    if code == ModelRefused.exit_code:
        raise ModelRefused(text)
    raise FatalError(f"loading the weights failed (exit {code}): {text}")
