"""Counts what a simulated pool does, request by request, and keeps nothing but sums and digests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from dynamictp.bench.tally import Tally
from dynamictp.control.config import ControlConfig
from dynamictp.control.values import Decision, PoolSnapshot
from dynamictp.sim.outcome import Sample, Use
from dynamictp.sim.pool import SimPool
from dynamictp.sim.requests import SimRequest
from dynamictp.sim.values import NodeTotals

MOST_SAMPLES = 432
UNFINISHED, REFUSED = "unfinished", "refused"


@dataclass(slots=True)
class Balance:
    """What conservation is checked with: requests and tokens of everyone, warm-up included."""

    arrived: int = 0
    refused: int = 0
    finished: int = 0
    outputs: int = 0
    """Tokens of the outputs of finished requests."""
    due: Counter[str] = field(default_factory=Counter)


class Collector:
    """Owner of the figures of one run. The pool's observer.

    Requests that arrive within [`since_s`, `until_s`) count.
    """

    def __init__(self, config: ControlConfig, since_s: float, until_s: float) -> None:
        self.total = Tally()
        self.classes: dict[str, Tally] = {}
        self.tenants: dict[str, Tally] = {}
        self.balance = Balance()
        self.reasons: Counter[str] = Counter()
        self.alarms: Counter[str] = Counter()
        self.handovers = self.recomputes = 0
        self._slo = config.slo
        self._since_s, self._until_s = since_s, until_s

    def on_arrival(self, request: SimRequest) -> None:
        self.balance.arrived += 1

    def on_refused(self, request: SimRequest, reason: str) -> None:
        self.balance.refused += 1
        for tally in self._groups(request):
            tally.fail(REFUSED)

    def on_finished(self, request: SimRequest) -> None:
        self.balance.finished += 1
        self.balance.outputs += request.output
        self.handovers += request.handovers
        self.recomputes += request.recomputes
        slo = self._slo.of(request.request_class, request.tenant)
        assert request.finished_s is not None
        ttft_s, tpot_s = request.ttft_s, request.tpot_s if request.output > 1 else None
        met = ttft_s <= slo.ttft_target_s(request.prompt)
        met = met and (tpot_s is None or tpot_s <= slo.tpot_target_s)
        for tally in self._groups(request):
            tally.add(
                prompt=request.prompt,
                output=request.output,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                e2e_s=request.finished_s - request.arrival_s,
                met=met,
            )

    def on_unfinished(self, request: SimRequest) -> None:
        """The run is over and the request is not: it counts as failed."""
        self.handovers += request.handovers
        self.recomputes += request.recomputes
        for tally in self._groups(request):
            tally.fail(UNFINISHED)

    def on_decision(self, snapshot: PoolSnapshot, decision: Decision) -> None:
        self.reasons[decision.reason.value] += 1
        for alarm in decision.alarms:
            self.alarms[alarm.value] += 1

    def _groups(self, request: SimRequest) -> list[Tally]:
        if not self._since_s <= request.arrival_s < self._until_s:
            return []
        groups = [self.total]
        for table, name in ((self.classes, request.request_class), (self.tenants, request.tenant)):
            if name:
                tally = table.get(name)
                if tally is None:
                    tally = table[name] = Tally()
                groups.append(tally)
        return groups


class Meter:
    """Owner of the time line: looks at the pool at even times and keeps means."""

    def __init__(self, pool: SimPool, collector: Collector, load_s: float) -> None:
        self.samples: list[Sample] = []
        self._pool, self._collector = pool, collector
        self.every_s = max(load_s / MOST_SAMPLES, 1.0)
        self._before = NodeTotals()
        self._arrived = self._refused = 0
        pool.loop.every(self.every_s, self.look)

    def look(self) -> None:
        pool, balance = self._pool, self._collector.balance
        pool.node.account()
        now, before = pool.node.totals, self._before
        held_s = now.device_s - before.device_s
        self.samples.append(
            Sample(
                t_s=pool.loop.now() - self.every_s,
                arrivals_per_s=(balance.arrived - self._arrived) / self.every_s,
                devices=held_s / self.every_s,
                busy=min((now.busy_s - before.busy_s) / held_s, 1.0) if held_s else 0.0,
                running=sum(domain.running for domain in pool.node.domains.values()),
                waiting=len(pool.node.waiting),
                refused=balance.refused - self._refused,
            )
        )
        self._before = NodeTotals(device_s=now.device_s, busy_s=now.busy_s)
        self._arrived, self._refused = balance.arrived, balance.refused


class Mark(msgspec.Struct, frozen=True):
    """The node's totals at a moment."""

    t_s: float
    device_s: float
    busy_s: float
    flops: float

    @classmethod
    def of(cls, pool: SimPool) -> Mark:
        pool.node.account()
        totals = pool.node.totals
        return cls(pool.loop.now(), totals.device_s, totals.busy_s, totals.flops)

    def until(self, end: Mark, peak_flops: float, *, due: int, capacity: float) -> Use:
        """What the devices did from here to there."""
        return Use(
            device_s=end.device_s - self.device_s,
            busy_s=end.busy_s - self.busy_s,
            flops=end.flops - self.flops,
            peak_flops=peak_flops,
            span_s=end.t_s - self.t_s,
            due=due,
            capacity=capacity,
        )
