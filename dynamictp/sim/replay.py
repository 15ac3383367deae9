"""A recorded run of the real server, played again by the simulator.

The record is what a benchmark of a dynamic server saves (`bench run --json`: who asked for what and when,
what became of it, the layout over time) and the server's journal (`serve --journal`: its facts, parameters
and measured steps). The simulated pool gets the recorded arrivals, parameters, first layout and planner's
state, and the step times of the journal (`speeds`). What it has to predict is batching, queues, routing, and
every decision of the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec

from dynamictp.bench.record import Bench, LayoutSample, Run, read_json
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.watcher import changes_of
from dynamictp.config import ServeConfig
from dynamictp.control.capacity import CostBook
from dynamictp.control.journal import Entry, Head, Line, read_journal
from dynamictp.control.planner import decide
from dynamictp.control.state import PlannerState
from dynamictp.control.values import PoolSnapshot, StepSample
from dynamictp.cost.calibration import Calibration
from dynamictp.errors import ConfigError
from dynamictp.sim.checks import check_integrity
from dynamictp.sim.collect import Balance
from dynamictp.sim.pool import Setup, SimPool
from dynamictp.sim.requests import SimRequest
from dynamictp.sim.speeds import calibrated, drift_of, with_host

SIMULATED = "simulated"


class Recording(msgspec.Struct, frozen=True):
    """A run of the real server, and what its planner saw."""

    bench: Bench
    head: Head
    entries: tuple[Entry, ...]

    @property
    def run(self) -> Run:
        return self.bench.runs[0]

    @property
    def steps(self) -> list[StepSample]:
        """Measured steps that had their devices to themselves."""
        return [sample for entry in self.entries for sample in entry.snapshot.steps if sample.exclusive]


def read_recording(journal: Path, record: Path) -> Recording:
    """Raises `ConfigError` for files that are not a journal and a benchmark's record of one open-loop run,
    and where the planner's parameters were changed during the run."""
    bench = read_json(record)
    if len(bench.runs) != 1 or bench.runs[0].users:
        raise ConfigError(f"{record}: expected one run in an open loop")
    lines = list(read_journal(journal))
    if not lines or not isinstance(lines[0], Head):
        raise ConfigError(f"{journal}: expected a journal that begins with its head")
    run = bench.runs[0]
    head, *rest = lines[_head_of(lines, run.origin_s) :]
    assert isinstance(head, Head)
    entries: list[Entry] = []
    for line in rest:
        if isinstance(line, Entry):
            entries.append(line)
        elif (line.facts, line.config) != (head.facts, head.config):
            if run.origin_s and entries and entries[-1].snapshot.time_s >= run.origin_s + run.load_s:
                break
            raise ConfigError(f"{journal}: the planner's parameters were changed during the run")
    if not entries:
        raise ConfigError(f"{journal} holds no decision")
    return Recording(bench, head, tuple(entries))


def _head_of(lines: Sequence[Line], origin_s: float) -> int:
    """Index of the last head before the run: servers add to the journal of those before them, and a reload
    writes another one."""
    found = 0
    for index, (line, after) in enumerate(pairwise(lines)):
        if isinstance(line, Head) and isinstance(after, Entry) and after.snapshot.time_s <= origin_s:
            found = index
    return found


def replay(recording: Recording, *, calibration: Calibration | None = None, seed: int = 0) -> Bench:
    """The recorded run and the simulated one, side by side as the benchmark shows them."""
    setup = setup_of(recording, calibration, seed)
    run = recording.run
    pool = SimPool(setup)
    requests = [_request(result, i, setup.start_s) for i, result in enumerate(run.results)]
    order = sorted(requests, key=lambda request: request.arrival_s)
    outcome = pool.run(order, max(run.end_s, run.load_s))
    balance = Balance(arrived=len(requests), refused=outcome.refused, finished=len(outcome.finished))
    balance.outputs = sum(request.output for request in outcome.finished)
    check_integrity(pool, balance)
    results = tuple(_result(old, new, setup.start_s) for old, new in zip(run.results, requests, strict=True))
    simulated = replace(
        run,
        label=SIMULATED,
        results=results,
        samples=tuple(_samples(pool, setup.start_s)),
        switches=(),
    )
    return replace(recording.bench, runs=(run, simulated))


def setup_of(recording: Recording, calibration: Calibration | None = None, seed: int = 0) -> Setup:
    """The recorded pool: its step times from `calibration`, else from the journal's own steps."""
    head, facts = recording.head, recording.head.facts
    state, first = _at_origin(recording)
    measured = calibration or calibrated(facts, recording.steps)
    truth = msgspec.structs.replace(facts, calibration=with_host(measured, recording.run))
    drift, noise = drift_of(msgspec.structs.replace(facts, calibration=measured), recording.entries)
    return Setup(
        facts=truth,
        believed=facts,
        devices=first.devices_total,
        legal=first.legal,
        layout=first.layout,
        config=head.config,
        mode=first.mode,
        noise=noise,
        drift=drift,
        start_s=recording.run.origin_s or first.time_s,
        state=state,
        seed=seed,
        max_wait_s=_max_wait_s(recording.run.server.command),
    )


def _at_origin(recording: Recording) -> tuple[PlannerState, PoolSnapshot]:
    """The planner's state and the pool when the run began: the journal before it is decided anew."""
    head, first = recording.head, recording.entries[0].snapshot
    state, cost = head.state, CostBook(head.facts)
    for entry in recording.entries:
        first = entry.snapshot
        if first.time_s >= recording.run.origin_s:
            break
        _, state = decide(first, state, head.config, cost)
    return state, first


def _max_wait_s(command: Sequence[str]) -> float:
    """What the recorded server was told, in one word (`=`) or two; its default where it was told nothing."""
    words = [word for part in command for word in part.split("=", 1)]
    if "--max-wait-s" not in words:
        return ServeConfig().max_wait_s
    return float(words[words.index("--max-wait-s") + 1])


def _request(result: Result, index: int, start_s: float) -> SimRequest:
    """As it was sent; its answer as long as it was, or was meant to be."""
    request = result.request
    output = result.output_tokens if result.failure is None else request.max_tokens
    priority = request.extra.get("priority", 0)
    return SimRequest(
        id=request.name or f"r{index}",
        arrival_s=start_s + max(result.sent_s, 0.0),
        prompt=max(result.prompt_tokens or request.prompt_tokens or 1, 1),
        output=max(output, 1),
        priority=priority if isinstance(priority, int) else 0,
        request_class=request.traffic_class,
        tenant=request.tenant,
    )


def _result(recorded: Result, request: SimRequest, start_s: float) -> Result:
    """What a client would have seen: the first token, then the others evenly until the end."""
    first, end = request.first_token_s, request.finished_s
    if first is None or end is None:
        failure = Failure(FailureKind.CUT, "the recorded run was over")
        return replace(recorded, chunk_s=(), chunk_tokens=(), failure=failure, domain=None, tp=None)
    first, end = first - start_s, end - start_s
    tokens = request.output
    gap = (end - first) / (tokens - 1) if tokens > 1 else 0.0
    return replace(
        recorded,
        end_s=end,
        chunk_s=tuple(round(first + i * gap, 6) for i in range(tokens)),
        chunk_tokens=(1,) * tokens,
        completion_tokens=tokens,
        prompt_tokens=request.prompt,
        failure=None,
        domain=None,
        tp=request.degrees[-1],
        report=None,
    )


def _samples(pool: SimPool, start_s: float) -> Iterable[LayoutSample]:
    for entry in pool.journal.last(1_000_000):
        snapshot = entry.snapshot
        switch = f"{snapshot.layout} → {snapshot.switch.to_layout}" if snapshot.switch is not None else ""
        yield LayoutSample(
            snapshot.time_s - start_s,
            snapshot.layout,
            snapshot.running.requests,
            snapshot.waiting.requests,
            switch,
        )


def switches(run: Run) -> int:
    """Changes of layout that were seen."""
    return len(changes_of(run))
