"""Random faults on a real server: `python -m dynamictp.testing.faults --faults 100`.

Streams run and the layout changes all the time, by hand (with ramps and without) or by the planner, and
devices are leased, while workers and the engine are killed, stopped, or made to raise in a step. Every stream
must bring the bits of a quiet run. A run is given by its seed, as far as the machine's timing lets it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import click
import httpx

from dynamictp.testing.gate import LAYOUTS, GateReport, GateRequest, Stream, make_requests
from dynamictp.testing.gate_http import Progress, client_of, play, reference_streams, wait_quiet
from dynamictp.testing.quick_planner import config_files
from dynamictp.testing.server_process import ServerProcess

STREAMS = 16
DEVICES = 3
EFFECT_S = 5.0
"""A worker that was asked to fail in its next step has none by then."""
WARM_S = 3.0
QUIET_S = 10.0
SETTLED_S = 60.0
"""A fault from which the streams have not recovered by then is reported."""
KINDS = {
    "kill worker": 4,
    "stop worker": 3,
    "raise in worker": 3,
    "loop in worker": 2,
    "kill engine": 2,
    "stop engine": 1,
    "kill spare": 1,
}
"""Kinds of fault, and how often each comes."""
RAMPED = 0.4
PLANNED = 0.2
"""Shares of the switches by hand, and of those that hand the layout to the planner."""
LEAVING = 0.1
"""Share of the clients that go away in mid-stream."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1, "loop": signal.SIGUSR2}
_DESCRIPTORS_MORE = 8
"""Connections of clients come and go: so many more descriptors are no leak."""


@dataclass
class FaultReport:
    """Outcome of one run."""

    gate: GateReport
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    """By kind: the longest pause that a stream saw after a fault."""
    silence_s: list[float] = field(default_factory=list)
    """After each fault: the longest time in which no stream at all brought a token."""
    quiet_s: float = 0.0
    """Longest pause of a stream before the first fault: what the machine's load alone does."""
    leases: int = 0
    switches_failed: int = 0
    """Switches that a fault took back."""

    @property
    def faults(self) -> int:
        return sum(map(len, self.recovery_s.values()))

    def lines(self) -> Sequence[str]:
        every = sorted(value for values in self.recovery_s.values() for value in values)
        kinds = [
            f"  {kind}: {len(values)}, P50 {_percentile(values, 50):.2f} s, longest {max(values):.2f} s"
            for kind, values in sorted(self.recovery_s.items())
        ]
        return (
            *self.gate.lines(),
            f"{self.faults} faults, {self.switches_failed} switches taken back, {self.leases} leases",
            f"tokens flow again: P50 {_percentile(self.silence_s, 50):.2f} s, "
            f"P99 {_percentile(self.silence_s, 99):.2f} s",
            f"longest pause of a stream: P50 {_percentile(every, 50):.2f} s, "
            f"P99 {_percentile(every, 99):.2f} s, without faults {self.quiet_s:.2f} s",
            *kinds,
        )


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


class _Clients:
    """Always as many streams as asked for; knows when each last brought a token."""

    def __init__(
        self, http: httpx.AsyncClient, requests: Sequence[GateRequest], references: Sequence[Stream],
        report: GateReport,
    ) -> None:  # fmt: skip
        self._http = http
        self._requests = requests
        self._references = references
        self._report = report
        self._rng = random.Random(report.seed + 3)
        self._numbers = count()
        self._done = False
        self.last_token: dict[int, float] = {}
        """Of each live stream: when its last token came, or when it began."""
        self.longest_gap = 0.0
        """Longest pause of any stream since `watch`, as far as it lies after that."""
        self.longest_silence = 0.0
        """The same for all streams together."""
        self._watched_from = 0.0
        self._last_of_any = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self) -> None:
        self.longest_gap = self.longest_silence = 0.0
        self._watched_from = time.monotonic()

    def start(self, streams: int) -> None:
        self._tasks = [asyncio.create_task(self._one_after_the_other()) for _ in range(streams)]

    async def stop(self) -> None:
        """Let the live streams end."""
        self._done = True
        await asyncio.gather(*self._tasks)

    async def _one_after_the_other(self) -> None:
        while not self._done:
            index = self._rng.randrange(len(self._requests))
            cancel_after = self._rng.randint(0, 20) if self._rng.random() < LEAVING else None
            number = next(self._numbers)
            self.last_token[number] = time.monotonic()
            token = functools.partial(self._token, number)
            stream = await play(self._http, self._requests[index], cancel_after, token)
            self._token(number)
            del self.last_token[number]
            self._report.add(index, self._references[index], stream, cancelled=cancel_after is not None)

    def _token(self, number: int) -> None:
        now = time.monotonic()
        since = max(self.last_token[number], self._watched_from)
        self.longest_gap = max(self.longest_gap, now - since)
        self.longest_silence = max(self.longest_silence, now - max(self._last_of_any, self._watched_from))
        self._last_of_any = now
        self.last_token[number] = now


class _Disturber:
    """Injects faults and switches until there were enough of the former."""

    def __init__(
        self, server: ServerProcess, admin: httpx.AsyncClient, clients: _Clients, report: FaultReport
    ) -> None:
        self._server = server
        self._admin = admin
        self._clients = clients
        self._report = report
        self._rng = random.Random(report.gate.seed + 2)
        self._pending: list[tuple[int, str, int]] = []
        """Strikes whose effect is to be awaited: process, what was done to it, steps failed before."""

    async def run(self, faults: int, progress: Progress) -> None:
        operators = [
            asyncio.create_task(self._switch_all_the_time()),
            asyncio.create_task(self._lease_all_the_time()),
        ]
        try:
            await asyncio.sleep(WARM_S)
            self._clients.watch()
            await asyncio.sleep(QUIET_S)
            self._report.quiet_s = self._clients.longest_gap
            while self._report.faults < faults:
                await asyncio.sleep(self._rng.uniform(0.0, 1.5))
                progress(await self._fault())
        finally:
            for operator in operators:
                operator.cancel()
            await asyncio.gather(*operators, return_exceptions=True)
            # Streams that are left may need every device.
            for lent in (await self._admin.get("/admin/leases")).json()["leases"]:
                await self._admin.delete(f"/admin/leases/{lent['id']}")

    async def _fault(self) -> str:
        """One fault, or now and then two at once; returns when every stream goes on, what happened."""
        rng, clients = self._rng, self._clients
        clients.watch()
        struck = time.monotonic()
        kinds = [await self._strike()]
        if rng.random() < 0.15:
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            kinds.append(await self._strike())
        # A third crash without a token in between would count as the requests' own fault.
        await asyncio.gather(*(self._effect(*strike) for strike in self._pending))
        self._pending.clear()
        recovered = await self._wait_settled(time.monotonic())
        self._report.silence_s.append(clients.longest_silence)
        for kind in filter(None, kinds):
            self._report.recovery_s.setdefault(kind, []).append(clients.longest_gap)
        what = f"{time.strftime('%H:%M:%S')} {' and '.join(filter(None, kinds)) or 'nothing to hit'}"
        took = f"silence {clients.longest_silence:.2f} s, longest pause {clients.longest_gap:.2f} s"
        if not recovered:
            waited = time.monotonic() - struck
            self._report.gate.faults.append(f"after {kinds} no recovery in {waited:.1f} s")
        return f"{what}: {took}, all well after {time.monotonic() - struck:.2f} s"

    async def _strike(self) -> str:
        """The kind of fault; empty when its victim was just not there."""
        kind = self._rng.choices(list(KINDS), list(KINDS.values()))[0]
        verb, victim = kind.split()[0], kind.split()[-1]
        workers = await self._worker_pids()
        found = {
            "worker": workers,
            "engine": self._pids("dynamictp.engine"),
            "spare": [pid for pid in self._pids("dynamictp.worker") if pid not in workers],
        }[victim]
        if not found:
            return ""
        pid = self._rng.choice(sorted(found))
        self._pending.append((pid, verb, self._failed_steps()))
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGNALS[verb])
        return kind

    async def _effect(self, pid: int, verb: str, failed_steps: int) -> None:
        """Returns when the process is gone, or has failed in a step: one that has nothing to do is killed."""
        patience_s = EFFECT_S if verb in ("raise", "loop") else SETTLED_S
        end = time.monotonic() + patience_s
        while pid in self._server.children():
            if verb == "raise" and self._failed_steps() > failed_steps:
                return
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)

    def _failed_steps(self) -> int:
        return sum(line.endswith("was asked to fail") for line in self._server.lines)

    async def _wait_settled(self, since: float) -> bool:
        """Every stream that lived at the fault has ended or brought a token after it, and all devices have
        workers again."""
        while time.monotonic() < since + SETTLED_S:
            await asyncio.sleep(0.05)
            late = min(self._clients.last_token.values(), default=since + 1.0)
            if late > since and await self._whole():
                return True
        return False

    async def _whole(self) -> bool:
        """All devices have workers, none of them stopped, the engine runs, and the layout serves."""
        response = await self._admin.get("/ready")
        if response.status_code != 200:
            return False
        layout = (await self._admin.get("/admin/layout")).json()
        pids = [device["pid"] for device in layout["devices"]]
        engine = self._pids("dynamictp.engine")
        if len(engine) != 1 or None in pids or any(map(_stopped, (*pids, *engine))):
            return False
        serving = [domain for domain in layout["domains"] if domain["state"] == "serving"]
        return bool(serving) and not any(domain["state"] == "failed" for domain in layout["domains"])

    async def _switch_all_the_time(self) -> None:
        rng = self._rng
        while True:
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            body: dict[str, Any] = {
                "layout": rng.choice(LAYOUTS),
                "wait": rng.choice(("none", "commit", "closed")),
                "drain_deadline_s": rng.choice((0.0, 0.0, 0.5)),
                "ramp": rng.random() < RAMPED,
            }
            if rng.random() < PLANNED:
                body = {"layout": "auto"}
            response = await self._admin.put("/admin/layout", json=body)
            gate = self._report.gate
            match response.status_code:
                case 200 | 202:
                    gate.switches += 1
                    phases = response.json()["switch"]["phases_ms"]
                    gate.ramped += body.get("ramp", False) and phases.get("ramp", 0.0) > 0.0
                case 409:
                    gate.refused += 1
                case 500 | 503 | 504:
                    self._report.switches_failed += 1
                case status:
                    gate.faults.append(f"switch to {body}: status {status} {response.text[:300]}")

    async def _lease_all_the_time(self) -> None:
        """Devices are lent for some seconds, as far as there are free ones; some leases are forgotten."""
        rng, admin = random.Random(self._report.gate.seed + 4), self._admin
        while True:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            asked = {"devices": 1, "notice_s": 1, "grace_s": 1, "wait_s": 2}
            response = await admin.post("/admin/leases", json=asked)
            if response.status_code == 201:
                self._report.leases += 1
                await asyncio.sleep(rng.uniform(0.5, 4.0))
                if rng.random() < 0.9:
                    await admin.delete(f"/admin/leases/{response.json()['id']}")
            elif response.status_code not in (409, 503):
                self._report.gate.faults.append(f"lease: status {response.status_code} {response.text[:300]}")

    async def _worker_pids(self) -> list[int]:
        layout = (await self._admin.get("/admin/layout")).json()
        return [device["pid"] for device in layout["devices"] if device["pid"] is not None]

    def _pids(self, module: str) -> list[int]:
        return [pid for pid, command in self._server.children().items() if f"-m {module} " in command]


def _stopped(pid: int) -> bool:
    with suppress(FileNotFoundError), open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return stat.read().rpartition(")")[2].split()[0] in "TZ"
    return True


async def run_faults(
    seed: int,
    faults: int,
    *,
    streams: int = STREAMS,
    distinct: int = 32,
    server_log: Path | None = None,
    progress: Progress = lambda text: None,
) -> FaultReport:
    """Reference on the quiet server, then the disturbed run on the same one."""
    report = FaultReport(GateReport(seed))
    arguments = ("serve", "demo", "--devices", str(DEVICES), "--layout", "tp1", "--kv-memory", "128MiB")
    # However long a recovery takes: nobody may be refused.
    patient = ("--max-wait-s", "0", "--crash-budget", "100000")
    environment = {"DYNAMICTP_CHECK": "1", "DYNAMICTP_FAULT": "signal"}
    with (
        config_files() as folder,
        ServerProcess(
            *arguments, *patient, "--config", f"{folder}/planner.yaml", environment=environment
        ) as server,
        _keeping_output(server, server_log),
    ):
        requests = make_requests(seed, distinct, 49_152, longest_prompt=300, longest_output=120)
        references = await reference_streams(server.url, requests)
        progress(f"reference: {sum(len(stream.tokens) for stream in references)} tokens")
        descriptors = _descriptors(server.pid)
        async with client_of(server.url) as http, client_of(server.url) as admin:
            clients = _Clients(http, requests, references, report.gate)
            clients.start(streams)
            try:
                await _Disturber(server, admin, clients, report).run(faults, progress)
            finally:
                await clients.stop()
        await wait_quiet(server.url)
        _judge_end(server, descriptors, report.gate)
    return report


@contextmanager
def _keeping_output(server: ServerProcess, file: Path | None) -> Iterator[None]:
    try:
        yield
    finally:
        if file is not None:
            file.write_text("\n".join(server.lines) + "\n", encoding="utf-8")


def _judge_end(server: ServerProcess, descriptors: int, gate: GateReport) -> None:
    """Nothing may have grown with the number of lives."""
    processes = len(server.children())
    if processes > DEVICES + 2:
        gate.faults.append(f"{processes} processes, expected engine, {DEVICES} workers and a spare")
    now = _descriptors(server.pid)
    if now > descriptors + _DESCRIPTORS_MORE:
        gate.faults.append(f"the server's descriptors went from {descriptors} to {now}")


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@click.command()
@click.option("--faults", default=100, show_default=True)
@click.option("--seed", type=int, help="default: random, printed")
@click.option("--streams", default=STREAMS, show_default=True)
@click.option("--server-log", type=click.Path(path_type=Path), help="file for the server's output")
def main(faults: int, seed: int | None, streams: int, server_log: Path | None) -> None:
    """Run faults on a real server and print what came of it."""
    seed = random.SystemRandom().randrange(1 << 20) if seed is None else seed
    click.echo(f"seed {seed}")
    report = asyncio.run(
        run_faults(seed, faults, streams=streams, server_log=server_log, progress=click.echo)
    )
    for line in report.lines():
        click.echo(line)
    sys.exit(bool(report.gate.faults))


if __name__ == "__main__":
    main()
