"""An engine on virtual time: the waiting queue, domains with the production router, and switches.

The phases of a switch and their times are modelled (`SwitchTimes`), who decides and drives them is not: the
planner decides, and `drive` hands its decisions on.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dynamictp.control.config import ControlConfig
from dynamictp.control.facts import PoolFacts
from dynamictp.control.route import DomainLoad, RampSides, RequestNeed, RouteState, route
from dynamictp.control.values import StepSample
from dynamictp.cost.steps import StepModel
from dynamictp.layout import PlacedShape
from dynamictp.sim.domain import LONGEST_RUN_S, Run, SimDomain, Surroundings
from dynamictp.sim.loop import EventLoop
from dynamictp.sim.requests import SimRequest
from dynamictp.sim.steptimes import StepTimes
from dynamictp.sim.values import DomainLife, Drift, Faults, Flops, NodeTotals

_EXPECTED_OUTPUT = 128
_MOST_SKIPPED = 16


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
        longest_run_s: float = LONGEST_RUN_S,
        sample_every_s: float = 0.0,
        drift: Drift = (),
    ) -> None:
        self.loop, self.facts, self.devices = loop, facts, devices
        self.faults = faults or Faults()
        self.totals = NodeTotals()
        self.domains: dict[int, SimDomain] = {}
        self.lives: dict[int, DomainLife] = {}
        """Of all domains that ever were, by epoch."""
        self.waiting: list[SimRequest] = []
        self.routing = RouteState(long_prompt_tokens=config.long_prompt_tokens)
        self.ramp: RampSides[SimDomain] | None = None
        """Of the switch under way; its switcher's to set."""
        self.hits = self.queries = 0
        """Prompt tokens found in the prefix cache, of those asked for."""
        self.on_first: Callable[[SimRequest], None] = lambda request: None
        self.on_finish: Callable[[SimDomain, SimRequest], None] = lambda domain, request: None
        self.on_broken: Callable[[SimDomain], None] = lambda domain: None
        self.on_idle: Callable[[SimDomain], None] = lambda domain: None
        self._times: dict[tuple[int, int], StepTimes] = {}
        self._rivals: dict[int, list[SimDomain]] = {}
        """By epoch: domains in use with a device in common."""
        self._serving: list[SimDomain] = []
        self._longest_run_s = longest_run_s
        self._cached: set[str] = set()
        self._flops = Flops.of(facts.shape)
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._epoch = 0
        self._samples: dict[tuple[int, bool], StepSample] = {}
        self._sample_every_s = sample_every_s
        self._sampled_s: dict[tuple[int, bool], float] = {}
        self._drift, self._drifted = drift, 0
        self._accounted_s = loop.now()

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
        self.account()
        self._epoch += 1
        quota = self.facts.kv_tokens_per_device * placed.shape.devices
        domain = SimDomain(
            self._epoch, placed, self.loop, limits=self.facts.limits, quota_tokens=quota, host=self,
            longest_run_s=self._longest_run_s,
        )  # fmt: skip
        self.domains[domain.epoch] = domain
        self.lives[domain.epoch] = DomainLife(
            domain.epoch, str(placed.shape), placed.devices, self.loop.now()
        )
        return domain

    def serve(self, domain: SimDomain) -> None:
        domain.state = "serving"
        life = self.lives[domain.epoch]
        life.serving_s, life.draining_s = life.serving_s or self.loop.now(), None
        self._changed()

    def drain(self, domain: SimDomain) -> None:
        """It takes no new requests any more."""
        domain.state = "draining"
        self.lives[domain.epoch].draining_s = self.loop.now()
        self._changed()

    def close(self, domain: SimDomain) -> None:
        """Take a domain away; it must be empty."""
        if domain.running:
            raise RuntimeError(f"domain {domain.epoch} closes with {domain.running} requests")
        self.account()
        domain.state = "closed"
        self.lives[domain.epoch].closed_s = self.loop.now()
        del self.domains[domain.epoch]
        self._changed()

    def hand_over(self, domain: SimDomain) -> None:
        """Move all requests of a domain that has no step in flight to serving ones, with their pages where
        the devices share a memory."""
        for request in tuple(domain.requests()):
            domain.take(request)
            request.handovers += 1
            chosen = self._route(request, [d for d in self._serving if d is not domain])
            if chosen is not None and self.facts.device.shared_memory:
                chosen.add(request)
            else:
                self.requeue(request, recompute=True)

    def account(self) -> None:
        """Add up device seconds until now."""
        now = self.loop.now()
        if now > self._accounted_s:
            used = {device for d in self.domains.values() for device in d.devices}
            self.totals.device_s += len(used) * (now - self._accounted_s)
            self._accounted_s = now

    def speed(self) -> tuple[float, int, int]:
        """(prompt tokens per second beside what decodes, rows, rows that decode) of the serving domains."""
        rate, rows, decoding = 0.0, 0, 0
        for domain in self._serving:
            times = self.times(domain.tp, domain.tp)
            beside = domain.decoders
            tokens = max(self.facts.limits.max_batched_tokens - beside, 1)
            step_s = times.base_s(tokens + beside, beside + 1)
            if beside:
                step_s += times.decode_attention_s(beside, domain.context_mean)
            rate += tokens / step_s
            rows += self.facts.limits.max_num_seqs
            decoding += beside
        return rate, rows, decoding

    def take_samples(self) -> tuple[StepSample, ...]:
        """Measured steps since the last call, one of each kind."""
        samples = tuple(self._samples.values())
        self._samples.clear()
        return samples

    # ------------------------------------------------------------ as the domains' host

    def surroundings(self, domain: SimDomain) -> Surroundings:
        sharers = sum(1 for rival in self._rivals.get(domain.epoch, ()) if rival.running)
        active = domain.tp
        if self.facts.device.shared_bandwidth is not None:
            busy = [d for d in self._in_use() if d.running or d is domain]
            active = len({device for d in busy for device in d.devices})
        factor = 1.0
        if self.faults.slow:
            factor = self.faults.slow.get(str(domain.placed.shape), 1.0)
        if self._drift:
            factor *= self._speed_now()
        if self._noise:
            factor *= float(self._rng.lognormal(-(self._noise**2) / 2, self._noise))
        return Surroundings(self.times(domain.tp, active), sharers, factor, active)

    def _speed_now(self) -> float:
        drift, now = self._drift, self.loop.now()
        while self._drifted + 1 < len(drift) and drift[self._drifted + 1][0] <= now:
            self._drifted += 1
        return drift[self._drifted][1]

    def wants_sample(self, domain: SimDomain, *, prefill: bool) -> bool:
        kind = (domain.tp, prefill)
        if kind in self._samples:
            return False
        return not self._sample_every_s or self.loop.now() >= self._sampled_s.get(kind, 0.0)

    def on_sample(self, domain: SimDomain, sample: StepSample) -> None:
        kind = (sample.tp, sample.prefill_tokens > 0)
        self._samples[kind] = sample
        self._sampled_s[kind] = self.loop.now() + self._sample_every_s

    def on_work(self, domain: SimDomain, run: Run) -> None:
        totals, flops, steps = self.totals, self._flops, run.steps
        # Domains that take turns on a device each have it for their part of the time.
        totals.busy_s += steps * run.step_s * len(domain.devices) / (1 + run.sharers)
        work = flops.body * (run.rows * steps + run.tokens) + flops.head * (
            run.rows * steps + len(run.chunks)
        )
        if run.rows:
            totals.decoded += run.rows * steps
            work += flops.pair * steps * (run.context + run.rows * (steps - 1) / 2)
        if run.tokens:
            totals.prefilled += run.tokens
            work += flops.pair * sum([size * (r.computed + size / 2) for r, size in run.chunks])
        totals.flops += work

    def on_prompt_token(self, domain: SimDomain, request: SimRequest) -> None:
        self.totals.prompts += 1
        if request.first_token_s is None:
            request.first_token_s = self.loop.now()
            if request.prefix:
                self._cached.add(request.prefix)
            self.on_first(request)

    def breaks(self, domain: SimDomain) -> bool:
        if str(domain.placed.shape) not in self.faults.failing:
            return False
        self.on_broken(domain)
        return True

    def on_step_end(self, domain: SimDomain) -> None:
        self.on_idle(domain)
        self.pump()

    def on_finished(self, domain: SimDomain, request: SimRequest) -> None:
        self.on_finish(domain, request)

    def on_preempted(self, request: SimRequest) -> None:
        self.totals.preemptions += 1
        request.resumed = True
        self._queue(request)

    # ------------------------------------------------------------ within

    def _queue(self, request: SimRequest) -> None:
        insort(self.waiting, request, key=lambda r: (not r.resumed, -r.priority, r.arrival_s))

    def _changed(self) -> None:
        """Some domain's state is another one now."""
        self._serving = [domain for domain in self.domains.values() if domain.state == "serving"]
        used = self._in_use()
        self._rivals = {
            d.epoch: [o for o in used if o is not d and not set(o.devices).isdisjoint(d.devices)]
            for d in used
        }

    def _in_use(self) -> list[SimDomain]:
        return [domain for domain in self.domains.values() if domain.state in {"serving", "draining"}]

    def _admit(self) -> None:
        """In order; one that waits for room makes those behind it wait. Only one that no serving domain could
        hold even when empty is passed over, unless it ran before."""
        serving = self._serving
        index = 0
        while index < len(self.waiting) and index <= _MOST_SKIPPED:
            request = self.waiting[index]
            self._look_up(request)
            chosen = self._route(request, serving, self.facts.limits.max_batched_tokens)
            if chosen is not None:
                del self.waiting[index]
                chosen.add(request)
            elif request.resumed or any(self.fits_when_empty(request, d.tp) for d in serving):
                return
            else:
                index += 1

    def _look_up(self, request: SimRequest) -> None:
        """Whole pages of a prefix that others have computed need not be computed again. The last token
        always is: its logits are needed."""
        if not request.prefix or request.computed or request.looked_up:
            return
        request.looked_up = True
        self.queries += request.prompt
        if request.prefix in self._cached:
            page = self.facts.limits.page_tokens
            request.computed = min(request.prefix_tokens, request.prompt - 1) // page * page
            self.hits += request.computed

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
        times = self.times(domain.tp, domain.tp)
        return DomainLoad(
            domain.epoch,
            len(domain.devices),
            domain.running,
            domain.rows_free,
            1 if domain.fits(request) else 0,
            step_s=times.decode_s(domain.running + 1, max(domain.context_mean, 1.0)),
            token_s=times.prompt_token_s(self.facts.limits.max_batched_tokens),
            backlog_tokens=domain.backlog,
        )

    def times(self, tp: int, active_devices: int) -> StepTimes:
        """Step times of that degree while so many devices of the node work."""
        key = (tp, max(tp, active_devices))
        times = self._times.get(key)
        if times is None:
            domain = self.facts.domain(*key, self.facts.calibration)
            times = self._times[key] = StepTimes(StepModel(domain))
        return times
