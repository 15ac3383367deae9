"""An engine on virtual time: the waiting queue, domains with the production router, and switches.

The phases of a switch and their times are modelled (`SwitchTimes`), who decides and drives them is not: the
planner decides, and `drive` hands its decisions on.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from dynamictp.control.config import ControlConfig
from dynamictp.control.facts import PoolFacts
from dynamictp.control.route import DomainLoad, RampSides, RequestNeed, RouteState, route
from dynamictp.control.values import StepSample
from dynamictp.cost.steps import StepModel
from dynamictp.layout import LayoutSpec, PlacedShape
from dynamictp.sim.domain import SimDomain, Surroundings
from dynamictp.sim.loop import EventLoop
from dynamictp.sim.requests import SimRequest

_EXPECTED_OUTPUT = 128
_MOST_SKIPPED = 16
_SAMPLES_OF_A_KIND = 1


class SwitchTimes(msgspec.Struct, frozen=True):
    """How long the phases of a switch take on the node. Seconds."""

    prepare_s: float = 0.05
    commit_s: float = 0.005


class Faults(msgspec.Struct, frozen=True):
    """What goes wrong. Shapes are texts, `tp2`."""

    failing: frozenset[str] = frozenset()
    """Every step of a domain of these shapes fails."""
    slow: dict[str, float] = {}
    """Steps of a domain of that shape take so many times as long."""
    hidden: bool = False
    """The shadow probe does not notice."""


@dataclass(slots=True)
class NodeTotals:
    """What a run adds up to."""

    finished: list[SimRequest] = field(default_factory=list)
    device_s: float = 0.0
    """Devices in some domain × time."""
    busy_s: float = 0.0
    preemptions: int = 0
    generated: int = 0


class Node:
    """Owner of the waiting queue, the domains and the routing state. `changed` is called when a domain fails
    or may have finished to drain, for whoever switches layouts."""

    def __init__(
        self,
        loop: EventLoop,
        facts: PoolFacts,
        devices: int,
        *,
        config: ControlConfig,
        noise: float = 0.0,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.loop, self.facts, self.devices = loop, facts, devices
        self.faults = faults or Faults()
        self.totals = NodeTotals()
        self.domains: dict[int, SimDomain] = {}
        self.waiting: list[SimRequest] = []
        self.routing = RouteState(long_prompt_tokens=config.long_prompt_tokens)
        self.ramp: RampSides[SimDomain] | None = None
        """Of the switch under way; its switcher's to set."""
        self.on_finish: Callable[[SimDomain, SimRequest], None] = lambda domain, request: None
        self.on_broken: Callable[[SimDomain], None] = lambda domain: None
        self.on_idle: Callable[[SimDomain], None] = lambda domain: None
        self._models: dict[tuple[int, int], StepModel] = {}
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._epoch = 0
        self._samples: dict[tuple[int, bool], list[StepSample]] = {}
        self._accounted_s = 0.0

    # ------------------------------------------------------------ requests

    def submit(self, request: SimRequest) -> None:
        """A request arrives."""
        self._queue(request)
        self.pump()

    def requeue(self, request: SimRequest, *, recompute: bool) -> None:
        """Put a request that was taken off a domain in front of the queue."""
        if recompute:
            request.computed = 0
            request.recomputes += 1
        request.resumed = True
        self._queue(request)

    def pump(self) -> None:
        """Admit what has room, and let idle domains begin their next step."""
        self._admit()
        for domain in tuple(self.domains.values()):
            if domain.state in {"serving", "draining"}:
                domain.start()

    def live(self) -> Iterator[SimRequest]:
        """All requests that are here."""
        yield from self.waiting
        for domain in self.domains.values():
            yield from domain.requests()

    def fits_when_empty(self, request: SimRequest, tp: int) -> bool:
        """An empty domain of that degree could hold the request to its end."""
        needed = request.prompt + request.output + self.facts.limits.page_tokens
        return needed <= self.facts.kv_tokens_per_device * tp

    # ------------------------------------------------------------ domains

    def open(self, placed: PlacedShape) -> SimDomain:
        """A new domain, not serving yet."""
        self._epoch += 1
        quota = self.facts.kv_tokens_per_device * placed.shape.devices
        domain = SimDomain(
            self._epoch, placed, self.loop, limits=self.facts.limits, quota_tokens=quota, host=self
        )
        self.domains[domain.epoch] = domain
        return domain

    def serve(self, domain: SimDomain) -> None:
        self.account()
        domain.state = "serving"

    def close(self, domain: SimDomain) -> None:
        """Take a domain away; it must be empty."""
        if domain.running:
            raise RuntimeError(f"domain {domain.epoch} closes with {domain.running} requests")
        self.account()
        domain.state = "closed"
        self.totals.busy_s += domain.busy_s
        del self.domains[domain.epoch]

    def hand_over(self, domain: SimDomain) -> None:
        """Move all requests of a domain that has no step in flight to serving ones, with their pages where
        the devices share a memory."""
        for request in tuple(domain.requests()):
            domain.take(request)
            request.handovers += 1
            chosen = self._route(request, [d for d in self._serving() if d is not domain])
            if chosen is not None and self.facts.device.shared_memory:
                chosen.add(request)
            else:
                self.requeue(request, recompute=True)

    def account(self) -> None:
        """Add up device seconds until now."""
        now = self.loop.now()
        used = {device for d in self._in_use() for device in d.devices}
        self.totals.device_s += len(used) * (now - self._accounted_s)
        self._accounted_s = now

    def take_samples(self) -> tuple[StepSample, ...]:
        """Measured steps since the last call, a few of each kind."""
        samples = tuple(sample for kind in self._samples.values() for sample in kind)
        self._samples.clear()
        return samples

    # ------------------------------------------------------------ as the domains' host

    def surroundings(self, domain: SimDomain) -> Surroundings:
        busy = [d for d in self._in_use() if d.running]
        sharers = sum(d is not domain and not set(d.devices).isdisjoint(domain.devices) for d in busy)
        active = len({device for d in (*busy, domain) for device in d.devices})
        shared = self.facts.device.shared_bandwidth is not None
        factor = self.faults.slow.get(str(domain.placed.shape), 1.0)
        if self._noise:
            factor *= float(self._rng.lognormal(-(self._noise**2) / 2, self._noise))
        return Surroundings(self._model(domain.tp, active if shared else domain.tp), sharers, factor, active)

    def on_step(self, domain: SimDomain, sample: StepSample) -> None:
        kind = self._samples.setdefault((sample.tp, sample.prefill_tokens > 0), [])
        if len(kind) < _SAMPLES_OF_A_KIND:
            kind.append(sample)

    def breaks(self, domain: SimDomain) -> bool:
        if str(domain.placed.shape) not in self.faults.failing:
            return False
        self.on_broken(domain)
        return True

    def on_step_end(self, domain: SimDomain) -> None:
        self.on_idle(domain)
        self.pump()

    def on_finished(self, domain: SimDomain, request: SimRequest) -> None:
        self.totals.finished.append(request)
        self.totals.generated += request.output
        self.on_finish(domain, request)

    def on_preempted(self, request: SimRequest) -> None:
        self.totals.preemptions += 1
        request.resumed = True
        self._queue(request)

    # ------------------------------------------------------------ within

    def _queue(self, request: SimRequest) -> None:
        insort(self.waiting, request, key=lambda r: (not r.resumed, -r.priority, r.arrival_s))

    def _serving(self) -> list[SimDomain]:
        return [domain for domain in self.domains.values() if domain.state == "serving"]

    def _in_use(self) -> list[SimDomain]:
        return [domain for domain in self.domains.values() if domain.state in {"serving", "draining"}]

    def _admit(self) -> None:
        """In order; one that waits for room makes those behind it wait. Only one that no serving domain could
        hold even when empty is passed over."""
        serving = self._serving()
        index = 0
        while index < len(self.waiting) and index <= _MOST_SKIPPED:
            request = self.waiting[index]
            chosen = self._route(request, serving, self.facts.limits.max_batched_tokens)
            if chosen is not None:
                del self.waiting[index]
                chosen.add(request)
            elif any(self.fits_when_empty(request, domain.tp) for domain in serving):
                return
            else:
                index += 1

    def _route(
        self, request: SimRequest, domains: Sequence[SimDomain], most_backlog: float = math.inf
    ) -> SimDomain | None:
        """A domain with room and less than `most_backlog` tokens to prefill, on the request's side of a ramp
        first."""
        groups: Sequence[Sequence[SimDomain]] = [domains]
        if self.ramp is not None:
            groups = self.ramp.groups(request.id, domains, lambda d: self.fits_when_empty(request, d.tp))
        for group in groups:
            chosen = self._pick(request, [domain for domain in group if domain.backlog < most_backlog])
            if chosen is not None:
                if self.ramp is not None and chosen in self.ramp.new:
                    self.ramp = replace(self.ramp, first_due=False)
                return chosen
        return None

    def _pick(self, request: SimRequest, domains: Sequence[SimDomain]) -> SimDomain | None:
        if not domains:
            return None
        loads = [self._load(domain, request) for domain in domains]
        need = RequestNeed(
            [1] * len(domains),
            [request.to_prefill] * len(domains),
            request.id,
            request.prompt,
            min(request.output - request.generated, _EXPECTED_OUTPUT),
            request.priority,
        )
        chosen = route(need, loads, self.routing)
        if chosen is None:
            return None
        self.routing = self.routing.after()
        return self.domains[chosen.epoch]

    def _load(self, domain: SimDomain, request: SimRequest) -> DomainLoad:
        model = self._model(domain.tp, domain.tp)
        rows = domain.running + 1
        most = self.facts.limits.max_batched_tokens
        return DomainLoad(
            domain.epoch,
            len(domain.devices),
            domain.running,
            domain.rows_free,
            1 if domain.fits(request) else 0,
            step_s=model.decode(rows, max(domain.context_mean, 1.0)).total_s,
            token_s=model.base(most, 1.0).total_s / most,
            backlog_tokens=domain.backlog,
        )

    def _model(self, tp: int, active_devices: int) -> StepModel:
        key = (tp, max(tp, active_devices))
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = StepModel(self.facts.domain(*key, self.facts.calibration))
        return model


def spec_of(domains: Sequence[SimDomain]) -> LayoutSpec:
    """The layout that these domains make."""
    return LayoutSpec(tuple(domain.placed.shape for domain in domains))
