"""The engine's state as one message."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

from dynamictp.engine.blocks import BlockPool
from dynamictp.engine.domain import Domain, PlanRecord
from dynamictp.engine.fleet import Fleet
from dynamictp.engine.requests import RequestBook
from dynamictp.engine.steptime import StepTimes
from dynamictp.layout import Layout
from dynamictp.messages import (
    DeviceStatus,
    EngineStart,
    Snapshot,
    StepMeasure,
    StepResult,
    StepTotals,
    Waiting,
)

WARM_STEPS = 8
"""Steps of a domain after which its times count."""
KEPT_MEASURES = 4
Phase = Literal["decode", "prefill"]


class StepCost:
    """Engine time per step: handling the results plus the turn that follows, over the results of the turn.

    Processor time: on a machine that is full the engine waits for its core, and that is no work of its own.
    """

    def __init__(self) -> None:
        self._recent_us: deque[float] = deque(maxlen=128)
        self._seconds = 0.0
        self._steps = 0

    def step_took(self, seconds: float) -> None:
        self._seconds += seconds
        self._steps += 1

    def turn_took(self, seconds: float) -> None:
        if self._steps:
            self._recent_us.append((self._seconds + seconds) / self._steps * 1e6)
            self._seconds, self._steps = 0.0, 0

    @property
    def median_us(self) -> float:
        return median(self._recent_us) if self._recent_us else 0.0


class StepLedger:
    """Where the time of steps went, by degree and phase."""

    def __init__(self) -> None:
        self._totals: dict[tuple[int, Phase], StepTotals] = {}

    def add(self, domain: Domain, record: PlanRecord, result: StepResult) -> None:
        """A step is complete; `domain.busy` still says how things were at the result before.

        Beside another domain on the same devices a gap is mostly the other one's step: none of it counts.
        """
        phase: Phase = "prefill" if record.prefill_tokens else "decode"
        tp = domain.tp
        total = self._totals.get((tp, phase)) or StepTotals(tp, phase, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
        host_s = result.gap_s if domain.busy and record.alone else 0.0
        self._totals[tp, phase] = StepTotals(
            tp,
            phase,
            total.steps + 1,
            total.seconds + result.seconds,
            total.weights_s + result.weights_s,
            total.attention_s + result.attention_s,
            total.wait_s + result.wait_s,
            total.host_s + host_s,
        )

    @property
    def totals(self) -> tuple[StepTotals, ...]:
        return tuple(self._totals.values())


class StepMeasures:
    """A few steps of each degree and phase, until a snapshot takes them."""

    def __init__(self) -> None:
        self._measures: dict[tuple[int, bool], list[StepMeasure]] = {}

    def add(self, domain: Domain, record: PlanRecord, result: StepResult, active_devices: int) -> None:
        """Steps beside other domains, and the first ones of a domain, tell nothing."""
        if not record.alone or record.step < WARM_STEPS:
            return
        kept = self._measures.setdefault((domain.tp, bool(record.prefill_tokens)), [])
        if len(kept) >= KEPT_MEASURES:
            return
        rows = record.decode_rows
        context = sum(work.start + 1 for work in record.rows[:rows])
        past = sum(work.start * work.count for work in record.rows[rows:])
        kept.append(
            StepMeasure(
                domain.tp,
                result.seconds,
                rows,
                context / rows if rows else 0.0,
                record.prefill_tokens,
                past / record.prefill_tokens if record.prefill_tokens else 0.0,
                active_devices,
            )
        )

    def take(self) -> tuple[StepMeasure, ...]:
        taken = tuple(measure for kept in self._measures.values() for measure in kept)
        self._measures.clear()
        return taken


def make_snapshot(
    start: EngineStart,
    fleet: Fleet,
    book: RequestBook,
    *,
    time_s: float,
    layout: Layout,
    leased: frozenset[int],
    prefix: tuple[int, int],
    max_model_len: int,
    step_engine_us: float,
    steps: tuple[StepTotals, ...],
    times: StepTimes,
    queue: Waiting,
    measures: tuple[StepMeasure, ...],
) -> Snapshot:
    """`prefix`: tokens found in the prefix cache, and tokens looked for."""
    pool = book.pool
    statuses = tuple(domain.status(start.model, pool.heads) for domain in fleet.domains.values())
    running = sum(status.running for status in statuses)
    serving = [domain for domain in fleet.domains.values() if domain.state == "serving"]
    return Snapshot(
        time_s,
        str(layout.spec),
        len(book.waiting),
        running,
        rows_used=running,
        domains=statuses,
        devices=tuple(_device(device, start, pool, fleet, leased) for device in range(start.devices)),
        pages_free=pool.free * pool.heads,
        pages_cached=pool.cached * pool.heads,
        pages_total=pool.total * pool.heads,
        prefix_hits=prefix[0],
        prefix_queries=prefix[1],
        preemptions=book.preemptions,
        prefix_evictions=pool.evictions,
        rows_limit=sum(d.max_rows for d in fleet.domains.values() if d.state == "serving"),
        max_model_len=max_model_len,
        step_engine_us=step_engine_us,
        steps=steps,
        rows_total=sum(_rows(domain) for domain in serving),
        prefill_tokens_per_s=sum(
            times.prefill_rate(d.tp, len(d.running), start.max_step_ms, start.arena.page_tokens)
            for d in serving
        ),
        placed=str(layout),
        queue=queue,
        measures=measures,
    )


def _rows(domain: Domain) -> int:
    """Requests as large as those that run now which the domain can run at once."""
    running = len(domain.running)
    if not running:
        return domain.max_rows
    return max(running, min(domain.max_rows, domain.quota * running // max(1, len(domain.blocks))))


def _device(
    device: int, start: EngineStart, pool: BlockPool, fleet: Fleet, leased: frozenset[int]
) -> DeviceStatus:
    """Pages are accounted per device: a domain's are divided evenly over its devices."""
    mine = [domain for domain in fleet.domains.values() if device in domain.devices]
    serving = any(domain.state in {"serving", "draining"} for domain in mine)
    return DeviceStatus(
        device,
        "serving" if serving else "leased" if device in leased else "standby",
        tuple(domain.id for domain in mine),
        kv_pages_used=sum(len(d.blocks) * pool.heads / len(d.devices) for d in mine),
        kv_pages_total=pool.total * pool.heads / start.devices,
        busy_s=fleet.busy_s[device],
    )
