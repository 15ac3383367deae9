"""A child process that an event loop waits for and signals, and that can't be confused with another one.

asyncio's own waits for each child in a thread, while its `send_signal` polls in the loop's: whichever comes
first takes the exit code from the other, and a late signal may reach a stranger with the same id. Here one
owner reaps, told by a pidfd.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from dynamictp.errors import ResourceError
from dynamictp.process import PARENT_ENV

log = logging.getLogger(__name__)


class Spawner:
    """Starts processes from a thread of its own.

    A child inherits the priority of the thread that starts it and can't raise it again, and the event loop's
    thread lowers its own once it serves: this one keeps what it was made with. It must live as long as the
    children, since the kernel ends them when the thread that started them ends.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "spawner")
        self._thread.submit(lambda: None).result()  # made now, with the priority of now

    def start(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Call `start` in the thread; what it returns or raises."""
        return self._thread.submit(start).result()

    def close(self) -> None:
        """Call when no child runs any more."""
        self._thread.shutdown()


class Child:
    """`python -m MODULE ARGUMENTS`, started at once. Owner of the process's id; lives in one event loop."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        spawner: Spawner | None = None,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        """The child inherits `descriptors` under the same numbers. `environment` is added to this one's.
        Without a `spawner` this thread starts it.

        Raises `ResourceError` when the machine does not let it start.
        """
        self.name = name
        self._loop = asyncio.get_running_loop()

        def start() -> subprocess.Popen[bytes]:
            with _interrupt_blocked():
                return subprocess.Popen(
                    [sys.executable, "-m", *arguments],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stderr=stderr,
                    env={**os.environ, **(environment or {}), PARENT_ENV: str(os.getpid())},
                )

        try:
            self._process = start() if spawner is None else spawner.start(start)
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            raise ResourceError(f"can't start {name}: {error.strerror}") from error
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """The exit code, negative for a signal's number."""
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self.ended.done()

    def signal(self, number: signal.Signals) -> None:
        """Nothing happens when it has ended."""
        if self.running:
            signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        if not self.ended.done():
            self.ended.set_result(code)


@contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """A child started here never sees Ctrl-C, which a terminal sends to the whole group: only the supervisor
    acts on it. The mask is inherited through exec; for this process the signal only waits.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


async def end_children(children: Iterable[Child], patience_s: float) -> None:
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


def describe_end(code: int) -> str:
    """An exit code in words, negative for a signal's number."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
