"""The gate in one process: engine and workers as threads, a tiny random model, hundreds of switches."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynamictp.messages import (
    Body,
    CancelRequest,
    CancelSwitch,
    Outputs,
    RampSettings,
    RequestEnd,
    SamplingParams,
    SetLayout,
    SubmitRequest,
    SwitchStatus,
    pack_tokens,
)
from dynamictp.testing.cluster import ThreadedCluster
from dynamictp.testing.gate import LAYOUTS, GateReport, GateRequest, Stream, make_requests
from dynamictp.testing.harness import TINY

MOST_LIVE = 10
DEVICES = 3
RAMP = RampSettings(observe_s=0.004, settle_s=0.002, min_finished=1_000_000, probe_s=60.0)
"""Short, and its latency gate off: times of threads on a busy machine say nothing."""
TAKE_BACK = 0.004
"""Chance in each turn that the switch in flight is cancelled."""


class _Client:
    """Plays the server: keeps the streams of live requests and the state of the switch."""

    def __init__(self, cluster: ThreadedCluster, requests: Sequence[GateRequest]) -> None:
        self.cluster = cluster
        self.requests = requests
        self.live: dict[str, tuple[int, Stream, int | None]] = {}
        self.ended: list[tuple[int, Stream, bool]] = []
        self.switching = ""
        """Id of the switch in flight."""
        self.statuses: list[SwitchStatus] = []
        self._count = 0

    def submit(self, index: int, cancel_after: int | None = None) -> None:
        request = self.requests[index]
        self._count += 1
        name = f"r{self._count}"
        sampling = SamplingParams(max_tokens=request.max_tokens, logprobs=2, **request.sampling)
        self.live[name] = (index, Stream(), cancel_after)
        self.cluster.send(
            SubmitRequest(name, 1, pack_tokens(request.prompt), len(request.prompt), sampling, arrival_s=0.0)
        )

    def switch(self, name: str, layout: str, drain_deadline_s: float, *, ramp: bool) -> None:
        self.switching = name
        self.cluster.send(SetLayout(name, layout, drain_deadline_s=drain_deadline_s, ramp=ramp))

    def take_back(self) -> None:
        self.cluster.send(CancelSwitch(self.switching))

    def pump(self, timeout_s: float = 0.05) -> None:
        for body in self.cluster.pump(timeout_s):
            self._take(body)

    def _take(self, body: Body) -> None:
        if isinstance(body, SwitchStatus):
            self.statuses.append(body)
            if body.switch_id == self.switching and body.outcome:
                self.switching = ""
        if not isinstance(body, Outputs):
            return
        for event in body.tokens:
            if event.request_id not in self.live:
                continue
            _, stream, cancel_after = self.live[event.request_id]
            if event.position != len(stream.tokens):
                stream.error = f"position {event.position} after {len(stream.tokens)} tokens"
            stream.tokens.append(event.token)
            if event.logprobs is not None:
                stream.logprobs += [event.logprobs.logprob, *(value for _, value in event.logprobs.top)]
            served = event.served
            stream.tp_min, stream.tp_max = served.tp_min, served.tp_max
            stream.handovers, stream.recomputes = served.handovers, served.recomputes
            if len(stream.tokens) == cancel_after:
                self.cluster.send(CancelRequest(event.request_id, 1))
        for end in body.ends:
            self._end(end)

    def _end(self, end: RequestEnd) -> None:
        index, stream, _ = self.live.pop(end.request_id)
        stream.finish = end.reason
        if end.reason == "error":
            stream.error = end.error
        self.ended.append((index, stream, end.reason == "cancelled"))


def reference_streams(requests: Sequence[GateRequest], kernel_level: str) -> list[Stream]:
    """Every request alone, one after the other, on an undisturbed `tp1`."""
    streams = []
    with ThreadedCluster(devices=1, blocks=64, kernel_level=kernel_level) as cluster:
        client = _Client(cluster, requests)
        for index in range(len(requests)):
            client.submit(index)
            while client.live:
                client.pump()
            streams.append(client.ended.pop()[1])
    return streams


def run_threaded_gate(seed: int, switches: int, *, blocks: int = 36, kernel_level: str = "") -> GateReport:
    """`switches` random switches under random requests; the arena is small, so requests are preempted."""
    report = GateReport(seed)
    rng = random.Random(seed)
    requests = make_requests(seed, 60, TINY.vocab, longest_prompt=150, longest_output=40)
    references = reference_streams(requests, kernel_level)
    with ThreadedCluster(devices=DEVICES, blocks=blocks, kernel_level=kernel_level, ramp=RAMP) as cluster:
        client = _Client(cluster, requests)
        next_switch = 0.0
        while report.switches < switches or client.live or client.switching:
            busy = report.switches < switches
            if busy and len(client.live) < MOST_LIVE and rng.random() < 0.4:
                cancel = rng.randint(1, 12) if rng.random() < 1 / 6 else None
                client.submit(rng.randrange(len(requests)), cancel)
            if busy and not client.switching and rng.random() < next_switch:
                deadline_s = rng.choice((0.0, 0.0, 0.005, 0.05))
                ramp = rng.random() < 0.25
                client.switch(f"s{report.switches}", rng.choice(LAYOUTS), deadline_s, ramp=ramp)
                report.switches += 1
                next_switch = rng.choice((0.02, 0.2, 1.0))
            if client.switching and rng.random() < TAKE_BACK:
                client.take_back()
            next_switch = next_switch or 0.2
            client.pump()
            for index, stream, cancelled in client.ended:
                report.add(index, references[index], stream, cancelled)
            client.ended.clear()
        # A cancelled request holds its pages until the steps that name it are complete.
        while not (cluster.core.layouts.settled and all(d.empty for d in cluster.core.fleet.live())):
            client.pump()
        cluster.core.check_integrity()
        pool = cluster.core.pool
        if pool.free + pool.cached != pool.total:
            report.faults.append(f"{pool.free} free and {pool.cached} cached of {pool.total} blocks")
        ramped: set[str] = set()
        for status in client.statuses:
            if status.ramp_share == 1.0:
                ramped.add(status.switch_id)
            report.cancelled_switches += status.outcome == "cancelled"
            if status.outcome in ("failed", "rolled_back"):
                report.faults.append(f"switch {status.switch_id} {status.outcome}: {status.error}")
            if status.weight_bytes_copied:
                report.faults.append(f"switch {status.switch_id} copied {status.weight_bytes_copied} bytes")
            if "commit" in status.phases_ms and status.outcome == "committed":
                report.commit_ms.append(status.phases_ms["commit"])
        report.ramped = len(ramped)
    return report
