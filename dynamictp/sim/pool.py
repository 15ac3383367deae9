"""A pool on virtual time under the production planner: snapshots in, decisions out, a timeline kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

import msgspec

from dynamictp.control.capacity import CostBook
from dynamictp.control.config import ControlConfig
from dynamictp.control.facts import PoolFacts
from dynamictp.control.journal import Journal
from dynamictp.control.planner import decide
from dynamictp.control.reconciler import Observed, Reconciler
from dynamictp.control.state import PlannerState
from dynamictp.control.values import Decision, Mode, PoolSnapshot, Reason, Running, Waiting
from dynamictp.control.windows import FEW_TOKENS, PrefixWindow, Stream, TrafficWindows
from dynamictp.messages import SwitchStatus
from dynamictp.sim.domain import LONGEST_RUN_S, SimDomain
from dynamictp.sim.gate import Gate
from dynamictp.sim.loop import EventLoop
from dynamictp.sim.node import Node
from dynamictp.sim.requests import SimRequest
from dynamictp.sim.switching import Switcher, SwitchRecord
from dynamictp.sim.values import Drift, Faults, SwitchTimes

_KEPT_TABLES = 512
"""Profiles of days of traffic come again."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated pool. `believed` is what the planner's cost model is told; None: the truth."""

    facts: PoolFacts
    devices: int
    legal: tuple[str, ...]
    layout: str
    config: ControlConfig = ControlConfig()
    believed: PoolFacts | None = None
    mode: Mode = "dynamic"
    times: SwitchTimes = SwitchTimes()
    faults: Faults = Faults()
    noise: float = 0.0
    seed: int = 0
    max_wait_s: float = 0.0
    """Requests whose predicted wait is longer are refused; 0: none is."""
    longest_run_s: float = LONGEST_RUN_S
    """Grain: decode steps of up to so long are one event; 0: each one is."""
    drift: Drift = ()
    start_s: float = 0.0
    """Time of the clock at the beginning."""
    state: PlannerState = PlannerState()
    """Of the planner at the beginning."""
    sample_every_s: float = 0.0
    """The planner is told of at most one measured step of a kind in that time."""


class Observer(Protocol):
    """Who is told what happens, where nothing is kept."""

    def on_arrival(self, request: SimRequest) -> None: ...

    def on_refused(self, request: SimRequest, reason: str) -> None: ...

    def on_finished(self, request: SimRequest) -> None: ...

    def on_decision(self, snapshot: PoolSnapshot, decision: Decision) -> None: ...


@dataclass
class PoolOutcome:
    """What a simulation led to. Times in seconds of virtual time."""

    duration_s: float
    finished: list[SimRequest]
    unfinished: list[SimRequest]
    switches: list[SwitchRecord]
    timeline: list[tuple[float, str]]
    """(from when on, observed layout)."""
    decisions: list[Decision]
    device_s: float
    preemptions: int
    refused: int = 0
    alarms: set[str] = field(default_factory=set)

    def switches_per_hour(self, *, forced: bool | None = None) -> float:
        """Committed or tried; `forced` picks one kind."""
        chosen = [s for s in self.switches if forced is None or s.forced == forced]
        return len(chosen) * 3600 / self.duration_s

    def decided(self, reason: Reason) -> list[Decision]:
        """Decisions that led to a switch for that reason."""
        return [d for d in self.decisions if d.target is not None and d.reason is reason]

    def layout_at(self, time_s: float) -> str:
        return [layout for since, layout in self.timeline if since <= time_s][-1]

    def goodput(self, config: ControlConfig, since_s: float = 0.0, until_s: float = float("inf")) -> float:
        """Part of the requests that arrived between the two times and met their targets."""
        arrived = [r for r in (*self.finished, *self.unfinished) if since_s <= r.arrival_s < until_s]
        return sum(_in_time(r, config) for r in arrived) / max(len(arrived), 1)


class SimPool:
    """Owner of one pool's loop, node, switcher and planner state."""

    def __init__(self, setup: Setup, observer: Observer | None = None) -> None:
        """With an `observer` requests and decisions are told to it and not kept, however long it lasts."""
        self.setup, config = setup, setup.config
        self.loop = EventLoop(setup.start_s)
        self.node = Node(
            self.loop,
            setup.facts,
            setup.devices,
            config=config,
            noise=setup.noise,
            seed=setup.seed,
            faults=setup.faults,
            longest_run_s=setup.longest_run_s,
            sample_every_s=setup.sample_every_s,
            drift=setup.drift,
        )
        self.switcher = Switcher(self.node, setup.layout, setup.times, config)
        self._ids = count(1)
        self.reconciler = Reconciler(
            self.loop, self.switcher, lambda: f"s{next(self._ids)}", bar_s=config.bar_s
        )
        self.switcher.on_status = self._switched
        self.available = setup.devices
        facts = setup.believed or setup.facts
        self.journal = Journal(facts, config, setup.state)
        self._cost, self._state = CostBook(facts, _KEPT_TABLES), setup.state
        self._traffic = TrafficWindows(setup.start_s, config)
        self._gate = Gate(self.node, setup.max_wait_s)
        self._observer = observer
        self.timeline = [(setup.start_s, setup.layout)]
        self._decisions: list[Decision] = []
        self._done: list[SimRequest] = []
        self._prefix = PrefixWindow()
        self._refused = 0
        self.node.on_first = self._first_token
        self.node.on_finish = self._finished

    def run(
        self,
        requests: Iterable[SimRequest],
        duration_s: float,
        *,
        at: Iterable[tuple[float, Callable[[SimPool], None]]] = (),
    ) -> PoolOutcome:
        """Let `requests` arrive and `duration_s` pass; `at` holds other things to do, and when."""
        end_s = self.setup.start_s + duration_s
        self.feed(request for request in requests if request.arrival_s < end_s)
        for time_s, action in at:
            self.loop.at(time_s, partial(action, self))
        self.start()
        self.loop.run(end_s)
        self.node.account()
        return PoolOutcome(
            duration_s,
            self._done,
            list(self.node.live()),
            self.switcher.records,
            self.timeline,
            self._decisions,
            self.node.totals.device_s,
            self.node.totals.preemptions,
            self._refused,
            {alarm for decision in self._decisions for alarm in decision.alarms},
        )

    def feed(self, requests: Iterable[SimRequest]) -> None:
        """Let them arrive; they are in order of time, and each is asked for when the one before arrives."""
        self._next(iter(requests))

    def start(self) -> None:
        """Begin to decide, except in static mode."""
        if self.setup.mode != "static":
            self.loop.every(self.setup.config.interval_s, self._decide)

    def _next(self, requests: Iterator[SimRequest]) -> None:
        request = next(requests, None)
        if request is not None:
            self.loop.at(request.arrival_s, partial(self._arrive, request, requests))

    def snapshot(self) -> PoolSnapshot:
        """The pool as the planner sees it."""
        now, switcher = self.loop.now(), self.switcher
        contexts, generated, running = 0.0, 0, 0
        streams: list[Stream] = []
        late = [r.who for r in self.node.waiting if r.first_token_s is None]
        for domain in self.node.domains.values():
            running += domain.running
            late += [r.who for r in domain.unserved()]
            for request, tokens in domain.decoding():
                contexts += request.prompt + tokens
                generated += tokens
                if tokens >= FEW_TOKENS and request.first_token_s is not None:
                    streams.append(Stream(request.who, tokens, request.first_token_s, now))
        seen = self._traffic.view(now, late, streams)
        return PoolSnapshot(
            time_s=now,
            layout=str(switcher.observed),
            devices_total=self.setup.devices,
            devices_available=self.available,
            legal=self.setup.legal,
            mode=self.setup.mode,
            switch=switcher.view,
            draining=switcher.draining,
            barred=self.reconciler.bars(),
            last_commit_s=switcher.last_commit_s,
            arrivals_2s=seen.arrivals_2s,
            arrivals_10s=seen.arrivals_10s,
            outputs=seen.outputs,
            prefix_hit_share=self._prefix.view(self.node.hits, self.node.queries),
            waiting=self._waiting(now, seen.worst_ttft_ratio),
            running=Running(running, contexts / running, generated / running) if running else Running(),
            ttft=seen.ttft,
            tpot=seen.tpot,
            steps=self.node.take_samples(),
        )

    def _decide(self) -> None:
        snapshot = self.snapshot()
        decision, self._state = decide(snapshot, self._state, self.setup.config, self._cost)
        if self._observer is None:
            self.journal.add(snapshot, decision, self._state)
            self._decisions.append(decision)
        else:
            self._observer.on_decision(snapshot, decision)
        self.reconciler.follow(decision, self.setup.config)
        flight = snapshot.switch
        self.reconciler.step(
            Observed(
                snapshot.layout, self.available, None if flight is None else (flight.id, flight.to_layout)
            )
        )

    def _switched(self, status: SwitchStatus) -> None:
        """A switch ended: the planner decides anew on what is there now, as in the server."""
        mine = status.switch_id == self.reconciler.in_flight
        self.reconciler.on_status(status)
        if status.outcome == "committed":
            self._traffic.committed(self.loop.now())
            self.timeline.append((self.loop.now(), str(self.switcher.observed)))
        if mine:
            self.reconciler.want(None)

    def _waiting(self, now: float, worst_ttft_ratio: float) -> Waiting:
        if not self.node.waiting:
            return Waiting(worst_ttft_ratio=worst_ttft_ratio)
        fresh = [r for r in self.node.waiting if not r.computed]
        return Waiting(
            requests=len(fresh),
            prompt_tokens=sum(r.prompt for r in fresh),
            oldest_s=max((now - r.arrival_s for r in fresh), default=0.0),
            worst_ttft_ratio=worst_ttft_ratio,
            needs_devices=self._needs(),
        )

    def _needs(self) -> int:
        widest = max(shape.devices for shape in self.switcher.observed.shapes)
        stuck = [r for r in self.node.waiting if not self.node.fits_when_empty(r, widest)]
        degrees = range(widest + 1, self.setup.devices + 1)
        fitting = [next((d for d in degrees if self.node.fits_when_empty(r, d)), 0) for r in stuck]
        return max(fitting, default=0)

    def _arrive(self, request: SimRequest, requests: Iterator[SimRequest]) -> None:
        self._next(requests)
        observer = self._observer
        if observer is not None:
            observer.on_arrival(request)
        refusal = self._gate.refusal(request)
        if refusal is not None:
            self._refused += 1
            if observer is not None:
                observer.on_refused(request, refusal.reason)
            return
        self._traffic.arrived(self.loop.now(), request.prompt)
        self.node.submit(request)

    def _first_token(self, request: SimRequest) -> None:
        self._traffic.first_token(self.loop.now(), request.who)

    def _finished(self, domain: SimDomain, request: SimRequest) -> None:
        now = self.loop.now()
        assert request.first_token_s is not None
        self._traffic.finished(now, Stream(request.who, request.output, request.first_token_s, now))
        self._gate.finished(request)
        self.switcher.finished(domain, request)
        if self._observer is None:
            self._done.append(request)
        else:
            self._observer.on_finished(request)


def _in_time(request: SimRequest, config: ControlConfig) -> bool:
    if request.finished_s is None:
        return False
    slo = config.slo.of(request.request_class, request.tenant)
    return request.ttft_s <= slo.ttft_target_s(request.prompt) and request.tpot_s <= slo.tpot_target_s
