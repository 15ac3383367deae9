"""The supervisor: creates the shared memory, starts loader, engine and workers, and keeps them alive.

It owns the child processes and the memory; the engine owns what runs on them. Children die with it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec
import zmq

from dynamictp.clock import Clock, SystemClock
from dynamictp.config import ServeConfig
from dynamictp.control.reconciler import ramp_settings
from dynamictp.errors import ConfigError, FatalError, ModelRefused, ResourceError
from dynamictp.messages import Body, EngineStart, WorkerGone, WorkerStarted
from dynamictp.model.weights import WeightIndex
from dynamictp.server.child import Child, Spawner, describe_end, end_children
from dynamictp.server.crash_budget import CrashBudget
from dynamictp.server.loading import load_weights
from dynamictp.server.plan import NodePlan
from dynamictp.server.shared_memory import SharedMemory
from dynamictp.server.socket_folder import SocketFolder
from dynamictp.server.stopped import StoppedProcesses
from dynamictp.server.worker_pool import WorkerPool
from dynamictp.transport import ZmqLink, engine_address, zmq_link
from dynamictp.worker.comm.control import ControlState, open_control
from dynamictp.worker.comm.control import bytes_needed as control_bytes
from dynamictp.worker.start import WorkerStart, exchange_slot_bytes

log = logging.getLogger(__name__)

STOP_S = 5.0
STOPPED_SHARE = 0.5
"""Share of `hang_s` that a child may be stopped."""
LOOK_S = 0.25
SPARE_DELAY_S = 2.0
"""After a replacement, before the next spare is started."""
SPIN = 2000
"""Polls of a barrier before it yields, when every rank has a core of its own (measured)."""

_REFUSALS = (ConfigError, ModelRefused, ResourceError)


class EngineUser(Protocol):
    """Who talks to the engine: told when one is lost and when its successor can be talked to."""

    @property
    def layout(self) -> str:
        """The last committed layout: the next engine begins with it."""

    def send(self, body: Body) -> bool:
        """Hand a message to the engine; False when there is none."""

    def engine_lost(self, reason: str) -> None:
        """Stop using the link."""

    def engine_started(self, link: ZmqLink) -> None:
        """Use this one; what is sent on it waits until the engine is there."""


class Supervisor:
    """Owner of the shared memory and of every child process of one server.

    Until `keep_alive` a child that ends ends the server. From then on it is replaced: `CrashBudget` says how
    often.
    """

    def __init__(
        self,
        config: ServeConfig,
        plan: NodePlan,
        index: WeightIndex,
        kernel_level: str = "",
        clock: Clock | None = None,
        *,
        name: str = "",
    ) -> None:
        """`kernel_level` is the native kernels', empty for torch; `index` has the layout that they read.
        `name` is the model's, where the server has several: it leads the names of processes and memories."""
        self._who = f"{name} " if name else ""
        self._config = config
        self._plan = plan
        self._index = index
        self._kernel_level = kernel_level
        self._clock = clock or SystemClock()
        self._spawner = Spawner()
        self._folder: SocketFolder | None = None
        self._context = zmq.Context[zmq.Socket[bytes]](1)
        self._memory: dict[str, SharedMemory] = {}
        self._pool: WorkerPool | None = None
        self._engine: Child | None = None
        self._engine_incarnation = 1
        self._engine_began_s = 0.0
        self._link: ZmqLink | None = None
        self._user: EngineUser | None = None
        self._budgets: dict[str, CrashBudget] = {}
        self.on_crash: Callable[[str], None] = lambda process: None
        """Told of each process that ends without being asked to: `worker` or `engine`."""
        self._stopping = False
        self._asleep: set[int] = set()
        """Devices that are to have no worker."""
        self._put_to_sleep: dict[int, int] = {}
        """Device → the worker's life that was ended on purpose, until it is over."""
        self.leased: Callable[[], tuple[int, ...]] = tuple
        """Devices that the next engine must not use."""
        self.failed: asyncio.Future[FatalError] = asyncio.get_running_loop().create_future()
        """Set when a child has ended for good."""

    async def start(self, progress: Callable[[str], None]) -> ZmqLink:
        """Start everything; the returned link to the engine will carry `EngineReady`.

        Raises `ModelRefused` or `ResourceError`; `stop` must be called all the same.
        """
        plan, config = self._plan, self._config
        self._create_memory()
        self._folder = SocketFolder(plan.devices)
        pool = self._pool = WorkerPool(
            self._worker_start,
            devices=plan.devices,
            folder=self._folder.path,
            descriptors={name: memory.fd for name, memory in self._memory.items()},
            spawner=self._spawner,
            clock=self._clock,
            on_ended=self._on_worker_ended,
            label=self._who,
        )
        # The engine can do without those of other models' devices; they follow once it serves.
        first = [device for device in range(plan.devices) if device not in self.leased()]
        progress(f"starting engine and {len(first)} worker(s)")
        for device in first:
            pool.begin(device, self._engine_incarnation)
        link = self._spawn_engine(str(plan.layout))
        kind = self._index.weights or self._index.dtype
        progress(f"loading {config.model} ({self._index.total_bytes / 1e6:.0f} MB, {kind})")
        cores = len({core for cores in plan.cores for core in cores})
        await load_weights(config.model, self._index, self._memory["weights"].fd, cores=cores)
        for device in first:
            pool.go(device)
        return link

    def keep_alive(self, user: EngineUser) -> None:
        """From now on replace what ends."""
        self._user = user
        if self._pool is not None and not self._stopping:
            for device in range(self._plan.devices):
                self._begin_worker(device)  # where there is none
            self._pool.keep_spare()
        self._look_for_stopped(StoppedProcesses(STOPPED_SHARE * self._config.hang_s))

    async def stop(self) -> None:
        """End the children (politely, then not), free memory and sockets. May be called twice."""
        self._stopping = True
        if self._pool is not None:
            self._pool.close()
        await end_children(self.children, STOP_S)
        self._spawner.close()
        for memory in self._memory.values():
            memory.close()
        self._context.destroy(linger=0)
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    @property
    def children(self) -> list[Child]:
        """Every child that has not ended."""
        workers = self._pool.children if self._pool is not None else []
        return [*workers, *((self._engine,) if self._engine is not None else ())]

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine."""
        return self._engine.pid if self._engine is not None else None

    def pid(self, device: int) -> int | None:
        """Process id of a device's worker."""
        return self._pool.pid(device) if self._pool is not None else None

    def kill_worker(self, device: int, incarnation: int, reason: str) -> None:
        """The engine has no use for that life of a worker any more: it hangs, or their link broke."""
        log.warning("%sworker %d.%d is killed: %s", self._who, device, incarnation, reason)
        if self._pool is not None:
            self._pool.kill(device, incarnation)

    def sleep(self, device: int) -> None:
        """End a device's worker until `wake`: all its memory of its own goes back to the system."""
        if self._pool is None or device in self._asleep:
            return
        self._asleep.add(device)
        self._put_to_sleep[device] = self._pool.incarnations[device]
        self._pool.kill(device, self._put_to_sleep[device])

    def wake(self, device: int) -> None:
        """Start the worker again, from the spare if there is one."""
        if device not in self._asleep:
            return
        self._asleep.remove(device)
        if self._pool is not None and not self._stopping:
            # One that has not ended yet is replaced when it does.
            self._begin_worker(device)

    @property
    def asleep(self) -> Collection[int]:
        return self._asleep

    def kill_engine(self, reason: str) -> None:
        """The engine hangs, or the link to it broke."""
        log.warning("the %sengine is killed: %s", self._who, reason)
        if self._engine is not None:
            self._engine.signal(signal.SIGKILL)

    def _look_for_stopped(self, stopped: StoppedProcesses) -> None:
        """Kill children that are stopped: progress words and silence tell later, and not in every phase."""
        if self._stopping:
            return
        children = {child.pid: child for child in self.children if child.running}
        for pid in stopped.look(children, self._clock.now()):
            log.warning("%s is killed: it is stopped", children[pid].name)
            children[pid].signal(signal.SIGKILL)
        asyncio.get_running_loop().call_later(LOOK_S, self._look_for_stopped, stopped)

    # ------------------------------------------------------------ workers

    def _worker(self, device: int) -> str:
        """The name of a device's worker."""
        return f"{self._who}worker {device}"

    def _on_worker_ended(self, device: int, incarnation: int, code: int, lived_s: float) -> None:
        reason = f"{self._worker(device)} ended with {describe_end(code)}"
        if self._stopping or self.failed.done():
            return
        if self._user is None:
            self._fail(self._worker(device), code)
            return
        if incarnation == self._put_to_sleep.get(device):
            del self._put_to_sleep[device]
            self._user.send(WorkerGone(device, incarnation, "its device is released"))
            self._begin_worker(device)  # if it was woken meanwhile
            return
        log.warning("%s after %.1f s", reason, lived_s)
        # At once: its peers wait for it in a collective.
        self._user.send(WorkerGone(device, incarnation, reason))
        self._after_crash(self._worker(device), code, lived_s, lambda: self._replace_worker(device))

    def _begin_worker(self, device: int) -> None:
        self._begin(self._worker(device), lambda: self._replace_worker(device))

    def _replace_worker(self, device: int) -> None:
        """Start the device's next worker, or its first, unless it has one or is to have none: a lease may
        have come or gone in a pause."""
        assert self._pool is not None
        assert self._user is not None
        if self._pool.incarnations[device] or device in self._asleep:
            return
        incarnation = self._pool.begin(device, self._engine_incarnation)
        self._user.send(WorkerStarted(device, incarnation))
        self._pool.go(device)
        # Its imports take seconds of a core, which the recovery needs first.
        asyncio.get_running_loop().call_later(SPARE_DELAY_S, self._pool.keep_spare)

    def _worker_start(self, device: int, incarnation: int) -> WorkerStart:
        plan, config = self._plan, self._config
        return WorkerStart(
            facts=plan.facts,
            dtype=config.dtype,
            index=self._index,
            arena=plan.arena,
            device=device,
            devices=plan.devices,
            incarnation=incarnation,
            cores=plan.cores[device],
            max_tokens=config.max_batched_tokens,
            max_rows=config.max_num_seqs,
            comm_slots=plan.comm_slots,
            deadline_s=config.collective_deadline_s,
            spin=0 if plan.oversubscribed else SPIN,
            kernel_level=self._kernel_level,
            threads=config.cores_per_device,
        )

    # ------------------------------------------------------------ engine

    def _spawn_engine(self, layout: str) -> ZmqLink:
        plan, config, incarnation = self._plan, self._config, self._engine_incarnation
        assert self._folder is not None
        assert self._pool is not None
        folder = self._folder.path
        start = EngineStart(
            facts=plan.facts,
            arena=plan.arena,
            devices=plan.devices,
            layout=layout,
            legal_degrees=plan.degrees,
            model=config.model_name,
            mode=config.mode,
            max_model_len=plan.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            max_step_ms=config.max_step_ms,
            comm_slots=plan.comm_slots,
            incarnation=incarnation,
            hang_s=config.hang_s,
            workers=self._pool.incarnations,
            ramp=ramp_settings(config.control),
            leased=self.leased(),
            most_devices=plan.most_devices,
            long_prompt_tokens=config.control.long_prompt_tokens,
        )
        file = folder / f"engine-{incarnation}.json"
        file.write_bytes(msgspec.json.encode(start))
        control = self._memory["control"].fd
        arguments = ["dynamictp.engine", "--start", str(file), "--sockets", str(folder)]
        arguments += ["--control-fd", str(control)]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._engine = Child(
            f"{self._who}engine",
            arguments,
            spawner=self._spawner,
            descriptors=(control,),
            environment=threads,
        )
        self._engine_began_s = self._clock.now()
        self._engine.ended.add_done_callback(lambda ended: self._on_engine_ended(ended.result()))
        self._link = zmq_link(self._context, engine_address(folder, incarnation), bind=False, incarnation=1)
        return self._link

    def _on_engine_ended(self, code: int) -> None:
        if self._stopping or self.failed.done():
            return
        if self._user is None:
            self._fail(f"{self._who}engine", code)
            return
        lived_s = self._clock.now() - self._engine_began_s
        reason = f"the {self._who}engine ended with {describe_end(code)}"
        log.warning("%s after %.1f s", reason, lived_s)
        self._user.engine_lost(reason)
        if self._link is not None:
            self._link.close()
        # Ranks may wait for one that never got its plan. Released, they hear of the next engine.
        self._revoke_domains()
        if self._folder is not None:
            self._folder.remove_of_engine(self._engine_incarnation)
        self._engine_incarnation += 1
        assert self._pool is not None
        self._pool.connect(self._engine_incarnation)
        self._after_crash(f"{self._who}engine", code, lived_s, self._replace_engine)

    def _replace_engine(self) -> None:
        assert self._user is not None
        self._user.engine_started(self._spawn_engine(self._user.layout))

    def _revoke_domains(self) -> None:
        plan = self._plan
        with self._memory["control"].map() as mapping:
            control = open_control(mapping, plan.comm_slots, plan.devices)
            for slot in range(plan.comm_slots):
                control.set_control(slot, 0, ControlState.FREE)
            del control  # it keeps the mapping from being closed

    # ------------------------------------------------------------ policy

    def _after_crash(self, name: str, code: int, lived_s: float, replace: Callable[[], None]) -> None:
        """Replace it after a pause, or give up."""
        self.on_crash(name.removeprefix(self._who).partition(" ")[0])
        budget = self._budget(name)
        pause_s = budget.crashed(self._clock.now(), lived_s)
        if pause_s is None:
            more = f", and more than {budget.limit} times in ten minutes (--crash-budget)"
            self._fail(name, code, more)
            return
        # Through the loop in any case: this may be called while a message of the engine is handled.
        asyncio.get_running_loop().call_later(pause_s, self._begin, name, replace)

    def _begin(self, name: str, replace: Callable[[], None]) -> None:
        """Start the process's next life; when it can't be started, as if it had crashed at once."""
        if self._stopping or self.failed.done():
            return
        try:
            replace()
        except FatalError as error:
            pause_s = self._budget(name).crashed(self._clock.now(), 0.0)
            if pause_s is None:
                self.failed.set_result(error)
                return
            log.warning("%s; the next try is in %.2f s", error, pause_s)
            asyncio.get_running_loop().call_later(pause_s, self._begin, name, replace)

    def _budget(self, name: str) -> CrashBudget:
        return self._budgets.setdefault(name, CrashBudget(self._config.crash_budget))

    def _fail(self, name: str, code: int, more: str = "") -> None:
        # A child that refuses to start has said why on stderr.
        kind = next((error for error in _REFUSALS if error.exit_code == code), FatalError)
        self.failed.set_result(kind(f"{name} ended unexpectedly with {describe_end(code)}{more}"))

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
        sizes = {
            "weights": self._index.total_bytes,
            "arena": plan.arena_bytes,
            "exchange": slot * plan.comm_slots,
            "control": control,
        }
        prefix = self._who.replace(" ", "-")
        self._memory = {kind: SharedMemory(f"{prefix}{kind}", size) for kind, size in sizes.items()}
