"""Prometheus metrics of a server, collected at scrape time.

The hot path only adds to plain numbers; families are built when `/metrics` is read. One thread.
Bucket bounds of the latency histograms are those that OpenTelemetry recommends for generative AI servers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamictp.control.admission import REASONS
from dynamictp.layout import PlacedShape, Shape
from dynamictp.messages import DomainStatus, Snapshot, StepTotals, SwitchStatus
from dynamictp.server.admission import AdmissionControl
from dynamictp.server.plane_metrics import PlaneMetrics

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
E2E_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
PHASE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts per bucket, upper bounds inclusive."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """`(upper bound, observations up to it)` pairs and the sum, as the exposition format wants them."""
        total = 0
        pairs: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            pairs.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        return pairs, self._sum


class Metrics(Collector):
    """Everything `/metrics` shows. Fed by the engine client, read by `render`."""

    def __init__(self, pool: str = "default", admission: AdmissionControl | None = None) -> None:
        self._pool = pool
        self._admission = admission
        self._snapshot: Snapshot | None = None
        self._placed: dict[str, str] = {}
        """Domain id → placed shape, the label of per-domain series."""
        self._pending_tokens: Counter[str] = Counter()
        self._domain_tokens: Counter[str] = Counter()
        self._finished: Counter[str] = Counter({"stop": 0, "length": 0})
        self._switches: Counter[tuple[str, str, str, str]] = Counter()
        self._phases: dict[str, Histogram] = {}
        self._switch_seen: dict[str, set[str]] = {}
        self._ttft = Histogram(TTFT_S)
        self._itl = Histogram(TPOT_S)
        self._e2e = Histogram(E2E_S)
        self._degree = Histogram(DEGREES)
        self.plane = PlaneMetrics()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    # ------------------------------------------------------------ what happens

    def on_token(self, domain: str, seconds: float, *, first: bool) -> None:
        """A token reached the server, `seconds` after the one before it, or after the request's arrival."""
        self._pending_tokens[domain] += 1
        (self._ttft if first else self._itl).observe(seconds)

    def on_finish(self, reason: str, tp: int, seconds: float) -> None:
        """A request finished with `reason` stop or length, last served at degree `tp` (0: by none)."""
        self._finished[reason] += 1
        self._e2e.observe(seconds)
        if tp:
            self._degree.observe(tp)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        # A restarted engine numbers its domains anew: count under the old names first.
        self._settle_tokens()
        self._snapshot = snapshot
        for domain in snapshot.domains:
            self._placed[domain.id] = placed_label(domain)
        while len(self._placed) > 1024:
            self._placed.pop(next(iter(self._placed)))

    def on_switch(self, status: SwitchStatus) -> None:
        """Each switch counts once, at its first outcome; each of its phases once."""
        seen = self._switch_seen.setdefault(status.switch_id, set())
        for phase, milliseconds in status.phases_ms.items():
            if phase not in seen:
                seen.add(phase)
                self._phases.setdefault(phase, Histogram(PHASE_S)).observe(milliseconds / 1000)
        if status.outcome and "outcome" not in seen:
            seen.add("outcome")
            outcome = "committed" if status.outcome == "closed" else status.outcome
            self._switches[status.from_layout, status.to_layout, status.reason, outcome] += 1
        while len(self._switch_seen) > 256:
            self._switch_seen.pop(next(iter(self._switch_seen)))

    def _settle_tokens(self) -> None:
        """Move counts to their placed shape. Tokens of a domain not yet in a snapshot wait for the next."""
        for domain in [d for d in self._pending_tokens if d in self._placed]:
            self._domain_tokens[self._placed[domain]] += self._pending_tokens.pop(domain)

    # ------------------------------------------------------------ scrape

    def collect(self) -> Iterator[Metric]:
        self._settle_tokens()
        yield from self._collect_engine()
        yield from self._collect_steps()
        yield from self._collect_requests()
        yield from self._collect_admission()
        yield from self._collect_switches()
        yield from self.plane.collect()

    def describe(self) -> Iterable[Metric]:
        """Nothing to declare ahead: the registry must not collect at registration."""
        return ()

    def _collect_engine(self) -> Iterator[Metric]:
        now = self._snapshot
        yield _gauge("dtp_num_requests_running", "Requests being computed", now.running if now else 0)
        yield _gauge("dtp_num_requests_waiting", "Requests in the waiting queue", now.waiting if now else 0)
        yield _gauge("dtp_rows_used", "Slots of workers in use", now.rows_used if now else 0)
        used = GaugeMetricFamily("dtp_kv_pages_used", "KV pages referenced", labels=["device"])
        total = GaugeMetricFamily("dtp_kv_pages_total", "KV pages of the arena", labels=["device"])
        for device in now.devices if now else ():
            used.add_metric([str(device.id)], device.kv_pages_used)
            total.add_metric([str(device.id)], device.kv_pages_total)
        yield used
        yield total
        degree = GaugeMetricFamily(
            "dtp_tp_degree", "Widest tensor-parallel degree that serves now", labels=["pool"]
        )
        serving = [d.tp for d in now.domains if d.state == "serving"] if now else []
        degree.add_metric([self._pool], max(serving, default=0))
        yield degree

    def _collect_steps(self) -> Iterator[Metric]:
        now = self._snapshot
        steps = CounterMetricFamily(
            "dtp_steps", "Steps, by degree; a decode step computes no prompt token", labels=["tp", "phase"]
        )
        seconds = CounterMetricFamily(
            "dtp_step_seconds",
            "Where the time of steps went on rank 0; host is what passed between them while there was work",
            labels=["tp", "phase", "part"],
        )
        for total in now.steps if now else ():
            labels = [str(total.tp), total.phase]
            steps.add_metric(labels, total.steps)
            for part, value in step_parts(total).items():
                seconds.add_metric([*labels, part], value)
        yield steps
        yield seconds
        yield _gauge(
            "dtp_engine_step_seconds",
            "Engine time per step, median of the last 128",
            now.step_engine_us * 1e-6 if now else 0.0,
        )

    def _collect_requests(self) -> Iterator[Metric]:
        success = CounterMetricFamily(
            "dtp_request_success", "Requests finished, by reason", labels=["finish_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([reason], count)
        yield success
        tokens = CounterMetricFamily(
            "dtp_generation_tokens", "Output tokens, by the domain that computed them", labels=["domain"]
        )
        for placed, count in self._domain_tokens.items():
            tokens.add_metric([placed], count)
        yield tokens
        yield _histogram("dtp_request_tp_degree", "Degree a request was served at, at its end", self._degree)
        yield _histogram("dtp_time_to_first_token_seconds", "Arrival to first token", self._ttft)
        yield _histogram("dtp_inter_token_latency_seconds", "Time between tokens of a request", self._itl)
        yield _histogram("dtp_e2e_request_latency_seconds", "Arrival to last token", self._e2e)

    def _collect_admission(self) -> Iterator[Metric]:
        refused = CounterMetricFamily("dtp_requests_refused", "HTTP requests refused", labels=["reason"])
        admission = self._admission
        for reason in REASONS:
            refused.add_metric([reason], admission.refused[reason] if admission else 0)
        yield refused
        yield _gauge(
            "dtp_prompt_tokens_waiting",
            "Prompt tokens of requests without a first token",
            admission.backlog.tokens if admission else 0,
        )

    def _collect_switches(self) -> Iterator[Metric]:
        switches = CounterMetricFamily(
            "dtp_tp_switches", "Switches by outcome", labels=["from", "to", "reason", "outcome"]
        )
        for labels, count in self._switches.items():
            switches.add_metric(labels, count)
        yield switches
        phases = HistogramMetricFamily(
            "dtp_tp_switch_phase_seconds", "Time a phase of a switch took", labels=["phase"]
        )
        for phase, histogram in self._phases.items():
            buckets, total = histogram.cumulative()
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


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    buckets, total = histogram.cumulative()
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total)
