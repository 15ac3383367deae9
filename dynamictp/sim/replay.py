"""A recorded run of the real server, played again by the simulator.

The record is what a benchmark of a dynamic server saves (`bench run --json`: who asked for what and when, what
became of it, the layout over time) and the server's journal (`serve --journal`: its facts, parameters and
measured steps). The simulated pool gets the recorded arrivals, parameters and first layout, and the step times
of the journal; what it has to predict is batching, queues, routing and every decision of the planner, which
knows and learns what the real one did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, stdev

import msgspec

from dynamictp.bench.record import Bench, LayoutSample, Run, read_json
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.watcher import changes_of
from dynamictp.control.calibrate import expected_s
from dynamictp.control.facts import PoolFacts
from dynamictp.control.journal import Entry, Head, read_journal
from dynamictp.control.values import StepSample
from dynamictp.cost.calibration import Calibration, CalibrationPoint
from dynamictp.cost.steps import StepModel
from dynamictp.errors import ConfigError
from dynamictp.sim.checks import check_integrity
from dynamictp.sim.collect import Balance
from dynamictp.sim.pool import Setup, SimPool
from dynamictp.sim.requests import SimRequest

SIMULATED = "simulated"
_LEAST_SAMPLES = 3
_TAIL = 8.0
"""A step that took so many times its median was interrupted from outside: it says nothing of the server."""


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
    """Raises `ConfigError` for files that are not a journal and a benchmark's record of one open-loop run."""
    bench = read_json(record)
    if len(bench.runs) != 1 or bench.runs[0].users:
        raise ConfigError(f"{record}: expected one run in an open loop")
    lines = list(read_journal(journal))
    if not lines or not isinstance(lines[0], Head):
        raise ConfigError(f"{journal}: expected a journal that begins with its head")
    entries = tuple(line for line in lines if isinstance(line, Entry))
    if not entries:
        raise ConfigError(f"{journal} holds no decision")
    return Recording(bench, lines[0], entries)


def replay(recording: Recording, *, calibration: Calibration | None = None, seed: int = 0) -> Bench:
    """The recorded run and the simulated one, side by side as the benchmark shows them."""
    setup = setup_of(recording, calibration, seed)
    run = recording.run
    pool = SimPool(setup)
    requests = [_request(result, i) for i, result in enumerate(run.results)]
    order = sorted(requests, key=lambda request: request.arrival_s)
    outcome = pool.run(order, max(run.end_s, run.load_s))
    balance = Balance(arrived=len(requests), finished=len(outcome.finished))
    balance.outputs = sum(request.output for request in outcome.finished)
    check_integrity(pool, balance)
    results = tuple(_result(old, new) for old, new in zip(run.results, requests, strict=True))
    simulated = replace(
        run,
        label=SIMULATED,
        results=results,
        samples=tuple(_samples(pool)),
        switches=(),
    )
    return replace(recording.bench, runs=(run, simulated))


def setup_of(recording: Recording, calibration: Calibration | None = None, seed: int = 0) -> Setup:
    """The recorded pool: its step times from `calibration`, else from the journal's own steps."""
    head, first = recording.head, recording.entries[0].snapshot
    facts = head.facts
    measured = calibration or calibrated(facts, recording.steps)
    truth = msgspec.structs.replace(facts, calibration=measured)
    noise = scatter(truth, recording.steps)
    return Setup(
        facts=truth,
        believed=facts,
        devices=first.devices_total,
        legal=first.legal,
        layout=first.layout,
        config=head.config,
        mode=first.mode,
        noise=noise,
        seed=seed,
        max_wait_s=_max_wait_s(recording.run.server.command),
    )


def calibrated(facts: PoolFacts, steps: Sequence[StepSample]) -> Calibration:
    """Measured ÷ expected times of steps by degree and size, means within powers of two.

    Raises `ConfigError` when there are no steps to learn from.
    """
    plain = msgspec.structs.replace(facts, calibration=None)
    models: dict[tuple[int, int], StepModel] = {}
    ratios: dict[tuple[int, bool, int], list[tuple[int, float]]] = {}
    for sample in steps:
        size = sample.rows + sample.prefill_tokens
        if sample.seconds <= 0 or not size:
            continue
        key = sample.tp, max(sample.active_devices, sample.tp)
        if key not in models:
            models[key] = StepModel(plain.domain(*key, None))
        ratio = sample.seconds / expected_s(sample, models[key])
        bucket = sample.tp, sample.prefill_tokens > 0, size.bit_length()
        ratios.setdefault(bucket, []).append((size, ratio))
    points: list[CalibrationPoint] = []
    for (tp, prefill, _), found in sorted(ratios.items()):
        if len(found) < _LEAST_SAMPLES:
            continue
        size = round(math.exp(fmean(math.log(size) for size, _ in found)))
        ratio = _mean_without_stalls([ratio for _, ratio in found])
        points.append(CalibrationPoint("base", tp, size, ratio))
        points.append(CalibrationPoint("prompt_attention" if prefill else "attention", tp, size, ratio))
    if not points:
        raise ConfigError("the journal holds too few measured steps to calibrate with")
    return Calibration(
        facts.shape.name, facts.device.name, "steps of a recorded run", _merged(points)
    )


def _mean_without_stalls(ratios: Sequence[float]) -> float:
    limit = _TAIL * median(ratios)
    return fmean(ratio for ratio in ratios if ratio <= limit)


def _merged(points: Iterable[CalibrationPoint]) -> tuple[CalibrationPoint, ...]:
    """One point for each operation, degree and size: decode and prefill steps of one size are averaged."""
    by_key: dict[tuple[str, int, int], list[CalibrationPoint]] = {}
    for point in points:
        by_key.setdefault((point.op, point.tp, point.size), []).append(point)
    return tuple(
        msgspec.structs.replace(same[0], ratio=fmean(point.ratio for point in same))
        for _, same in sorted(by_key.items())
    )


def scatter(facts: PoolFacts, steps: Sequence[StepSample]) -> float:
    """Standard deviation of the logarithm of measured ÷ expected step times, stalls left out."""
    models: dict[tuple[int, int], StepModel] = {}
    logs: list[float] = []
    for sample in steps:
        if sample.seconds <= 0 or not sample.rows + sample.prefill_tokens:
            continue
        key = sample.tp, max(sample.active_devices, sample.tp)
        if key not in models:
            models[key] = StepModel(facts.domain(*key, facts.calibration))
        logs.append(math.log(sample.seconds / expected_s(sample, models[key])))
    kept = [value for value in logs if abs(value) <= math.log(_TAIL)]
    return stdev(kept) if len(kept) > 1 else 0.0


def _max_wait_s(command: Sequence[str]) -> float:
    """What the recorded server was told, its default where it was told nothing."""
    if "--max-wait-s" in command:
        return float(command[command.index("--max-wait-s") + 1])
    return 10.0


def _request(result: Result, index: int) -> SimRequest:
    """As it was sent; its answer as long as it was, or was meant to be."""
    request = result.request
    output = result.output_tokens if result.failure is None else request.max_tokens
    priority = request.extra.get("priority", 0)
    return SimRequest(
        id=request.name or f"r{index}",
        arrival_s=max(result.sent_s, 0.0),
        prompt=max(result.prompt_tokens or request.prompt_tokens or 1, 1),
        output=max(output, 1),
        priority=priority if isinstance(priority, int) else 0,
        request_class=request.traffic_class,
        tenant=request.tenant,
    )


def _result(recorded: Result, request: SimRequest) -> Result:
    """What a client would have seen: the first token, then the others evenly until the end."""
    first, end = request.first_token_s, request.finished_s
    if first is None or end is None:
        failure = Failure(FailureKind.CUT, "the recorded run was over")
        return replace(recorded, chunk_s=(), chunk_tokens=(), failure=failure, domain=None, tp=None)
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


def _samples(pool: SimPool) -> Iterable[LayoutSample]:
    for entry in pool.journal.last(1_000_000):
        snapshot = entry.snapshot
        switch = f"{snapshot.layout} → {snapshot.switch.to_layout}" if snapshot.switch is not None else ""
        yield LayoutSample(
            snapshot.time_s, snapshot.layout, snapshot.running.requests, snapshot.waiting.requests, switch
        )


def switches(run: Run) -> int:
    """Changes of layout that were seen."""
    return len(changes_of(run))
