"""Runs a scenario: every configuration under every seed, one after another or in parallel processes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import msgspec

from dynamictp import __version__
from dynamictp.bench.workload.classes import Workload
from dynamictp.bench.workload.plan import plan_windows
from dynamictp.layout import LayoutSpec
from dynamictp.sim.checks import check_integrity
from dynamictp.sim.collect import Collector, Mark, Meter
from dynamictp.sim.machine import capacities_of, setup_of
from dynamictp.sim.outcome import CaseResult, Outcome
from dynamictp.sim.pool import Setup, SimPool
from dynamictp.sim.requests import SimRequest, requests_of
from dynamictp.sim.scenario import Configuration, Scenario

CHECK_EVERY_S = 3600.0
SAMPLE_EVERY_S = 5.0
"""The planner is told of one measured step of a kind in that time: without noise all are as predicted."""

Progress = Callable[[str, int, float], None]
"""(configuration, seed, share of the run that is done)."""


class Case(msgspec.Struct, frozen=True):
    """One run: a pool and what arrives. Times in seconds."""

    configuration: str
    seed: int
    setup: Setup
    workload: Workload
    load_s: float
    warmup_s: float = 0.0
    drain_s: float = 120.0
    capacities: dict[int, float] = {}
    """By degree: requests per second that one domain carries within the SLO, by the cost model."""


def simulate(scenario: Scenario, *, jobs: int = 1, progress: Progress | None = None) -> Outcome:
    """Everything that the scenario asks for. Same scenario, same outcome, however many jobs.

    Raises `ConfigError` for what makes no sense, `SimulationError` when a run contradicts itself.
    """
    scenario = scenario.expanded()
    cases = [
        case_of(scenario, configuration, seed)
        for seed in scenario.seeds
        for configuration in scenario.configurations
    ]
    tell = progress or _silent
    if jobs <= 1 or len(cases) == 1:
        found = [run_case(case, tell) for case in cases]
    else:
        found = _in_parallel(cases, min(jobs, len(cases)), tell)
    order = {configuration.label: i for i, configuration in enumerate(scenario.configurations)}
    found.sort(key=lambda result: (order[result.configuration], scenario.seeds.index(result.seed)))
    return Outcome(scenario, tuple(found), __version__)


def case_of(scenario: Scenario, configuration: Configuration, seed: int) -> Case:
    """Raises `ConfigError` when the model does not fit the configuration."""
    setup = setup_of(scenario, configuration, seed)
    return Case(
        configuration.label,
        seed,
        msgspec.structs.replace(setup, sample_every_s=0.0 if scenario.noise else SAMPLE_EVERY_S),
        scenario.workload(seed, setup.facts.shape.max_context),
        scenario.duration_s,
        scenario.warmup_s,
        scenario.drain_s,
        capacities_of(scenario, configuration),
    )


def run_case(case: Case, progress: Progress | None = None) -> CaseResult:
    """One run from an empty pool to the end of its drain. Raises `SimulationError`."""
    return play(case, arriving(case.workload), progress or _silent)


def play(case: Case, requests: Iterable[SimRequest], progress: Progress) -> CaseResult:
    """The case with these requests, in order of time."""
    collector = Collector(case.setup.config, case.warmup_s, case.load_s)
    pool = SimPool(case.setup, collector)
    meter = Meter(pool, collector, case.load_s)
    begin = Mark(0.0, 0.0, 0.0, 0.0)
    pool.feed(requests)
    pool.start()
    # Nothing here makes cycles that last; a collector that looks at every live request takes a tenth.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for stop_s in _stops(case):
            pool.loop.run(stop_s)
            check_integrity(pool, collector.balance)
            if stop_s == case.warmup_s:
                begin = Mark.of(pool)
            progress(case.configuration, case.seed, min(stop_s / case.load_s, 1.0))
        end = Mark.of(pool)
        end_s = _drain(pool, case)
    finally:
        if collecting:
            gc.enable()
    check_integrity(pool, collector.balance)
    for request in pool.node.live():
        collector.on_unfinished(request)
    return _result(case, pool, collector, meter, (begin, end, end_s))


def arriving(workload: Workload) -> Iterator[SimRequest]:
    """The workload's requests, planned a window at a time."""
    for plan in plan_windows(workload):
        yield from requests_of(plan)


def _stops(case: Case) -> Iterator[float]:
    """Times of checks: the warm-up's end, every hour, and the load's end."""
    times = {case.load_s}
    if case.warmup_s:
        times.add(case.warmup_s)
    steps = int(case.load_s // CHECK_EVERY_S)
    times |= {CHECK_EVERY_S * (i + 1) for i in range(steps)}
    return iter(sorted(times))


def _drain(pool: SimPool, case: Case) -> float:
    """Let what still runs finish, as long as it may. When that was over."""
    limit_s = case.load_s + case.drain_s
    while pool.loop.now() < limit_s and any(True for _ in pool.node.live()):
        pool.loop.run(min(pool.loop.now() + 1.0, limit_s))
    return pool.loop.now()


def _result(
    case: Case,
    pool: SimPool,
    collector: Collector,
    meter: Meter,
    marks: tuple[Mark, Mark, float],
) -> CaseResult:
    """`marks`: at the warm-up's and the load's end, and when all was over."""
    begin, end, end_s = marks
    facts = case.setup.facts
    result = CaseResult(
        configuration=case.configuration,
        seed=case.seed,
        mode=case.setup.mode,
        load_s=case.load_s - case.warmup_s,
        requests=collector.balance.arrived,
        total=collector.total,
        classes=collector.classes,
        tenants=collector.tenants,
        use=begin.until(end, 1.0, due=0, capacity=0.0),
        switches=tuple(pool.switcher.records),
        timeline=tuple(pool.timeline),
        domains=tuple(pool.node.lives.values()),
        samples=tuple(meter.samples),
        sample_s=meter.every_s,
        reasons=dict(sorted(collector.reasons.items())),
        alarms=dict(sorted(collector.alarms.items())),
        preemptions=pool.node.totals.preemptions,
        handovers=collector.handovers,
        recomputes=collector.recomputes,
        end_s=end_s,
        kv_tokens_per_device=facts.kv_tokens_per_device,
    )
    carried = sum(
        seconds * sum(case.capacities.get(shape.tp, 0.0) for shape in LayoutSpec.parse(layout).shapes)
        for layout, seconds in result.spans(case.warmup_s, case.load_s)
    )
    peak = facts.device.flops(facts.shape.weights.compute).value
    use = begin.until(end, peak, due=collector.total.due, capacity=carried)
    return msgspec.structs.replace(result, use=use)


def _in_parallel(cases: list[Case], jobs: int, progress: Progress) -> list[CaseResult]:
    """Progress is told when a run is over."""
    results = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(run_case, case) for case in cases]
        try:
            for done in as_completed(running):
                results.append(done.result())
                progress(results[-1].configuration, results[-1].seed, 1.0)
        finally:
            for task in running:
                task.cancel()
    return results


def _silent(configuration: str, seed: int, share: float) -> None:
    pass
