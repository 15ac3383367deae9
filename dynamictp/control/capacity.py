"""What each layout carries and how soon it answers, by the cost model. Pure; owners only memoise.

The capacity of a domain is its throughput at the largest batch that holds the SLO: the KV of the batch in
memory, TPOT within its target for nine requests of ten, and TTFT for nine of ten that need not wait.
The curve from load to latency is walked along the batch: λ(B) = B ÷ (E[n]·d(B) + B·m(B)), as in
`dynamictp.cost.batching`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from itertools import pairwise

import msgspec

from dynamictp.control.calibrate import Ratios, corrected
from dynamictp.control.config import Slo
from dynamictp.control.facts import PoolFacts
from dynamictp.control.traffic import Profile
from dynamictp.control.values import Running
from dynamictp.cost.batching import Replica
from dynamictp.cost.queueing import mgc_wait
from dynamictp.cost.steps import StepModel
from dynamictp.layout import LayoutSpec, Shape

_FULL = 0.97
"""Latencies are predicted up to this part of the capacity; beyond, they grow with the overload."""
_LATE_PROMPTS = 0.1
_Z90 = 1.2816
_KEPT_TABLES = 8


class Predicted(msgspec.Struct, frozen=True):
    """Latencies at a load: means, and the P90 of a request's TPOT. Seconds."""

    ttft_s: float
    tpot_s: float
    tpot_high_s: float
    e2e_s: float


_NEVER = Predicted(math.inf, math.inf, math.inf, math.inf)


class _Point(msgspec.Struct, frozen=True):
    """A domain with `rows` requests decoding: requests/s that lead there, and what they see. Seconds."""

    rows: float
    rate: float
    tpot_s: float
    tpot_high_s: float
    """P90 over requests: they meet other batches, and other prompts fall into their lives."""
    prompt_s: float
    """Mean time of a prompt from its first step to its first token."""
    busy_s: float
    """Mean time for which a prompt keeps the token budget; `busy_square` is E[S²]."""
    busy_square: float
    late: float
    """Part of the prompts that miss their TTFT target without waiting."""
    prompt_share: float
    """Part of a request's cost that its prompt is."""


class Curve(msgspec.Struct, frozen=True):
    """One domain under one traffic profile: from load to latency. Requests per second."""

    points: tuple[_Point, ...]
    """By rising load."""
    outputs: float
    capacity: float
    """At the largest batch that holds the SLO; 0 when none does."""
    full: float
    """At the largest batch that fits, whatever the latency."""
    rows: float
    """The largest batch that holds the SLO; 0 when none does."""
    full_rows: float
    """The largest batch that fits."""

    def at(self, rate: float, servers: int) -> Predicted:
        """Mean latencies when `servers` such domains receive `rate` requests per second each."""
        if not self.points:
            return _NEVER
        overload = max(1.0, rate / (_FULL * self.full))
        rate = min(rate, _FULL * self.full)
        low, high, share = self._between(rate)
        tpot = _mix(low.tpot_s, high.tpot_s, share)
        wait = mgc_wait(
            rate * servers,
            _mix(low.busy_s, high.busy_s, share),
            _mix(low.busy_square, high.busy_square, share),
            servers,
        )
        ttft = (_mix(low.prompt_s, high.prompt_s, share) + min(wait.mean, 1e6)) * overload
        tpot *= overload
        late = _mix(low.tpot_high_s, high.tpot_high_s, share) * overload
        return Predicted(ttft, tpot, late, ttft + self.outputs * tpot)

    def _between(self, rate: float) -> tuple[_Point, _Point, float]:
        points = self.points
        index = bisect_right(points, rate, key=lambda point: point.rate)
        if index == 0:
            return points[0], points[0], 0.0
        if index == len(points):
            return points[-1], points[-1], 0.0
        low, high = points[index - 1], points[index]
        return low, high, (rate - low.rate) / (high.rate - low.rate)


class Entry(msgspec.Struct, frozen=True):
    """One layout in a table. `capacity` and `full` in requests per second, as those of `Curve`."""

    layout: str
    shapes: tuple[int, ...]
    """Degrees of its domains, the widest first."""
    devices: int
    capacity: float
    full: float
    rows: float
    """Requests that run at once within the SLO."""
    full_rows: float
    """Requests that run at once, whatever the latency."""

    def load(self, rate: float, *, holds: bool = True) -> float:
        """Arriving work ÷ capacity."""
        capacity = self.capacity if holds else self.full
        if rate <= 0:
            return 0.0
        return rate / capacity if capacity > 0 else math.inf


class Table:
    """All legal layouts under one profile, one calibration and one SLO. Immutable but for its memo."""

    def __init__(
        self, facts: PoolFacts, profile: Profile, ratios: Ratios, slo: Slo, legal: tuple[str, ...]
    ) -> None:
        self._facts, self._profile, self._slo = facts, profile, slo
        self._calibration = corrected(facts.calibration, ratios, facts.limits.max_batched_tokens)
        self._curves: dict[tuple[int, int], Curve] = {}
        self._predicted: dict[tuple[str, int], Predicted] = {}
        entries = [self._entry(text) for text in legal]
        self.entries: dict[str, Entry] = {entry.layout: entry for entry in entries}
        self.holds_slo = any(entry.capacity > 0 for entry in entries)
        """Some layout meets the TPOT target at some batch; else capacities are those without a target."""
        reference = max(entries, key=lambda entry: entry.full)
        points = self._curve(reference.shapes[0], reference.devices).points
        self.prompt_share = points[-1].prompt_share if points else 0.5
        """Part of a request's work that its prompt is, at full load of the most capable layout."""

    def load(self, layout: str, rate: float) -> float:
        """`rate` ÷ capacity; infinite for a layout that can't hold the SLO though another one can."""
        return self.entries[layout].load(rate, holds=self.holds_slo)

    def capacity(self, layout: str) -> float:
        """Requests per second within the SLO, or without it where no layout can hold it."""
        entry = self.entries[layout]
        return entry.capacity if self.holds_slo else entry.full

    def holds(self, layout: str, running: Running) -> bool:
        """The requests that run now would run on this layout within the SLO, and their tokens have room."""
        entry = self.entries[layout]
        tokens = running.requests * (running.context_mean + self._facts.limits.page_tokens)
        return running.requests <= (entry.rows if self.holds_slo else entry.full_rows) and (
            tokens <= self._facts.kv_tokens_per_device * entry.devices
        )

    def predict(self, layout: str, rate: float) -> Predicted:
        """Mean latencies when the router spreads `rate` by capacity. Rates are rounded to 4 %."""
        step = round(25 * math.log(max(rate, 1e-6)))
        known = self._predicted.get((layout, step))
        if known is None:
            known = self._predicted[layout, step] = self._predict(layout, math.exp(step / 25))
        return known

    def _predict(self, layout: str, rate: float) -> Predicted:
        entry = self.entries[layout]
        if entry.full <= 0:
            return _NEVER
        ttft = tpot = high = e2e = 0.0
        for tp in set(entry.shapes):
            count = entry.shapes.count(tp)
            curve = self._curve(tp, entry.devices)
            if curve.full <= 0:
                continue
            share = curve.full / entry.full
            found = curve.at(rate * share, count)
            ttft += count * share * found.ttft_s
            tpot += count * share * found.tpot_s
            high += count * share * found.tpot_high_s
            e2e += count * share * found.e2e_s
        return Predicted(ttft, tpot, high, e2e)

    def _entry(self, text: str) -> Entry:
        spec = LayoutSpec.parse(text)
        degrees = tuple(_degree(shape) for shape in spec.shapes)
        curves = [self._curve(tp, spec.devices) for tp in degrees]
        return Entry(
            text,
            degrees,
            spec.devices,
            sum(curve.capacity for curve in curves),
            sum(curve.full for curve in curves),
            sum(curve.rows for curve in curves),
            sum(curve.full_rows for curve in curves),
        )

    def _curve(self, tp: int, layout_devices: int) -> Curve:
        # Only where devices share a memory do the others of the layout matter.
        active = layout_devices if self._facts.device.shared_bandwidth is not None else tp
        known = self._curves.get((tp, active))
        if known is None:
            domain = self._facts.domain(tp, active, self._calibration)
            kv_tokens = self._facts.kv_tokens_per_device * tp
            replica = Replica(StepModel(domain), self._profile.workload(), self._facts.limits, kv_tokens)
            known = self._curves[tp, active] = _curve(replica, self._profile, self._slo)
        return known


class CostBook:
    """Tables of one pool, kept for the calibrations and profiles in use. Owner of that memo only: the same
    arguments give equal tables."""

    def __init__(self, facts: PoolFacts, kept_tables: int = _KEPT_TABLES) -> None:
        self.facts = facts
        self._kept = kept_tables
        self._tables: OrderedDict[object, Table] = OrderedDict()
        self._steps: dict[tuple[int, int], StepModel] = {}

    def table(self, profile: Profile, ratios: Ratios, slo: Slo, legal: tuple[str, ...]) -> Table:
        """Capacities and latencies of the layouts in `legal`."""
        targets = (slo.ttft_p99_s, slo.ttft_per_token_ms, slo.tpot_p99_ms)
        key = (profile, ratios, targets, legal)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = Table(self.facts, profile, ratios, slo, legal)
            if len(self._tables) > self._kept:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        return table

    def steps(self, tp: int, active_devices: int) -> StepModel:
        """Step times before the online calibration, which compares with them."""
        key = (tp, max(active_devices, tp))
        model = self._steps.get(key)
        if model is None:
            model = self._steps[key] = StepModel(self.facts.domain(*key, self.facts.calibration))
        return model


def _degree(shape: Shape) -> int:
    if shape.pp != 1:
        raise ValueError(f"{shape}: pipeline stages are not planned")
    return shape.tp


def _curve(replica: Replica, profile: Profile, slo: Slo) -> Curve:
    outputs = replica.decode_tokens
    if replica.max_batch < 1:
        return Curve((), outputs, 0.0, 0.0, 0.0, 0.0)
    sizes = [0.1, 0.5, *_doublings(replica.max_batch)]
    points: list[_Point] = []
    for rows in sizes:
        point = _point(replica, rows, profile, slo)
        if points and point.rate <= points[-1].rate:
            break  # prompts fill the token budget: more rows add nothing
        points.append(point)
    capacity, held = _capacity(points, slo.tpot_target_s)
    return Curve(tuple(points), outputs, capacity, points[-1].rate, held, points[-1].rows)


def _doublings(largest: int) -> list[float]:
    sizes = [1.0]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return [*sizes, float(largest)] if largest > 1 else sizes


def _point(replica: Replica, rows: float, profile: Profile, slo: Slo) -> _Point:
    missed = 1 - profile.hit_share
    costs = replica.prompt_costs(rows)
    targets = [slo.ttft_target_s(tokens) for tokens in profile.prompt_nodes]
    added = missed * sum(weight * cost.added for weight, cost in costs)
    busy = missed * sum(weight * cost.occupancy for weight, cost in costs)
    decoding = replica.decode_tokens * replica.decode_s(rows)
    rate = rows / (decoding + rows * added)
    if busy > 0:
        rate = min(rate, 1 / busy)
    left = max(1 - rate * added, 1e-3)
    tpot = replica.decode_s(rows) / left
    crowded = replica.decode_s(rows + math.sqrt(rows)) / left
    second = missed**2 * sum(weight * cost.added**2 for weight, cost in costs)
    spread = math.sqrt((crowded - tpot) ** 2 + rate * second * tpot / replica.decode_tokens)
    return _Point(
        rows=rows,
        rate=rate,
        tpot_s=tpot,
        tpot_high_s=tpot + _Z90 * spread,
        prompt_s=missed * sum(weight * cost.latency for weight, cost in costs),
        busy_s=busy,
        busy_square=missed**2 * sum(weight * cost.occupancy**2 for weight, cost in costs),
        late=sum(
            weight
            for (weight, cost), target in zip(costs, targets, strict=True)
            if missed * cost.latency > target
        ),
        prompt_share=rows * added / (decoding + rows * added),
    )


def _capacity(points: list[_Point], tpot_s: float) -> tuple[float, float]:
    """(highest rate with TPOT and prompts within their targets for nine of ten, rows that decode at it);
    between two points, linear."""
    held = points[0]
    if held.tpot_high_s > tpot_s or held.late > _LATE_PROMPTS:
        return 0.0, 0.0
    for low, high in pairwise(points):
        if high.late > _LATE_PROMPTS:
            break
        if high.tpot_high_s > tpot_s:
            share = (tpot_s - low.tpot_high_s) / (high.tpot_high_s - low.tpot_high_s)
            return _mix(low.rate, high.rate, share), _mix(low.rows, high.rows, share)
        held = high
    return held.rate, held.rows


def _mix(low: float, high: float, share: float) -> float:
    return low + (high - low) * share
