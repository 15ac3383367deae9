"""The figures that a diagnosis looks at, from looks at `/metrics` some seconds apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamictp.observe.samples import Samples

PARTS = ("weights", "attention", "wait", "other", "host")


@dataclass(frozen=True)
class Figures:
    """What a server did in an interval. Means are over the interval; times are seconds.

    `decode` and `prefill` hold seconds by part of a step on rank 0, as `dtp_step_seconds_total` does. Shares
    are 0 to 1, processor times are in cores. None: not known.
    """

    interval_s: float
    running: float = 0.0
    waiting: float = 0.0
    rows_total: float = 0.0
    kv_usage: float = 0.0
    """Of the fullest domain's pages, the largest seen."""
    preemptions: float = 0.0
    refused: float = 0.0
    """Requests sent away because they would have waited too long."""
    decode_steps: float = 0.0
    prefill_steps: float = 0.0
    decode: Mapping[str, float] = field(default_factory=dict)
    prefill: Mapping[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    """Output tokens."""
    degree: float = 0.0
    """Mean over steps."""
    ttft_s: float | None = None
    queue_s: float | None = None
    tpot_s: float | None = None
    busy_share: float | None = None
    """Of the devices that have a domain: time in steps."""
    server_cores: float | None = None
    engine_cores: float | None = None
    worker_cores: float | None = None
    """All workers together."""
    foreign_cores: float | None = None
    """Cores' worth of work that others did on the devices' cores."""
    steal_cores: float | None = None
    ranks_per_core: float = 0.0
    """Ranks of serving domains on the core that has most; 0 when not known."""

    def seconds(self, part: str) -> float:
        """Of decode and prefill steps together."""
        return self.decode.get(part, 0.0) + self.prefill.get(part, 0.0)

    @property
    def total_s(self) -> float:
        """Steps and what passed between them."""
        return sum(self.seconds(part) for part in PARTS)

    def share(self, part: str) -> float:
        """Part of the time of steps and between them."""
        return self.seconds(part) / self.total_s if self.total_s else 0.0

    @property
    def divided(self) -> bool:
        """The kernels say what a step is made of; torch's don't."""
        return self.seconds("weights") + self.seconds("attention") > 0

    @property
    def busy(self) -> float:
        """Part of the interval in which the devices had work."""
        if self.busy_share is not None:
            return self.busy_share
        return min(1.0, self.total_s / self.interval_s)

    @property
    def steps(self) -> float:
        return self.decode_steps + self.prefill_steps

    @property
    def rows_per_step(self) -> float:
        """Output tokens per step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def prefill_share(self) -> float:
        """Of the time of steps: those that computed prompt tokens."""
        return sum(self.prefill.values()) / self.total_s if self.total_s else 0.0


def figures_of(
    before: Mapping[str, float],
    after: Mapping[str, float],
    interval_s: float,
    between: Sequence[Mapping[str, float]] = (),
    model: str = "",
) -> Figures:
    """From looks at both ends of `interval_s` seconds; the queue is averaged over the looks `between`, if
    there are any. `model`: of a server with several, the one that the figures are of.
    """
    whole = Samples(after).since(Samples(before))
    first, last, *seen = (
        Samples(look).of_model(model) if model else Samples(look) for look in (before, after, *between)
    )
    seen = seen or [first, last]
    delta = last.since(first)
    steps = delta.by("dtp_steps_total", "tp")
    count = sum(steps.values())
    return Figures(
        interval_s=interval_s,
        running=_mean(seen, "dtp_num_requests_running"),
        waiting=_mean(seen, "dtp_num_requests_waiting"),
        rows_total=last.total("dtp_rows_total"),
        kv_usage=max(look.total("dtp_kv_cache_usage_ratio") for look in (first, *seen, last)),
        preemptions=delta.total("dtp_preemptions_total"),
        refused=delta.total("dtp_requests_refused_total"),
        decode_steps=delta.total("dtp_steps_total", phase="decode"),
        prefill_steps=delta.total("dtp_steps_total", phase="prefill"),
        decode=delta.by("dtp_step_seconds_total", "part", phase="decode"),
        prefill=delta.by("dtp_step_seconds_total", "part", phase="prefill"),
        tokens=delta.total("dtp_generation_tokens_total"),
        degree=sum(int(tp) * n for tp, n in steps.items()) / count if count else 0.0,
        ttft_s=_average(delta, "dtp_time_to_first_token_seconds"),
        queue_s=_average(delta, "dtp_request_queue_time_seconds"),
        tpot_s=_average(delta, "dtp_inter_token_latency_seconds"),
        busy_share=_busy(delta, interval_s),
        server_cores=_cores(delta, "server", interval_s),
        engine_cores=_cores(delta, "engine", interval_s),
        worker_cores=_cores(delta, "worker", interval_s),
        foreign_cores=_foreign(whole, interval_s),
        steal_cores=_steal(delta, interval_s),
        ranks_per_core=last.total("dtp_ranks_per_core"),
    )


def _mean(seen: Sequence[Samples], name: str) -> float:
    return sum(look.total(name) for look in seen) / len(seen)


def _average(delta: Samples, name: str) -> float | None:
    count = delta.total(f"{name}_count")
    return delta.total(f"{name}_sum") / count if count else None


def _busy(delta: Samples, interval_s: float) -> float | None:
    """Over the devices that worked at all: a free device is none of a layout's business."""
    if "dtp_device_busy_seconds_total" not in delta:
        return None
    busy = [value for value in delta.by("dtp_device_busy_seconds_total", "device").values() if value > 0]
    return min(1.0, sum(busy) / (len(busy) * interval_s)) if busy else 0.0


def _cores(delta: Samples, process: str, interval_s: float) -> float | None:
    if not delta.by("dtp_process_cpu_seconds_total", "process", process=process):
        return None
    return delta.total("dtp_process_cpu_seconds_total", process=process) / interval_s


def _foreign(delta: Samples, interval_s: float) -> float | None:
    """Work on the devices' cores beyond that of all of this server's processes.

    Server and engine run somewhere on the same cores, so theirs is taken off as well.
    """
    if "dtp_pool_cores_busy_seconds_total" not in delta:
        return None
    busy = delta.total("dtp_pool_cores_busy_seconds_total")
    return max(0.0, busy - delta.total("dtp_process_cpu_seconds_total")) / interval_s


def _steal(delta: Samples, interval_s: float) -> float | None:
    if "dtp_node_cpu_steal_seconds_total" not in delta:
        return None
    return delta.total("dtp_node_cpu_steal_seconds_total") / interval_s
