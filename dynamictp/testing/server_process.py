"""A real server as a child process of a test: its output, its descendants, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

import psutil

from dynamictp.bench import server
from dynamictp.errors import FatalError

START_S = 90.0
"""A guard against servers that never start: on a busy machine a start takes forty seconds instead of ten."""
ANONYMOUS_LIMIT_BYTES = 2 << 20
"""How much a worker's anonymous memory may differ between two moments of rest."""

REST_POLL_S = 1.0
"""More than the time after which an idle worker gives unused memory back."""
REST_POLLS = 10

Footprint = dict[int, dict[str, int]]
"""By process id: anonymous memory in bytes, descriptors, threads, and the mappings of each file (code, shared
memory), under the name `mappings of FILE`.

`anonymous_mappings` is reported and not judged: allocators split and join them. Their memory is judged.
"""
_UNJUDGED = "anonymous_mappings"


class ServerProcess(server.ServerProcess):
    """`python -m dynamictp ARGUMENTS`, on a free port unless the arguments name one.

    In static mode, unless they name another one or a file: layouts change when the test says so.

    Entering waits until it is ready at `url`; leaving ends it.
    """

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        port = () if "--port" in arguments else ("--port", "0")
        mode = () if {"--mode", "--config"} & set(arguments) else ("--mode", "static")
        command = [sys.executable, "-m", "dynamictp", *arguments, *port, *mode]
        super().__init__(command, environment=environment)
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self.url = self.wait_ready(START_S)
        except FatalError:
            self.stop()
            raise
        return self

    def wait_output_end(self, timeout_s: float = 10.0) -> str:
        """All output, once the server and every process that shares its output have ended.

        Raises TimeoutError when one holds on to it.
        """
        self._pump.join(timeout_s)
        if self._pump.is_alive():
            raise TimeoutError(f"output still open after {timeout_s:g} s; descendants: {self.children()}")
        return "\n".join(self.lines)

    # ------------------------------------------------------------ leaks

    def children(self) -> dict[int, str]:
        """Process id → command line of every descendant."""
        found: dict[int, str] = {}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    found[child.pid] = " ".join(child.cmdline())
        return found

    def footprint(self) -> Footprint:
        """What every descendant holds now."""
        return {pid: footprint_of(pid) for pid in self.children()}

    async def footprint_at_rest(self) -> Footprint:
        """What every descendant holds once that does not change any more: idle workers give memory back."""
        last = self.footprint()
        for _ in range(REST_POLLS):
            await asyncio.sleep(REST_POLL_S)
            now = self.footprint()
            if now == last:
                return now
            last = now
        return last

    async def lasting_leaks(self, before: Footprint) -> list[str]:
        """`leaks` at rest."""
        await self.footprint_at_rest()
        return self.leaks(before)

    def leaks(self, before: Footprint) -> list[str]:
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
                if name == _UNJUDGED:
                    continue
                worker = role == "dynamictp.worker"
                was = before[pid].get(name, 0)
                if value - was > allowed and (worker or name in ("descriptors", "threads")):
                    found.append(f"{role}: {name} went from {was} to {value}")
        return found

    def growth(self, before: Footprint) -> list[str]:
        """What the workers held at `before` and hold now, a line each, for a report."""
        after, lines = self.footprint(), []
        for pid, command in self.children().items():
            if "dynamictp.worker" in command and pid in before and pid in after:
                was, now = before[pid], after[pid]
                lines.append(
                    f"worker {pid}: anonymous memory {was['anonymous_bytes'] / 1e6:.1f} to "
                    f"{now['anonymous_bytes'] / 1e6:.1f} MB in {was[_UNJUDGED]} to {now[_UNJUDGED]} "
                    f"mappings, of files {_files(was)} to {_files(now)}, descriptors {was['descriptors']} to "
                    f"{now['descriptors']}, threads {was['threads']} to {now['threads']}"
                )
        return lines


def _files(footprint: dict[str, int]) -> int:
    return sum(count for name, count in footprint.items() if name.startswith("mappings of "))


def footprint_of(pid: int) -> dict[str, int]:
    """What the process holds now, as a value of `Footprint`."""
    status = {}
    with open(f"/proc/{pid}/status", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            status[name] = value.strip()
    with open(f"/proc/{pid}/maps", encoding="utf-8") as lines:
        # address, permissions, offset, device, inode, path: anonymous ones have inode 0
        fields = [line.rstrip("\n").split(maxsplit=5) for line in lines]
    files = Counter(f"mappings of {field[5]}" for field in fields if field[4] != "0")
    return {
        "anonymous_bytes": int(status["RssAnon"].split()[0]) << 10,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        _UNJUDGED: len(fields) - files.total(),
        **files,
    }
