"""A DynamicTP server as a child process that never outlives its owner."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType

from dynamictp.clock import Clock, SystemClock
from dynamictp.errors import FatalError

READY_PREFIX = "DynamicTP ready: "
_KEPT_LINES = 20
_TERM_WAIT_S = 10.0


def serve_command(layout: str, devices: int = 2, model: str = "demo") -> list[str]:
    """The command line of a server on a free port."""
    return [
        sys.executable, "-m", "dynamictp", "serve", model,
        "--devices", str(devices), "--layout", layout, "--port", "0",
    ]  # fmt: skip


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Holds Ctrl-C back until the block is done, then raises it. For the main thread.

    Between a fork and the assignment of its handle an interrupt would orphan the child. The handler
    isn't inherited through exec, unlike a blocked signal.
    """
    pending: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt


class ServerProcess:
    """Owns one server process and its process group. A context manager: leaving it stops the server.

    The group is the child's own, so that a terminal's Ctrl-C reaches only the owner, which then
    stops the server in order; whatever is left of the group after that is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        on_line: Callable[[str], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Starts the process. `on_line` gets each line of its output until it is ready, from a thread."""
        self._clock = clock or SystemClock()
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready: Future[str] = Future()
        self._started_s = self._clock.now()
        self._ready_s: float | None = None
        self._stopped = False
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            env=environment,
            text=True,
            errors="replace",
        )
        self._pump = threading.Thread(target=self._read_output, name="server-output", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def start_to_ready_s(self) -> float:
        """Seconds from starting the process to its ready line. Raises FatalError before that."""
        if self._ready_s is None:
            raise FatalError("the server is not ready yet")
        return self._ready_s - self._started_s

    @property
    def ready(self) -> Future[str]:
        """The server's URL once it is ready; FatalError with its last lines when it ends before."""
        return self._ready

    def wait_ready(self, timeout_s: float = 120.0) -> str:
        """The server's URL. Raises FatalError when it ends or `timeout_s` passes before it is ready."""
        try:
            return self._ready.result(timeout_s)
        except TimeoutError as error:
            raise FatalError(
                f"the server was not ready within {timeout_s:g} s\n{self.last_lines()}"
            ) from error

    def last_lines(self) -> str:
        """The end of the server's output."""
        return "\n".join(self._lines)

    def stop(self) -> None:
        """SIGTERM, a wait, then SIGKILL for what is left of the group. Harmless when called twice.

        Ctrl-C is ignored meanwhile: a second one must not leave processes behind.
        """
        if self._stopped:
            return
        self._stopped = True
        previous = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._end_group()
        finally:
            if previous is not None:
                signal.signal(signal.SIGINT, previous)
        self._pump.join(timeout=1.0)
        if self._process.stdout is not None and not self._pump.is_alive():
            self._process.stdout.close()

    def _end_group(self) -> None:
        pidfd = os.pidfd_open(self._process.pid)
        try:
            os.kill(self._process.pid, signal.SIGTERM)  # not Popen's: that would reap it if it is dead
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll(_TERM_WAIT_S * 1000)
        finally:
            os.close(pidfd)
            # Before the leader is reaped its id can't be taken by an unrelated group.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._take_line(line.rstrip())
        if not self._ready.done():
            self._ready.set_exception(
                FatalError(f"the server ended before it was ready\n{self.last_lines()}")
            )

    def _take_line(self, line: str) -> None:
        self._lines.append(line)
        if self._ready.done():
            return
        if line.startswith(READY_PREFIX):
            self._ready_s = self._clock.now()
            self._ready.set_result(line.removeprefix(READY_PREFIX).split()[0])
        elif self._on_line is not None:
            self._on_line(line)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
