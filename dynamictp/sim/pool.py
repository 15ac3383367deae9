"""A pool on virtual time under the production planner: snapshots in, decisions out, a timeline kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import msgspec

from dynamictp.control.capacity import CostBook
from dynamictp.control.config import ControlConfig
from dynamictp.control.facts import PoolFacts
from dynamictp.control.journal import Journal
from dynamictp.control.planner import decide
from dynamictp.control.reconciler import Observed, Reconciler
from dynamictp.control.state import PlannerState
from dynamictp.control.values import Decision, Mode, PoolSnapshot, Reason, Running, Waiting
from dynamictp.control.windows import Stream, TrafficWindows, Who
from dynamictp.messages import SwitchStatus
from dynamictp.sim.domain import SimDomain
from dynamictp.sim.loop import EventLoop
from dynamictp.sim.node import Faults, Node, SwitchTimes
from dynamictp.sim.requests import SimRequest
from dynamictp.sim.switching import Switcher, SwitchRecord


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


@dataclass
class Outcome:
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

    def __init__(self, setup: Setup) -> None:
        self.setup, config = setup, setup.config
        self.loop = EventLoop()
        self.node = Node(
            self.loop,
            setup.facts,
            setup.devices,
            config=config,
            noise=setup.noise,
            seed=setup.seed,
            faults=setup.faults,
        )
        self.switcher = Switcher(self.node, setup.layout, setup.times, config)
        self._ids = count(1)
        self.reconciler = Reconciler(
            self.loop, self.switcher, lambda: f"s{next(self._ids)}", bar_s=config.bar_s
        )
        self.switcher.on_status = self._switched
        self.available = setup.devices
        facts = setup.believed or setup.facts
        self.journal = Journal(facts, config, PlannerState())
        self._cost, self._state = CostBook(facts), PlannerState()
        self._traffic = TrafficWindows(0.0, config)
        self._first_seen: set[SimRequest] = set()
        self._timeline = [(0.0, setup.layout)]
        self._decisions: list[Decision] = []
        self.node.on_finish = self._finished

    def run(
        self,
        requests: Iterable[SimRequest],
        duration_s: float,
        *,
        at: Iterable[tuple[float, Callable[[SimPool], None]]] = (),
    ) -> Outcome:
        """Let `requests` arrive and `duration_s` pass; `at` holds other things to do, and when."""
        for request in requests:
            if request.arrival_s < duration_s:
                self.loop.at(request.arrival_s, partial(self._arrive, request))
        for time_s, action in at:
            self.loop.at(time_s, partial(action, self))
        if self.setup.mode != "static":
            self.loop.every(self.setup.config.interval_s, self._decide)
        self.loop.run(duration_s)
        self.node.account()
        return Outcome(
            duration_s,
            self.node.totals.finished,
            list(self.node.live()),
            self.switcher.records,
            self._timeline,
            self._decisions,
            self.node.totals.device_s,
            self.node.totals.preemptions,
            {alarm for decision in self._decisions for alarm in decision.alarms},
        )

    def snapshot(self) -> PoolSnapshot:
        """The pool as the planner sees it."""
        now, switcher = self.loop.now(), self.switcher
        contexts, generated, running = 0.0, 0, 0
        streams: list[Stream] = []
        for domain in self.node.domains.values():
            running += domain.running
            for request, tokens in domain.decoding():
                contexts += request.prompt + tokens
                generated += tokens
                if request.first_token_s is not None:
                    streams.append(Stream(_who(request), tokens, request.first_token_s, now))
            for request in domain.requests():
                self._first_token(request)
        late = [_who(request) for request in self.node.live() if request.first_token_s is None]
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
            waiting=self._waiting(now, seen.worst_ttft_ratio),
            running=Running(running, contexts / running, generated / running) if running else Running(),
            ttft=seen.ttft,
            tpot=seen.tpot,
            steps=self.node.take_samples(),
        )

    def _decide(self) -> None:
        snapshot = self.snapshot()
        decision, self._state = decide(snapshot, self._state, self.setup.config, self._cost)
        self.journal.add(snapshot, decision, self._state)
        self._decisions.append(decision)
        self.reconciler.follow(decision, self.setup.config)
        flight = snapshot.switch
        self.reconciler.step(
            Observed(
                snapshot.layout, self.available, None if flight is None else (flight.id, flight.to_layout)
            )
        )
        if self._timeline[-1][1] != snapshot.layout:
            self._timeline.append((snapshot.time_s, snapshot.layout))

    def _switched(self, status: SwitchStatus) -> None:
        """A switch ended: the planner decides anew on what is there now, as in the server."""
        mine = status.switch_id == self.reconciler.in_flight
        self.reconciler.on_status(status)
        if status.outcome == "committed":
            self._traffic.committed(self.loop.now())
        if mine:
            self.reconciler.want(None)

    def _waiting(self, now: float, worst_ttft_ratio: float) -> Waiting:
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

    def _arrive(self, request: SimRequest) -> None:
        self._traffic.arrived(self.loop.now(), request.prompt)
        self.node.submit(request)

    def _first_token(self, request: SimRequest) -> None:
        if request.first_token_s is not None and request not in self._first_seen:
            self._first_seen.add(request)
            self._traffic.first_token(request.first_token_s, _who(request))

    def _finished(self, domain: SimDomain, request: SimRequest) -> None:
        self._first_token(request)
        self._first_seen.discard(request)
        now = self.loop.now()
        assert request.first_token_s is not None
        self._traffic.finished(now, Stream(_who(request), request.output, request.first_token_s, now))
        self.switcher.finished(domain, request)


def _who(request: SimRequest) -> Who:
    return Who(request.arrival_s, request.prompt, request.request_class, request.tenant)


def _in_time(request: SimRequest, config: ControlConfig) -> bool:
    if request.finished_s is None:
        return False
    slo = config.slo.of(request.request_class, request.tenant)
    return request.ttft_s <= slo.ttft_target_s(request.prompt) and request.tpot_s <= slo.tpot_target_s
