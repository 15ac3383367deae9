"""The worker processes: one for each device, and a spare that has its imports done."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamictp.clock import Clock
from dynamictp.errors import ResourceError
from dynamictp.server.child import Child, Spawner
from dynamictp.transport import worker_address
from dynamictp.worker.orders import Begin, Connect, Go, Order, encode_order
from dynamictp.worker.start import WorkerStart

log = logging.getLogger(__name__)

SPARE_PAUSE_S = 1.0
SPARE_LONGEST_PAUSE_S = 60.0
"""Before the next spare, when several died one after the other."""

Ended = Callable[[int, int, int, float], None]
"""(device, incarnation, exit code, seconds it lived)."""


@dataclass(frozen=True)
class _Process:
    """A worker's process and the writing end of its pipe of orders."""

    child: Child
    orders: int

    def order(self, order: Order) -> None:
        # Its death shows in `child.ended`, not here.
        try:
            os.write(self.orders, encode_order(order))
        except BrokenPipeError:
            log.debug("%s is gone and gets no orders", self.child.name)


@dataclass(frozen=True)
class _Life:
    """One incarnation of a device's worker."""

    incarnation: int
    process: _Process
    began_s: float


class WorkerPool:
    """Owner of the worker processes and of their incarnations. Lives in one event loop."""

    def __init__(
        self,
        start: Callable[[int, int], WorkerStart],
        *,
        devices: int,
        folder: Path,
        descriptors: Mapping[str, int],
        spawner: Spawner,
        clock: Clock,
        on_ended: Ended,
        label: str = "",
    ) -> None:
        """`start` says what a device's worker of an incarnation is to be; `descriptors` are those of the
        shared memories by name. `label` leads the processes' names."""
        self._label = label
        self._start = start
        self._folder = folder
        self._descriptors = descriptors
        self._spawner = spawner
        self._clock = clock
        self._on_ended = on_ended
        self._incarnations = [0] * devices
        self._lives: dict[int, _Life] = {}
        self._spare: _Process | None = None
        self._spare_deaths = 0
        self._closed = False

    @property
    def incarnations(self) -> tuple[int, ...]:
        """Of each device's worker; 0 where there is none now."""
        return tuple(
            self._lives[device].incarnation if device in self._lives else 0
            for device in range(len(self._incarnations))
        )

    @property
    def children(self) -> list[Child]:
        """Every process that was started and has not ended."""
        processes = [life.process for life in self._lives.values()]
        return [p.child for p in (*processes, *((self._spare,) if self._spare else ()))]

    def pid(self, device: int) -> int | None:
        life = self._lives.get(device)
        return life.process.child.pid if life is not None else None

    # ------------------------------------------------------------ lives

    def begin(self, device: int, engine: int) -> int:
        """Start the device's next worker, to serve the engine of that incarnation once `go` is called.
        Returns the worker's incarnation.

        Raises `ResourceError` when the machine does not let it start.
        """
        spare, self._spare = self._spare, None
        if spare is not None:
            self._spare_deaths = 0
        process = spare or self._spawn(f"{self._label}worker {device}")
        self._incarnations[device] += 1
        incarnation = self._incarnations[device]
        file = self._start_file(device, incarnation)
        try:
            file.write_bytes(msgspec.json.encode(self._start(device, incarnation)))
        except OSError as error:
            process.child.signal(signal.SIGKILL)
            raise ResourceError(f"can't write {file}: {error.strerror}") from error
        process.child.name = f"{self._label}worker {device}"
        life = _Life(incarnation, process, self._clock.now())
        self._lives[device] = life
        process.child.ended.add_done_callback(lambda ended: self._ended(device, life, ended.result()))
        process.order(Begin(str(file), self._address(device, incarnation, engine)))
        return incarnation

    def go(self, device: int) -> None:
        """The weights are there."""
        self._lives[device].process.order(Go())

    def connect(self, engine: int) -> None:
        """Another engine takes over: tell every worker."""
        for device, life in self._lives.items():
            life.process.order(Connect(self._address(device, life.incarnation, engine)))

    def kill(self, device: int, incarnation: int) -> None:
        """End that life at once; nothing happens when it is over."""
        life = self._lives.get(device)
        if life is not None and life.incarnation == incarnation:
            life.process.child.signal(signal.SIGKILL)

    def keep_spare(self) -> None:
        """Have a spare, from now on or again. Without one a replacement only takes longer."""
        if self._closed or self._spare is not None:
            return
        try:
            process = self._spawn(f"{self._label}spare worker")
        except ResourceError as error:
            log.warning("no spare worker: %s", error)
            return
        self._spare = process
        process.child.ended.add_done_callback(lambda _: self._spare_ended(process))

    def close(self) -> None:
        """Expect the processes to end; the caller ends them."""
        self._closed = True

    # ------------------------------------------------------------ within

    def _spawn(self, name: str) -> _Process:
        try:
            theirs, ours = os.pipe()
        except OSError as error:
            raise ResourceError(f"can't start {name}: {error.strerror}") from error
        try:
            numbers = {f"--{key}-fd": number for key, number in self._descriptors.items()}
            numbers["--orders-fd"] = theirs
            arguments = ["dynamictp.worker"]
            for flag, number in numbers.items():
                arguments += [flag, str(number)]
            threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            child = Child(
                name,
                arguments,
                spawner=self._spawner,
                descriptors=tuple(numbers.values()),
                environment=threads,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        child.ended.add_done_callback(lambda _: os.close(ours))
        return _Process(child, ours)

    def _ended(self, device: int, life: _Life, code: int) -> None:
        if self._lives.get(device) is life:
            del self._lives[device]
        self._start_file(device, life.incarnation).unlink(missing_ok=True)
        self._on_ended(device, life.incarnation, code, self._clock.now() - life.began_s)

    def _spare_ended(self, process: _Process) -> None:
        if self._spare is not process:  # it became a worker
            return
        self._spare = None
        pause_s = min(SPARE_LONGEST_PAUSE_S, SPARE_PAUSE_S * 2.0 ** min(self._spare_deaths, 16))
        self._spare_deaths += 1
        if not self._closed:
            log.warning("the spare worker (process %d) ended", process.child.pid)
            asyncio.get_running_loop().call_later(pause_s, self.keep_spare)

    def _start_file(self, device: int, incarnation: int) -> Path:
        return self._folder / f"worker-{device}.{incarnation}.json"

    def _address(self, device: int, incarnation: int, engine: int) -> str:
        return worker_address(self._folder, device, incarnation, engine)
