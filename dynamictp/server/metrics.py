"""Prometheus metrics of a server, collected at scrape time.

The hot path only adds to plain numbers; families are built when `/metrics` is read. One thread. Every help
text ends with the question that the metric answers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import ClassVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamictp.clock import Clock, SystemClock
from dynamictp.control.admission import REASONS
from dynamictp.layout import PlacedShape, Shape
from dynamictp.messages import DomainStatus, Snapshot, StepTotals, SwitchStatus
from dynamictp.observe.aliases import vllm_aliases
from dynamictp.observe.families import (
    PHASE_S,
    TPOT_S,
    TTFT_S,
    Histogram,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
)
from dynamictp.observe.history import History, kv_usage
from dynamictp.observe.machine import MachineMetrics, ProcessMetrics
from dynamictp.observe.requests import RequestMetrics
from dynamictp.server.admission import AdmissionControl
from dynamictp.server.plane_metrics import PlaneMetrics

OUTCOMES = ("committed", "noop", "failed", "cancelled", "rolled_back")
"""Ends of switches; a closed one counts as committed."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """Everything `/metrics` shows. Fed by the engine client, read by `render`."""

    request_metrics: ClassVar[type[RequestMetrics]] = RequestMetrics

    def __init__(
        self,
        pool: str = "default",
        admission: AdmissionControl | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._pool = pool
        self._admission = admission
        self._snapshot: Snapshot | None = None
        self._placed: dict[str, str] = {}
        """Domain id → placed shape, the label of per-domain series."""
        self._pending_tokens: Counter[str] = Counter()
        self._domain_tokens: Counter[str] = Counter()
        self._switches: Counter[tuple[str, str, str, str]] = Counter()
        self._phases: dict[str, Histogram] = {}
        self._switch_seen: dict[str, set[str]] = {}
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._open: set[str] = set()
        self._moved: Counter[str] = Counter({"handover": 0, "recompute": 0})
        self._ttft = Histogram(TTFT_S)
        self._itl = Histogram(TPOT_S)
        self.requests = self.request_metrics()
        self.machine: ProcessMetrics = MachineMetrics()
        self.plane = PlaneMetrics()
        self.alias_model = ""
        """The model's name while its metrics are shown under the `vllm:` names too."""
        self.history = History(clock or SystemClock(), time.time)
        self.tokens_total = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    # ------------------------------------------------------------ what happens

    def on_token(self, domain: str, seconds: float, *, first: bool) -> None:
        """A token reached the server, `seconds` after the one before it, or after the request's arrival."""
        self._pending_tokens[domain] += 1
        self.tokens_total += 1
        (self._ttft if first else self._itl).observe(seconds)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        # A restarted engine numbers its domains anew: count under the old names first.
        self._settle_tokens()
        self._snapshot = snapshot
        for domain in snapshot.domains:
            self._placed[domain.id] = placed_label(domain)
        while len(self._placed) > 1024:
            self._placed.pop(next(iter(self._placed)))
        self.history.look(snapshot, self)

    @property
    def arrivals_total(self) -> int:
        return self.requests.arrivals

    @property
    def latencies(self) -> tuple[Histogram, ...]:
        """TTFT of each class, then the time between tokens."""
        return (*self.requests.ttft.values(), self._itl)

    def on_switch(self, status: SwitchStatus) -> None:
        """Each switch counts once, at its first outcome; each of its phases once."""
        seen = self._switch_seen.setdefault(status.switch_id, set())
        for phase, milliseconds in status.phases_ms.items():
            if phase not in seen:
                seen.add(phase)
                self._phases.setdefault(phase, Histogram(PHASE_S)).observe(milliseconds / 1000)
        (self._open.discard if status.outcome else self._open.add)(status.switch_id)
        if status.outcome and "outcome" not in seen:
            seen.add("outcome")
            outcome = "committed" if status.outcome == "closed" else status.outcome
            self._switches[status.from_layout, status.to_layout, status.reason, outcome] += 1
            self._outcomes[outcome] += 1
        if status.outcome == "closed" and "closed" not in seen:
            seen.add("closed")
            self._moved["handover"] += status.handovers
            self._moved["recompute"] += status.recomputes
        while len(self._switch_seen) > 256:
            oldest = next(iter(self._switch_seen))
            self._switch_seen.pop(oldest)
            self._open.discard(oldest)

    def _settle_tokens(self) -> None:
        """Move counts to their placed shape. Tokens of a domain not yet in a snapshot wait for the next."""
        for domain in [d for d in self._pending_tokens if d in self._placed]:
            self._domain_tokens[self._placed[domain]] += self._pending_tokens.pop(domain)

    # ------------------------------------------------------------ scrape

    def collect(self) -> Iterator[Metric]:
        self._settle_tokens()
        ours = list(self._collect_all())
        yield from ours
        if self.alias_model:
            yield from vllm_aliases(ours, self.alias_model)

    def describe(self) -> Iterable[Metric]:
        """Nothing to declare ahead: the registry must not collect at registration."""
        return ()

    def _collect_all(self) -> Iterator[Metric]:
        yield from self._collect_engine()
        yield from self._collect_cache()
        yield from self._collect_domains()
        yield from self._collect_steps()
        yield from self._collect_tokens()
        yield from self.requests.collect()
        yield from self._collect_admission()
        yield from self._collect_switches()
        yield from self.plane.collect()
        yield from self.machine.collect()

    def _collect_engine(self) -> Iterator[Metric]:
        now = self._snapshot
        running, waiting = (now.running, now.waiting) if now else (0, 0)
        limit = now.rows_limit if now else 0
        yield gauge("dtp_num_requests_running", "Requests being computed. How busy is the server?", running)
        yield gauge(
            "dtp_num_requests_waiting",
            "Requests in the waiting queue. Is there more than can run?",
            waiting,
        )
        yield gauge(
            "dtp_rows_used", "Slots of workers in use. How full is the batch?", now.rows_used if now else 0
        )
        yield gauge("dtp_rows_total", "Slots of the serving domains. How large can the batch get?", limit)
        wanted = min(running + waiting, limit)
        yield gauge(
            "dtp_batch_efficiency_ratio",
            "Requests running / those that could run: all there are, up to the slots. 1 when nobody waits. "
            "Do requests wait beside free slots (for pages, or for a switch)?",
            min(1.0, running / wanted) if wanted else 1.0,
        )
        yield counter(
            "dtp_preemptions",
            "Requests put back into the queue for want of pages. Is KV memory too small?",
            now.preemptions if now else 0,
        )

    def _collect_cache(self) -> Iterator[Metric]:
        now = self._snapshot
        devices = now.devices if now else ()
        yield gauges(
            "dtp_kv_pages_used",
            "KV pages referenced. Where is the context?",
            "device",
            {str(device.id): device.kv_pages_used for device in devices},
        )
        yield gauges(
            "dtp_kv_pages_total",
            "KV pages of the arena. How much context fits?",
            "device",
            {str(device.id): device.kv_pages_total for device in devices},
        )
        yield gauge(
            "dtp_kv_cache_usage_ratio",
            "KV pages held / allowed, in the fullest serving domain. How near are preemptions?",
            kv_usage(now) if now else 0.0,
        )
        yield gauge(
            "dtp_kv_pages_cached",
            "KV pages that only the prefix cache holds. How much is kept for later?",
            now.pages_cached if now else 0,
        )
        yield counter(
            "dtp_prefix_cache_queries",
            "Tokens looked for in the prefix cache. How much prompt work is there?",
            now.prefix_queries if now else 0,
        )
        yield counter(
            "dtp_prefix_cache_hits",
            "Tokens found in the prefix cache. How much of it was saved?",
            now.prefix_hits if now else 0,
        )
        yield counter(
            "dtp_prefix_cache_evictions",
            "Blocks that the prefix cache gave up for room. Would more memory save prompt work?",
            now.prefix_evictions if now else 0,
        )

    def _collect_domains(self) -> Iterator[Metric]:
        now = self._snapshot
        domains = now.domains if now else ()
        degree = GaugeMetricFamily(
            "dtp_tp_degree",
            "Widest tensor-parallel degree that serves now. What does the layout say? (What requests got: "
            "dtp_request_tp_degree.)",
            labels=["pool"],
        )
        serving = [d.tp for d in domains if d.state == "serving"]
        degree.add_metric([self._pool], max(serving, default=0))
        yield degree
        running: Counter[str] = Counter()
        for domain in domains:
            running[placed_label(domain)] += domain.running
        yield gauges(
            "dtp_domain_requests_running",
            "Requests being computed, by domain, draining ones too. Where do requests run?",
            "domain",
            running,
        )
        states = Counter({"preparing": 0, "serving": 0, "draining": 0, "failed": 0})
        states.update(d.state for d in domains)
        yield gauges("dtp_domains", "Domains by state. Does something drain or fail?", "state", states)
        yield gauge(
            "dtp_ranks_per_core",
            "Ranks of serving domains on one core, at most. Do ranks wait for a core?",
            self._ranks_per_core(domains),
        )
        yield counters(
            "dtp_device_busy_seconds",
            "Time a device spent in steps, waits for peers included. How loaded is each device?",
            ["device"],
            (((str(device.id),), device.busy_s) for device in (now.devices if now else ())),
        )

    def _ranks_per_core(self, domains: Iterable[DomainStatus]) -> int:
        placed = self.machine.sources.devices()
        ranks = (device for domain in domains if domain.state == "serving" for device in domain.devices)
        return max(
            Counter(core for rank in ranks if rank in placed for core in placed[rank].cores).values(),
            default=0,
        )

    def _collect_steps(self) -> Iterator[Metric]:
        now = self._snapshot
        steps = CounterMetricFamily(
            "dtp_steps",
            "Steps, by degree; a decode step computes no prompt token. How many tokens share a step?",
            labels=["tp", "phase"],
        )
        seconds = CounterMetricFamily(
            "dtp_step_seconds",
            "Where the time of steps went on rank 0; host is what passed between them while there was "
            "work. Is the bottleneck memory or arithmetic (weights, attention), communication (wait) or "
            "the host?",
            labels=["tp", "phase", "part"],
        )
        for total in now.steps if now else ():
            labels = [str(total.tp), total.phase]
            steps.add_metric(labels, total.steps)
            for part, value in step_parts(total).items():
                seconds.add_metric([*labels, part], value)
        yield steps
        yield seconds
        yield gauge(
            "dtp_engine_step_seconds",
            "Engine time per step, median of the last 128. Does scheduling hold the workers up?",
            now.step_engine_us * 1e-6 if now else 0.0,
        )

    def _collect_tokens(self) -> Iterator[Metric]:
        yield counters(
            "dtp_generation_tokens",
            "Output tokens, by the domain that computed them. What is the throughput, and who makes it?",
            ["domain"],
            (((placed,), count) for placed, count in self._domain_tokens.items()),
        )
        yield histogram(
            "dtp_time_to_first_token_seconds", "Arrival to first token. How long do users wait?", self._ttft
        )
        yield histogram(
            "dtp_inter_token_latency_seconds",
            "Time between tokens of a request. Do streams flow or stutter?",
            self._itl,
        )

    def _collect_admission(self) -> Iterator[Metric]:
        admission = self._admission
        yield counters(
            "dtp_requests_refused",
            "HTTP requests refused. Who is sent away, and why?",
            ["reason"],
            (((reason,), admission.refused[reason] if admission else 0) for reason in REASONS),
        )
        yield gauge(
            "dtp_prompt_tokens_waiting",
            "Prompt tokens of requests without a first token. How long is the queue, in work?",
            admission.backlog.tokens if admission else 0,
        )

    def _collect_switches(self) -> Iterator[Metric]:
        yield counters(
            "dtp_tp_switches",
            "Switches by outcome. How often does the layout change, why, and does it work?",
            ["from", "to", "reason", "outcome"],
            self._switches.items(),
        )
        yield counters(
            "dtp_tp_switch_outcomes",
            "The same by outcome only, there from the start on. Did a switch fail, do they come too often?",
            ["outcome"],
            (((outcome,), count) for outcome, count in self._outcomes.items()),
        )
        yield gauge(
            "dtp_tp_switches_in_flight", "Switches without an outcome. Is one stuck?", len(self._open)
        )
        yield counters(
            "dtp_tp_switch_requests",
            "Requests that closed switches handed over with their pages, or had computed again. What did "
            "switches cost?",
            ["kind"],
            (((kind,), count) for kind, count in self._moved.items()),
        )
        phases = HistogramMetricFamily(
            "dtp_tp_switch_phase_seconds",
            "Time a phase of a switch took. Where does a slow switch spend its time?",
            labels=["phase"],
        )
        for phase, values in self._phases.items():
            buckets, total = values.cumulative()
            phases.add_metric([phase], buckets, total)
        yield phases


def step_parts(total: StepTotals) -> dict[str, float]:
    """Seconds by part. `other` is the rest of the steps: norms, rotary, page writes, sampling, Python."""
    measured_s = total.weights_s + total.attention_s + total.wait_s
    return {
        "weights": total.weights_s,
        "attention": total.attention_s,
        "wait": total.wait_s,
        "other": max(total.seconds - measured_s, 0.0),
        "host": total.host_s,
    }


def placed_label(domain: DomainStatus) -> str:
    """`tp2@0,1`."""
    return str(PlacedShape(Shape(domain.tp, domain.pp), domain.devices))
