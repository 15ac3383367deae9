"""A real server as a child process, for tests and benchmarks: ready when entered, gone when left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from types import TracebackType
from typing import Self

import psutil

READY = "DynamicTP ready: "
START_S = 60.0
STOP_S = 15.0
ANONYMOUS_LIMIT_BYTES = 2 << 20
"""How much a worker's anonymous memory may differ between two moments of rest."""


class ServerProcess:
    """`python -m dynamictp ARGUMENTS --port 0` in a process group of its own.

    `url` is where it listens. Its last lines are in `log`, for a failure's message.
    """

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        self.url = ""
        self.log: deque[str] = deque(maxlen=200)
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dynamictp", *self._arguments, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_S) or not self.url:
            self.close()
            raise RuntimeError("the server did not start:\n" + "\n".join(self.log))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    def close(self) -> None:
        """SIGTERM, then SIGKILL to the group."""
        process = self.process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._reader.join(STOP_S)
        if process.stdout:
            process.stdout.close()

    def _read(self) -> None:
        stdout = self.process.stdout
        for line in stdout or ():
            self.log.append(line.rstrip())
            if line.startswith(READY):
                self.url = line.removeprefix(READY).strip()
                self._ready.set()
        self._ready.set()

    # ------------------------------------------------------------ leaks

    def children(self) -> dict[int, str]:
        """Process id → command line of every descendant."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {child.pid: " ".join(child.cmdline()) for child in found}

    def footprint(self) -> dict[int, dict[str, int]]:
        """Anonymous memory in bytes, descriptors, threads and mappings of every descendant."""
        return {pid: _footprint(pid) for pid in self.children()}

    def leaks(self, before: dict[int, dict[str, int]]) -> list[str]:
        """What the descendants hold now beyond `before`."""
        found = []
        after = self.footprint()
        for pid, command in self.children().items():
            role = next((part for part in command.split() if part.startswith("dynamictp.")), command)
            if pid not in before:
                found.append(f"{role} is new")
                continue
            for name, value in after[pid].items():
                allowed = ANONYMOUS_LIMIT_BYTES if name == "anonymous_bytes" else 0
                worker = role == "dynamictp.worker"
                if value - before[pid][name] > allowed and (worker or name in ("descriptors", "threads")):
                    found.append(f"{role}: {name} went from {before[pid][name]} to {value}")
        return found


def _footprint(pid: int) -> dict[str, int]:
    status = {}
    with open(f"/proc/{pid}/status", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            status[name] = value.strip()
    with open(f"/proc/{pid}/maps", encoding="utf-8") as lines:
        mappings = sum(1 for _ in lines)
    return {
        "anonymous_bytes": int(status["RssAnon"].split()[0]) << 10,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "mappings": mappings,
    }
