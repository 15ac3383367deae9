"""The engine without its transport: messages in, messages out, one turn at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import thread_time

from dynamictp.clock import Clock
from dynamictp.engine.admission import Admission
from dynamictp.engine.blocks import BlockPool
from dynamictp.engine.comms import CommunicatorPool, ControlWords, NullControlWords
from dynamictp.engine.domain import Domain
from dynamictp.engine.fleet import EPOCHS_PER_INCARNATION, Fleet, quota_rule
from dynamictp.engine.layouts import LayoutManager
from dynamictp.engine.request import Detach, Request
from dynamictp.engine.requests import RequestBook
from dynamictp.engine.scheduler import Limits, Scheduler
from dynamictp.engine.snapshot import StepCost, StepLedger, StepMeasures, make_snapshot
from dynamictp.engine.steptime import StepTimes
from dynamictp.engine.turns import Turns
from dynamictp.engine.watch import HELLO_AGAIN_S, HELLO_S, LOOK_S, Watch
from dynamictp.errors import ConfigError, LayoutRefused, ProtocolError
from dynamictp.kv import switching_cap
from dynamictp.messages import (
    NO_TOKEN,
    Body,
    CancelRequest,
    CancelSwitch,
    DomainBroken,
    DomainClosed,
    DomainOpened,
    DomainProven,
    EngineReady,
    EngineStart,
    FirstAdmission,
    SetDevices,
    SetLayout,
    Shutdown,
    Snapshot,
    StepMeasure,
    StepResult,
    SubmitRequest,
    SwitchStatus,
    Waiting,
    WorkerGone,
    WorkerHello,
    WorkerStarted,
)

log = logging.getLogger(__name__)

SNAPSHOT_S = 0.25


class EngineCore:
    """Joins queue, schedulers, pages and layouts. Feed it messages, call `turn`, send what is in
    `to_server` and `to_workers` (device, message) in order, and clear both lists.

    Raises `FatalError` when the first layout can't be opened.
    """

    def __init__(
        self,
        start: EngineStart,
        clock: Clock,
        control: ControlWords | None = None,
        core_wait_s: Callable[[int], float] = lambda pid: 0.0,
    ) -> None:
        """`core_wait_s`: how long the process of that id has waited for a core so far."""
        self.start = start
        self.to_server: list[Body] = []
        self.to_workers: list[tuple[int, Body]] = []
        self.finished = False
        """A `Shutdown` is carried out; the process may end."""
        self._clock = clock
        arena, facts = start.arena, start.facts
        self.pool = BlockPool(arena.pages, facts.kv_heads, prefix_cache=start.prefix_cache)
        context = min(start.max_model_len or facts.max_context, facts.max_context)
        limits = Limits(arena.page_tokens, start.max_batched_tokens, start.max_step_ms)
        self._cap = switching_cap(start.devices) if start.mode == "dynamic" else 1.0
        self._context = min(context, self.pool.total * arena.page_tokens)
        self._times = StepTimes()
        self._admission = Admission(
            self.pool,
            arena.page_tokens,
            start.max_batched_tokens,
            self._times,
            self._live,
            long_prompt_tokens=start.long_prompt_tokens,
        )
        self.book = RequestBook(self.pool, arena.page_tokens, self._context, self._admission.handover, clock)
        self._turns = Turns()
        self._scheduler = Scheduler(limits, self.pool, self._times, self._live, self._preempt)
        control = control or NullControlWords()
        self._watch = Watch(control, start.hang_s, core_wait_s)
        self._expected = dict(enumerate(start.workers or (1,) * start.devices))
        """Incarnation of each device's worker that was started last, 0 for none."""
        first_id = 1 + (start.incarnation - 1) * EPOCHS_PER_INCARNATION
        self.fleet = Fleet(
            start,
            quota=quota_rule(self.pool.total, start.quota_devices, self._cap),
            comms=CommunicatorPool(start.comm_slots, first_id),
            control=control,
            book=self.book,
            clock=clock,
            send=self._to_worker,
            lost=self.to_server.append,
        )
        try:
            self.layouts = LayoutManager(
                start, self.fleet, self.book, clock, times=self._times, emit=self._on_status
            )
        except LayoutRefused as error:
            raise ConfigError(f"layout {start.layout}: {error.message}") from error
        self._admission.sides = self.layouts
        if len(self.layouts.observed.domains) > start.comm_slots:
            raise ConfigError(f"layout {start.layout} needs more than {start.comm_slots} communicator slots")
        self._cost = StepCost()
        self._ledger = StepLedger()
        self._measures = StepMeasures()
        self._ready = False
        self._next_snapshot_s = self._next_look_s = clock.now()
        if start.incarnation > 1:
            for device, incarnation in self._expected.items():
                if incarnation:
                    self._watch.expect_hello(device, clock.now() + max(HELLO_AGAIN_S, start.hang_s))
        self._stop_at: float | None = None

    # ------------------------------------------------------------ in

    def on_server(self, body: Body) -> None:
        """Raises `ProtocolError` for a message that a server does not send."""
        match body:
            case SubmitRequest():
                self.book.submit(body)
            case CancelRequest():
                self.book.cancel(body)
            case SetLayout():
                self.layouts.set_layout(body)
            case CancelSwitch():
                self.layouts.cancel(body)
            case SetDevices():
                self.layouts.set_devices(body)
            case Shutdown():
                self._stop_at = self._clock.now() + body.drain_s
            case WorkerGone():
                self._on_gone(body)
            case WorkerStarted():
                self._expected[body.device] = body.incarnation
                self._drop_messages(body.device)
                self._watch.expect_hello(body.device, self._clock.now() + HELLO_S)
            case _:
                raise ProtocolError(f"{type(body).__name__} is no message of a server")

    def on_worker(self, device: int, body: Body) -> None:
        """Messages of epochs that are over are dropped. Raises `ProtocolError` for one that no worker
        sends."""
        match body:
            case StepResult():
                self._on_result(body)
            case DomainOpened():
                self.layouts.on_opened(body)
            case DomainProven():
                self.layouts.on_proven(body)
            case DomainClosed():
                self.fleet.on_closed(body)
            case DomainBroken():
                domain = self.fleet.domains.get(body.epoch)
                if domain is not None and domain.state != "failed":
                    self._fail(domain, f"rank {body.rank} of {domain.placed}: {body.error}")
            case WorkerHello():
                self._watch.on_hello(device, body.pid)
                for domain in self.fleet.on_hello(body):
                    self._fail(domain, f"the worker of device {device} was replaced", worker_lost=True)
            case _:
                raise ProtocolError(f"{type(body).__name__} is no message of a worker")

    def lose_worker(self, device: int, reason: str) -> None:
        """A worker hangs, or its link is of no use any more: the supervisor must replace it."""
        self._watch.forget(device)
        if device not in self.fleet.incarnations:
            self.fleet.lose_unheard(device, self._expected[device], reason)
        for domain in self.fleet.lose(device, reason):
            self._fail(domain, f"the worker of device {device}: {reason}", worker_lost=True)

    def _on_gone(self, message: WorkerGone) -> None:
        if self._expected[message.device] == message.incarnation:
            self._watch.forget(message.device)
            self._drop_messages(message.device)
        for domain in self.fleet.reaped(message.device, message.incarnation):
            self._fail(domain, f"the worker of device {message.device}: {message.reason}", worker_lost=True)

    def _drop_messages(self, device: int) -> None:
        """What is queued for a life of the device's worker that is over must not reach the next one."""
        self.to_workers[:] = [entry for entry in self.to_workers if entry[0] != device]

    # ------------------------------------------------------------ a turn

    def turn(self) -> None:
        """Do whatever can be done now."""
        began = thread_time()
        now = self._clock.now()
        self.book.expire(now)
        if now >= self._next_look_s:
            self._next_look_s = now + LOOK_S
            self._look(now)
        self.layouts.advance()
        self._admission.admit(self.book.waiting, now)
        for domain, sharers in self._turns.order(self.fleet.domains.values()):
            while self._turns.may_plan(domain, sharers) and self._plan(domain, alone=not sharers):
                pass
        self.layouts.report_commits()
        if self.layouts.started and not self._ready:
            self._announce()
        outputs = self.book.take_outputs()
        if outputs is not None:
            self.to_server.append(outputs)
        if now >= self._next_snapshot_s:
            self._next_snapshot_s = now + SNAPSHOT_S
            self.to_server.append(self.snapshot(self._measures.take()))
        if self._stop_at is not None:
            self.finished = not self.book.live or now >= self._stop_at
        self._cost.turn_took(thread_time() - began)

    def next_deadline(self) -> float:
        """When the next turn is due though no message came."""
        deadlines = [
            self._next_snapshot_s,
            self.book.next_deadline(),
            self.layouts.next_deadline(),
            self._stop_at,
        ]
        return min(deadline for deadline in deadlines if deadline is not None)

    def snapshot(self, measures: tuple[StepMeasure, ...] = ()) -> Snapshot:
        return make_snapshot(
            self.start,
            self.fleet,
            self.book,
            time_s=self._clock.now(),
            layout=self.layouts.observed,
            leased=self.layouts.targets.leased,
            prefix=(self._admission.hits, self._admission.queries),
            max_model_len=self.max_model_len,
            step_engine_us=self._cost.median_us,
            steps=self._ledger.totals,
            times=self._times,
            queue=self._queue(),
            measures=measures,
        )

    def _queue(self) -> Waiting:
        waiting = self.book.waiting.unordered()
        if not waiting:
            return Waiting()
        size = self.start.arena.page_tokens
        largest = max(-(-len(request.tokens) // size) for request in waiting)
        held = max((d.quota for d in self._live() if d.state == "serving"), default=0)
        quota = quota_rule(self.pool.total, self.start.quota_devices, self._cap)
        wider = (
            d
            for d in sorted(self.start.legal_degrees)
            if d <= self.start.quota_devices and quota(d) >= largest
        )
        return Waiting(
            sum(len(request.tokens) for request in waiting),
            min(request.arrival_s for request in waiting),
            next(wider, 0) if held and largest > held else 0,
        )

    @property
    def max_model_len(self) -> int:
        """The context to advertise: what the widest domain's quota holds. Static mode: of the layout in
        force; dynamic mode: of the widest legal one."""
        if self.start.mode == "dynamic":
            widest = max((d for d in self.start.legal_degrees if d <= self.start.quota_devices), default=1)
        else:
            widest = max(shape.devices for shape in self.layouts.observed.spec.shapes)
        quota = quota_rule(self.pool.total, self.start.quota_devices, self._cap)(widest)
        return min(self._context, quota * self.start.arena.page_tokens)

    def check_integrity(self) -> None:
        """Raise RuntimeError if blocks, rows, requests or communicator slots do not add up. Any time."""
        self.fleet.check_integrity()
        self.pool.check_integrity(self.fleet.held_blocks())
        placed = [r for d in self.fleet.domains.values() for r in (*d.running, *d.leaving)]
        bound = {r for r in placed if r.detach is None or not r.detach.ends}
        waiting = list(self.book.waiting.unordered())
        if len(waiting) + len(bound) != len(self.book.live):
            raise RuntimeError(
                f"{len(self.book.live)} live requests, {len(waiting)} wait, {len(bound)} have a domain"
            )
        for request in (*waiting, *bound):
            if self.book.live.get(request.id) is not request:
                raise RuntimeError(f"request {request.id} is in a queue or domain and not alive")
        if any(request.blocks or request.domain for request in waiting):
            raise RuntimeError("a waiting request holds blocks or a domain")

    # ------------------------------------------------------------ within

    def _live(self) -> list[Domain]:
        return list(self.fleet.live())

    def _plan(self, domain: Domain, *, alone: bool) -> bool:
        plan = self._scheduler.plan(domain, alone=alone)
        if plan is None:
            return False
        for device in domain.devices:
            self._to_worker(device, plan)
        self._turns.planned(domain, domain.in_flight[-1])
        return True

    def _to_worker(self, device: int, body: Body) -> None:
        self.to_workers.append((device, body))
        self._watch.sent(device)

    def _look(self, now: float) -> None:
        """Find hanging workers. Every snapshot is a turn, so this runs often enough without a deadline."""
        verdict = self._watch.look(self.fleet.domains.values(), now)
        for device, reason in verdict.lost:
            self.lose_worker(device, reason)
        for domain, reason in verdict.stuck:
            self._fail(domain, reason, worker_lost=True)

    def _on_result(self, result: StepResult) -> None:
        began = thread_time()
        domain = self.fleet.domains.get(result.epoch)
        if domain is None or domain.state not in {"serving", "draining"}:
            return
        if self.layouts.on_trial(domain) and any(token.token == NO_TOKEN for token in result.tokens):
            # Its requests are computed again where they were before: a poison one then ends alone.
            self._fail(domain, "numbers that are not finite")
            return
        try:
            record = self.book.complete(domain, result)
        except ProtocolError as error:
            self._fail(domain, str(error))
            return
        self.layouts.on_completed(domain, record, result)
        self._turns.completed(domain, record, result.seconds)
        self.fleet.worked(domain, result.seconds)
        self._ledger.add(domain, record, result)
        domain.busy = bool(domain.in_flight)
        if self.start.mode != "static":
            busy = {device for other in self._live() if not other.empty for device in other.devices}
            self._measures.add(domain, record, result, len(busy.union(domain.devices)))
        if record.alone:
            self._times.measured(domain.tp, record.decode_rows, record.prefill_tokens, result.seconds * 1e3)
        self._cost.step_took(thread_time() - began)

    def _preempt(self, request: Request) -> None:
        self.book.detach(request, Detach.PREEMPT)

    def _fail(self, domain: Domain, error: str, *, worker_lost: bool = False) -> None:
        log.warning("domain %s (%s) failed: %s", domain.id, domain.placed, error)
        self.fleet.fail(domain)
        self.layouts.on_failed(domain, error, worker_lost=worker_lost)
        self._next_snapshot_s = self._clock.now()

    def _on_status(self, status: SwitchStatus | FirstAdmission) -> None:
        self.to_server.append(status)
        if isinstance(status, FirstAdmission):
            return
        log.info("switch %s to %s: %s %s", status.switch_id, status.to_layout, status.phase, status.outcome)
        self._next_snapshot_s = self._clock.now()

    def _announce(self) -> None:
        self._ready = True
        self.to_server.append(
            EngineReady(
                str(self.layouts.observed.spec), self.start.arena.pages, self.max_model_len,
                self.start.legal_degrees,
            )
        )  # fmt: skip
        self._next_snapshot_s = self._clock.now()
