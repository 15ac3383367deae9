"""One soak: a server of its own, the crowd, samples of what every process holds, and the verdict."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx

from dynamictp.testing.gate import make_requests
from dynamictp.testing.gate_http import Progress, client_of, come_to_rest, reference_streams
from dynamictp.testing.quick_planner import config_files
from dynamictp.testing.server_process import Footprint, ServerProcess, footprint_of
from dynamictp.testing.soak.clients import Scene, everyone
from dynamictp.testing.soak.growth import Bound, Sample, Trend, trends

DEVICES = 3
SAMPLE_S = 5.0
REPORT_S = 60.0
WARM_SHARE = 0.5
"""Of the time, before what is held counts: allocators, caches and rings fill until then."""
SETTLING_S = 10.0
"""Of the second half: the load begins again."""
MB = 1e6
BOUNDS = {
    "anonymous MB": Bound(4.0, 0.02),
    "descriptors": Bound(8.0, 0.1),
    "threads": Bound(0.5),
    "mappings of files": Bound(0.5, 0.01),
    "mappings of shared memory": Bound(0.5),
    "processes": Bound(0.5),
    "files in the socket folder": Bound(1.0),
}
"""Rise over the second half, under load. `all:` is the sum over every process, also those replaced since."""
REST_BOUNDS = {"anonymous MB": 6.0, "descriptors": 2.0, "threads": 1.0, "mappings of shared memory": 0.0}
"""Difference between the rest before the second half and the one after it."""
MUST_HAPPEN = (
    "streams", "left", "refused in a flood", "slow readers", "cold connections", "odd requests",
    "switches answered 200", "switches taken back", "leases answered 201", "looks",
)  # fmt: skip
KEYS = "soak-key-1 acme 5\nsoak-key-2 bolt\nsoak-key-3 batch -10\n"
ADMIN_KEY = "soak-admin-key"


@dataclass
class SoakReport:
    """Outcome of one soak."""

    seed: int
    minutes: float
    count: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    """Reasons of the planner's last decisions."""
    samples: list[Sample] = field(default_factory=list)
    """Of the second half."""
    trends: list[Trend] = field(default_factory=list)
    at_rest: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def lines(self) -> Sequence[str]:
        counted = ", ".join(f"{name} {number}" for name, number in sorted(self.count.items()))
        return (
            f"seed {self.seed}, {self.minutes:g} minutes: {counted}",
            f"decisions: {', '.join(f'{reason} {n}' for reason, n in sorted(self.decisions.items()))}",
            f"over the second half, {len(self.samples)} samples: first, median, last, growth",
            *(trend.line() for trend in self.trends),
            "at rest, before the second half and after it:",
            *self.at_rest,
            f"faults {len(self.faults)}",
            *self.faults,
        )


async def run_soak(seed: int, minutes: float, progress: Progress = lambda text: None) -> SoakReport:
    """Half of the time to warm up, rest, the other half under observation, rest."""
    report = SoakReport(seed, minutes)
    half_s = minutes * 60 * WARM_SHARE
    with _server() as server:
        requests = make_requests(seed, 24, 49_152, longest_prompt=300, longest_output=100)
        keys = [line.split()[0] for line in KEYS.splitlines()]
        # Two at once: this server turns away what would wait long, on a slow machine too.
        references = await reference_streams(server.url, requests, keys[0], at_once=2)
        scene = Scene(
            server.url,
            keys,
            ADMIN_KEY,
            requests,
            references,
            random.Random(seed),
            report.count,
            report.faults,
        )
        await _play(server, scene, half_s, progress)
        before = await _rest(server, scene)
        report.samples = await _play(server, scene, half_s, progress)
        after = await _rest(server, scene)
        report.decisions = await _decisions(server.url)
        _judge(server, report, before, after)
    return report


@contextmanager
def _server() -> Iterator[ServerProcess]:
    with config_files(**{"keys": KEYS, "admin-keys": f"{ADMIN_KEY}\n"}) as folder:
        arguments = (
            "serve", "demo", "--devices", str(DEVICES), "--layout", "tp1", "--kv-memory", "96MiB",
            "--config", f"{folder}/planner.yaml", "--max-waiting", "64", "--max-wait-s", "8",
            "--api-key-file", f"{folder}/keys", "--admin-key-file", f"{folder}/admin-keys",
        )  # fmt: skip
        with ServerProcess(*arguments, environment={"DYNAMICTP_CHECK": "1"}) as server:
            yield server


async def _play(server: ServerProcess, scene: Scene, seconds: float, progress: Progress) -> list[Sample]:
    """The crowd for so long; what the processes held meanwhile."""
    scene.over.clear()
    scene.release_until_s = time.monotonic() + seconds * WARM_SHARE
    crowd = [asyncio.create_task(_guard(one(scene), scene)) for one in everyone()]
    samples: list[Sample] = []
    began, due_s = time.monotonic(), REPORT_S
    try:
        while (passed := time.monotonic() - began) < seconds:
            await asyncio.sleep(min(SAMPLE_S, seconds - passed))
            if passed >= min(SETTLING_S, seconds / 4):
                samples.append((passed, held(server)))
            if passed >= due_s:
                due_s += REPORT_S
                progress(f"{passed:.0f} s: {dict(scene.count)}")
    finally:
        scene.over.set()
        await asyncio.gather(*crowd)
    return samples


async def _guard(client: object, scene: Scene) -> None:
    """A client that breaks is a fault, not the end of the soak."""
    try:
        await client  # type: ignore[misc]
    except (httpx.HTTPError, OSError) as error:
        scene.wrong(f"a client broke: {error!r}")


async def _rest(server: ServerProcess, scene: Scene) -> dict[str, float]:
    """What is held when nobody asks for anything, in layout tp1."""
    async with client_of(server.url, scene.admin_key) as http:
        for lent in (await http.get("/admin/leases")).json()["leases"]:
            await http.delete(f"/admin/leases/{lent['id']}")
        # The planner may be about to switch.
        for _ in range(300):
            if (await http.put("/admin/layout", json={"layout": "tp1@0"})).status_code != 409:
                break
            await asyncio.sleep(0.1)
    await come_to_rest(server.url, scene.admin_key)
    await server.footprint_at_rest()
    return held(server)


async def _decisions(url: str) -> Counter[str]:
    async with client_of(url, ADMIN_KEY) as http:
        shown = (await http.get("/admin/decisions?last=10000")).json()["decisions"]
    return Counter(decision["reason"] for decision in shown)


# ------------------------------------------------------------ what is held


def held(server: ServerProcess) -> dict[str, float]:
    """By name: of server, engine and every worker, and of all processes together."""
    children = server.children()
    footprints: Footprint = {}
    for pid in (server.pid, *children):
        with suppress(FileNotFoundError, ProcessLookupError, KeyError):
            footprints[pid] = footprint_of(pid)
    values: dict[str, float] = {}
    total: Counter[str] = Counter()
    for pid, footprint in footprints.items():
        role = _role(pid, server.pid, children.get(pid, ""))
        figures = _figures(footprint)
        if _is_spare(role, figures):
            role = f"spare {pid}"
        for name, value in figures.items():
            values[f"{role}: {name}"] = value
            total[name] += value  # type: ignore[assignment]
    values |= {f"all: {name}": value for name, value in total.items() if name != "anonymous MB"}
    values["all: processes"] = len(footprints)
    folder = _socket_folder(children)
    if folder is not None:
        values["all: files in the socket folder"] = len(os.listdir(folder))
    return values


def _role(pid: int, server: int, command: str) -> str:
    if pid == server:
        return "server"
    if "dynamictp.engine" in command:
        return "engine"
    return f"worker {pid}" if "dynamictp.worker" in command else "other"


def _is_spare(role: str, figures: Mapping[str, float]) -> bool:
    """A worker that has mapped nothing waits for its first device."""
    return role.startswith("worker") and not figures["mappings of shared memory"]


def _figures(footprint: Mapping[str, int]) -> dict[str, float]:
    files = {name: count for name, count in footprint.items() if name.startswith("mappings of ")}
    return {
        "anonymous MB": footprint["anonymous_bytes"] / MB,
        "descriptors": footprint["descriptors"],
        "threads": footprint["threads"],
        "mappings of files": sum(files.values()),
        "mappings of shared memory": sum(n for name, n in files.items() if "/memfd:" in name),
    }


def _socket_folder(children: Mapping[int, str]) -> str | None:
    for command in children.values():
        words = command.split()
        if "dynamictp.engine" in words:
            return words[words.index("--sockets") + 1]
    return None


# ------------------------------------------------------------ verdict


def _judge(
    server: ServerProcess, report: SoakReport, before: Mapping[str, float], after: Mapping[str, float]
) -> None:
    report.trends = trends(report.samples, BOUNDS)
    report.faults += [f"{trend.name} grows: {trend.growth:+.2f}" for trend in report.trends if trend.grows]
    for name in sorted(before.keys() & after.keys()):
        bound = REST_BOUNDS.get(name.partition(": ")[2])
        if bound is None:
            continue
        difference = after[name] - before[name]
        line = f"{name:<34} {before[name]:9.1f} {after[name]:9.1f}   {difference:+8.2f} (bound {bound:g})"
        report.at_rest.append(line)
        if difference > bound:
            report.faults.append(f"{name} at rest went from {before[name]:.1f} to {after[name]:.1f}")
    report.faults += [f"nothing of '{name}' happened" for name in MUST_HAPPEN if not report.count[name]]
    if sum(n for reason, n in report.decisions.items() if reason not in ("hold", "")) == 0:
        report.faults.append("the planner decided nothing")
    report.faults += [f"the server says: {line}" for line in _complaints(server.lines)][:20]


def _complaints(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if " ERROR " in line or line.startswith("Traceback"):
            yield line
