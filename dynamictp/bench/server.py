"""A DynamicTP server as a child process that never outlives its owner."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from dynamictp.clock import Clock, SystemClock
from dynamictp.errors import FatalError

READY_PREFIX = "DynamicTP ready: "
_SHOWN_LINES = 20
_TERM_WAIT_S = 10.0
"""More than the server gives its own children."""


def serve_command(layout: str, devices: int = 2, model: str = "demo", *, mode: str = "static") -> list[str]:
    """The command line of a server on a free port, on which everything may wait: refusals measure nothing.
    What is measured is the layout named, unless the mode is another one."""
    return [
        sys.executable, "-m", "dynamictp", "serve", model, "--devices", str(devices), "--layout", layout,
        "--port", "0", "--max-wait-s", "0", "--mode", mode,
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
        environment: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Starts the process. `on_line` gets each line of its output until it is ready, from a thread.
        `environment` is added to this process's.
        """
        self._clock = clock or SystemClock()
        self._on_line = on_line
        self._lines: list[str] = []
        self._ready: Future[str] = Future()
        self._started_s = self._clock.now()
        self._ready_s: float | None = None
        self._stopped = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            text=True,
            errors="replace",
        )
        self._pidfd = os.pidfd_open(self._process.pid)
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

    @property
    def lines(self) -> Sequence[str]:
        """All of the server's output so far, without line ends."""
        return self._lines

    def last_lines(self) -> str:
        """The end of the server's output."""
        return "\n".join(self._lines[-_SHOWN_LINES:])

    def send_signal(self, number: signal.Signals) -> None:
        """To the server alone, not to the processes it started. Nothing happens when it has ended."""
        if not self._stopped:
            signal.pidfd_send_signal(self._pidfd, number)

    def wait_exit(self, timeout_s: float) -> int:
        """The exit code, negative for a signal's number. The process is not reaped before `stop`, so that
        its group can still be ended. Raises FatalError when the time is up.
        """
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            raise FatalError(f"the server did not end within {timeout_s:g} s\n{self.last_lines()}")
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def stop(self) -> None:
        """SIGTERM, a wait, then SIGKILL for what is left of the group. Harmless when called twice.

        Ctrl-C is ignored meanwhile: a second one must not leave processes behind.
        """
        if self._stopped:
            return
        previous = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._end_group()
        finally:
            self._stopped = True
            if previous is not None:
                signal.signal(signal.SIGINT, previous)
        self._pump.join(timeout=1.0)
        if self._process.stdout is not None and not self._pump.is_alive():
            self._process.stdout.close()

    def _end_group(self) -> None:
        try:
            self.send_signal(signal.SIGTERM)
            with suppress(FatalError):
                self.wait_exit(_TERM_WAIT_S)
        finally:
            # Before the leader is reaped its id can't be taken by an unrelated group.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._pidfd)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
