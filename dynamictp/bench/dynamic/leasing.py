"""Keeps an outside job on devices that a server can spare, by `dynamictp lease`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

AGAIN_S = 1.0
"""Between an end of the lease (none free, or revoked) and the next try."""
_LEAVE_S = 10.0


class LeasedJob:
    """Asks for one device again and again and runs the job on it. A context manager: leaving it ends both."""

    def __init__(self, url: str, progress: Path, notice_s: float) -> None:
        self._command = [
            sys.executable, "-m", "dynamictp", "lease", "--url", url, "--devices", "1",
            "--notice", f"{notice_s:g}", "--", sys.executable, "-m", "dynamictp.bench.dynamic.job",
            str(progress),
        ]  # fmt: skip
        self._done = threading.Event()
        self._running: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="leased-job")
        self.codes: list[int] = []
        """Exit codes of `dynamictp lease`: 75 none free, 76 revoked."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        running = self._running
        if running is not None and running.poll() is None:
            running.send_signal(signal.SIGTERM)
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive() and running is not None:
            os.killpg(running.pid, signal.SIGKILL)
            self._thread.join()

    def _run(self) -> None:
        while not self._done.is_set():
            self._running = subprocess.Popen(
                self._command, process_group=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if self._done.is_set():
                self._running.send_signal(signal.SIGTERM)
            self.codes.append(self._running.wait())
            self._done.wait(AGAIN_S)
