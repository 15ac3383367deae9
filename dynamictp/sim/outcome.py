"""What a simulation says: figures of every run, and of every configuration over its seeds. Values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev

import msgspec

from dynamictp.bench.measure import Estimate, Figure, Group, RunFigures, Validity
from dynamictp.bench.tally import Digest, Tally
from dynamictp.sim.scenario import Scenario
from dynamictp.sim.switching import SwitchRecord
from dynamictp.sim.values import DomainLife

SCHEMA = "dynamictp-simulation/1"
NO_CLIENT = Validity(None, 1.0, 0.0, 0, 0, ())
"""A simulated client is never late."""
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantile 0.975 of Student's t by degrees of freedom from 1 on."""


class Use(msgspec.Struct, frozen=True):
    """What the devices did between warm-up and the end of the load. One definition for all configurations:
    *held* are devices in some domain, those that are being prepared or drain included.
    """

    device_s: float
    """Devices held × time."""
    busy_s: float
    """Devices in a step × time."""
    flops: float
    """Floating-point operations of the model's arithmetic."""
    peak_flops: float
    """Of one device, per second."""
    span_s: float
    due: int = 0
    """Requests that came."""
    capacity: float = 0.0
    """Requests that the layouts in force carry within the SLO, by the cost model: rate × time."""

    @property
    def busy(self) -> float:
        """Utilisation in time: busy ÷ held device-seconds."""
        return self.busy_s / self.device_s if self.device_s else 0.0

    @property
    def compute(self) -> float:
        """Utilisation of arithmetic (MFU): FLOPs ÷ (peak × held device-seconds)."""
        return self.flops / (self.device_s * self.peak_flops) if self.device_s else 0.0

    @property
    def load(self) -> float:
        """Utilisation of capacity, the planner's notion: requests that came ÷ those that could be carried."""
        return self.due / self.capacity if self.capacity else 0.0

    @property
    def devices(self) -> float:
        """Devices held on average."""
        return self.device_s / self.span_s


class Sample(msgspec.Struct, frozen=True):
    """One slot of the time line: means over it."""

    t_s: float
    arrivals_per_s: float
    devices: float
    busy: float
    running: float
    waiting: float
    refused: int


class CaseResult(msgspec.Struct, frozen=True):
    """One configuration and seed. Times in seconds of virtual time after the load's start."""

    configuration: str
    seed: int
    mode: str
    load_s: float
    """Between warm-up and the end of the load."""
    requests: int
    """All that arrived, warm-up included."""
    total: Tally
    classes: dict[str, Tally]
    tenants: dict[str, Tally]
    use: Use
    switches: tuple[SwitchRecord, ...]
    timeline: tuple[tuple[float, str], ...]
    domains: tuple[DomainLife, ...]
    samples: tuple[Sample, ...]
    sample_s: float
    """Length of a slot."""
    reasons: dict[str, int]
    """Decisions by reason."""
    alarms: dict[str, int]
    """Decisions with that alarm."""
    preemptions: int
    handovers: int
    recomputes: int
    end_s: float
    kv_tokens_per_device: float

    @property
    def switches_per_hour(self) -> float:
        return len(self.switches) * 3600 / self.end_s

    def figures(self) -> RunFigures:
        """The benchmark's figures of this run."""
        return _figures(self.configuration, (self,))

    def spans(self, since_s: float, until_s: float) -> Iterator[tuple[str, float]]:
        """(layout, seconds in force) between the two times."""
        ends = [at_s for at_s, _ in self.timeline[1:]] + [math.inf]
        for (start_s, layout), end_s in zip(self.timeline, ends, strict=True):
            inside = min(end_s, until_s) - max(start_s, since_s)
            if inside > 0:
                yield layout, inside


class Outcome(msgspec.Struct, frozen=True):
    """A whole simulation: every configuration under every seed."""

    scenario: Scenario
    results: tuple[CaseResult, ...]
    version: str = ""
    schema: str = SCHEMA

    @property
    def configurations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.configuration for result in self.results))

    def of(self, configuration: str) -> tuple[CaseResult, ...]:
        """Its runs, by seed."""
        return tuple(result for result in self.results if result.configuration == configuration)

    def figures(self) -> tuple[RunFigures, ...]:
        """By configuration. With several seeds a value is the mean over them and its interval Student's t;
        with one, the percentile's own."""
        return tuple(_over_seeds(name, self.of(name)) for name in self.configurations)

    def price(self, result: CaseResult) -> float | None:
        """In the scenario's currency; None without a price."""
        hourly = self.scenario.price_per_device_hour
        return result.use.device_s / 3600 * hourly if hourly else None


def interval(values: Sequence[float]) -> Figure:
    """Mean and its 95 % interval by Student's t; of one value, the value."""
    mean = fmean(values)
    if len(values) < 2:
        return Figure(mean, mean, mean)
    t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else 1.96
    spread = t * stdev(values) / math.sqrt(len(values))
    return Figure(mean, mean - spread, mean + spread)


def _figures(label: str, results: Sequence[CaseResult]) -> RunFigures:
    """Of the requests of all runs together."""
    load_s = sum(result.load_s for result in results)

    def groups(of: Callable[[CaseResult], dict[str, Tally]]) -> tuple[Group, ...]:
        names = sorted({name for result in results for name in of(result)} - {""})
        return tuple(
            _merged(of(result)[name] for result in results if name in of(result)).group(name, load_s)
            for name in names
        )

    total = _merged(result.total for result in results).group("all", load_s)
    return RunFigures(
        label, NO_CLIENT, total, groups(lambda result: result.classes), groups(lambda result: result.tenants)
    )


def _merged(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    return total


def merged_digest(digests: Iterable[Digest]) -> Digest:
    total = Digest()
    for digest in digests:
        total.merge(digest)
    return total


def _over_seeds(label: str, results: Sequence[CaseResult]) -> RunFigures:
    pooled = _figures(label, results)
    if len(results) < 2:
        return pooled
    each = [result.figures() for result in results]

    def spread(group: Group, of: Callable[[RunFigures], Sequence[Group]]) -> Group:
        own = [found for figures in each for found in of(figures) if found.name == group.name]
        return _spread(group, own)

    return replace(
        pooled,
        total=spread(pooled.total, lambda figures: (figures.total,)),
        classes=tuple(spread(group, lambda figures: figures.classes) for group in pooled.classes),
        tenants=tuple(spread(group, lambda figures: figures.tenants) for group in pooled.tenants),
    )


def _spread(pooled: Group, groups: Sequence[Group]) -> Group:
    """Counts of all seeds together, values as means over seeds."""
    shares = [group.goodput.value for group in groups if group.goodput is not None]
    return replace(
        pooled,
        goodput=interval(shares) if shares else None,
        ttft=_estimates(pooled.ttft, [group.ttft for group in groups]),
        tpot=_estimates(pooled.tpot, [group.tpot for group in groups]),
        itl=_estimates(pooled.itl, [group.itl for group in groups]),
        e2e=_estimates(pooled.e2e, [group.e2e for group in groups]),
    )


def _estimates(pooled: Estimate | None, each: Sequence[Estimate | None]) -> Estimate | None:
    found = [estimate for estimate in each if estimate is not None]
    if pooled is None or not found:
        return None
    p99 = [estimate.p99.value for estimate in found if estimate.p99 is not None]
    return Estimate(
        pooled.count,
        fmean(estimate.mean for estimate in found),
        interval([estimate.p50.value for estimate in found]),
        interval([estimate.p90.value for estimate in found]),
        interval([estimate.p95.value for estimate in found]),
        interval(p99) if len(p99) == len(found) else None,
        pooled.max,
    )
