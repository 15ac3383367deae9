"""What limits a server, from its figures: a verdict, the evidence, what to try. Pure.

Causes come before symptoms: a queue behind a server that waits for a neighbour's process is that neighbour's
doing. `docs/troubleshooting.md` has a row per verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from dynamictp.observe.figures import Figures


class Verdict(StrEnum):
    """In the order in which the first that holds is the verdict."""

    STALLED = "stalled"
    KV_FULL = "kv_full"
    HOST = "host_bound"
    COMMUNICATION = "communication_bound"
    QUEUEING = "queueing"
    COMPUTE = "compute_bound"
    MEMORY = "memory_bound"
    HEALTHY = "healthy"
    IDLE = "idle"


HEADLINES = {
    Verdict.STALLED: "requests wait and nothing is computed",
    Verdict.KV_FULL: "the KV memory is full",
    Verdict.HOST: "the time goes to what is around the model: host code, or other processes on its cores",
    Verdict.COMMUNICATION: "the ranks wait for each other",
    Verdict.QUEUEING: "more requests come than can run",
    Verdict.COMPUTE: "arithmetic is the limit",
    Verdict.MEMORY: "reading the weights and the KV cache is the limit",
    Verdict.HEALTHY: "nothing is wrong: the devices have room",
    Verdict.IDLE: "nothing to do",
}

HOST_SHARE = 0.25
"""Time between steps beside work, of all: a step ahead is planned, so it should be a few percent."""
OTHER_SHARE = 0.5
"""Norms, sampling and Python within steps; a tenth on the native kernels."""
BREATHLESS_CORES = 0.9
"""A process with one busy thread, at this much of a core, is at its end."""
FOREIGN_CORES = 0.5
"""Measured on two cores: one busy neighbour doubles a step of two ranks."""
WAIT_SHARE = 0.25
"""Waits with skew are up to 7 % of a step on undisturbed cores (measured)."""
KV_FULL_USAGE = 0.9
PREEMPTED_SHARE = 0.1
"""Of the steps that compute prompts: each preemption makes at least one more."""
FULL_ROWS = 0.9
QUEUE_SHARE = 0.5
"""Of TTFT."""
COMPUTE_ROWS = 16
"""Rows a step from which the time of a step follows the rows and no longer the bytes of the weights: bf16
packed panels take 7 ms at 1 row, 11 at 8, 19 at 16, 60 at 64 (measured)."""
PREFILL_SHARE = 0.6
ROOM = 0.5
"""Busy share below which a server without troubles is healthy."""


@dataclass(frozen=True)
class Finding:
    """One thing that is so: why it is believed, and what to try."""

    verdict: Verdict
    evidence: tuple[str, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The verdict is that of the first finding; the others hold beside it."""

    findings: tuple[Finding, ...]
    split: dict[str, float]
    """Share of each part of the time of steps and between them; empty when there was none."""

    @property
    def verdict(self) -> Verdict:
        return self.findings[0].verdict


def diagnose(figures: Figures) -> Diagnosis:
    """What limits the server, worst first."""
    split = {part: figures.share(part) for part in ("weights", "attention", "wait", "other", "host")}
    if not figures.steps:
        waits = figures.waiting or figures.running
        return Diagnosis((_stalled(figures) if waits else _idle(figures),), {})
    checks: tuple[Callable[[Figures], Finding | None], ...] = (_kv_full, _host, _communication, _queueing)
    troubles = [finding for check in checks if (finding := check(figures)) is not None]
    bound = _bound(figures)
    if troubles or _busy(figures) >= ROOM:
        return Diagnosis((*troubles, bound), split)
    return Diagnosis((_healthy(figures, bound),), split)


def _busy(figures: Figures) -> float:
    """Part of the interval in which the devices had work."""
    if figures.busy_share is not None:
        return figures.busy_share
    return min(1.0, figures.total_s / figures.interval_s)


def _stalled(figures: Figures) -> Finding:
    return Finding(
        Verdict.STALLED,
        (
            f"no step in {figures.interval_s:.0f} s, {figures.waiting:.0f} requests waiting, "
            f"{figures.running:.0f} running",
        ),
        (
            "look at /ready and at the server's log: an engine or a worker may be starting again",
            "look at `dynamictp layout show`: is there a serving domain, does a switch hang?",
            "a request that fits only a wider layout waits for one: `dynamictp layout set` it",
        ),
    )


def _idle(figures: Figures) -> Finding:
    return Finding(
        Verdict.IDLE,
        (f"no step in {figures.interval_s:.0f} s, no request waiting",),
        ("look again under load, or play one: `dynamictp bench URL`",),
    )


def _healthy(figures: Figures, bound: Finding) -> Finding:
    return Finding(
        Verdict.HEALTHY,
        (
            f"the devices had work {_percent(_busy(figures))} of the time, {figures.waiting:.1f} requests "
            "waiting on average, no preemption",
            f"the steps themselves are {bound.verdict.value.replace('_', ' ')}: {bound.evidence[0]}",
        ),
        ("nothing; a layout on fewer devices may do as well: `dynamictp plan` says",),
    )


def _kv_full(figures: Figures) -> Finding | None:
    held_back = (
        figures.kv_usage >= KV_FULL_USAGE
        and (figures.waiting >= 1 or figures.refused > 0)
        and figures.running < FULL_ROWS * (figures.rows_total or float("inf"))
    )
    repeated = figures.preemptions >= max(2.0, PREEMPTED_SHARE * figures.prefill_steps)
    if not held_back and not repeated and not (figures.preemptions and figures.kv_usage >= KV_FULL_USAGE):
        return None
    evidence = [f"KV pages held by requests: up to {_percent(figures.kv_usage)}"]
    if figures.preemptions:
        evidence.append(
            f"{figures.preemptions:.0f} preemptions in {figures.interval_s:.0f} s: what was computed for "
            "these requests is computed again"
        )
    if held_back:
        evidence.append(
            f"{figures.waiting:.1f} requests wait and {figures.refused:.0f} were refused beside free slots "
            f"({figures.running:.1f} of {figures.rows_total:.0f} used)"
        )
    return Finding(
        Verdict.KV_FULL,
        tuple(evidence),
        (
            "give the KV cache more memory: --kv-memory",
            "run fewer requests at once: --max-num-seqs; or shorter ones: --max-model-len",
            "one wide domain holds longer contexts than several narrow ones",
        ),
    )


def _host(figures: Figures) -> Finding | None:
    evidence: list[str] = []
    advice: list[str] = []
    if figures.share("wait") >= WAIT_SHARE or figures.share("host") >= HOST_SHARE / 2:
        evidence += _neighbours(figures)
        if evidence:
            advice.append("stop the other processes, bind them elsewhere, or lower their priority (nice 19)")
    for name, cores in (("server", figures.server_cores), ("engine", figures.engine_cores)):
        if (cores or 0.0) >= BREATHLESS_CORES:
            evidence.append(f"the {name} process used {cores:.2f} of one core, all that its thread can")
            advice.append("fewer, longer requests; fewer log-probabilities; a core that is no device's")
    if figures.share("host") >= HOST_SHARE:
        evidence.append(
            f"{_percent(figures.share('host'))} of the time passed between steps while there was work"
        )
        advice.append("leave a core to server and engine: one device fewer than there are cores")
    if figures.share("other") >= OTHER_SHARE:
        evidence.append(
            f"{_percent(figures.share('other'))} of the time is neither weights, attention nor waits: norms, "
            "sampling, Python"
        )
        advice.append("use the native kernels (--kernels native says why when it can't)")
    return Finding(Verdict.HOST, tuple(evidence), tuple(dict.fromkeys(advice))) if evidence else None


def _neighbours(figures: Figures) -> list[str]:
    """Who else works on our cores. It is a cause only where ranks or steps wait for something."""
    found: list[str] = []
    if (figures.foreign_cores or 0.0) >= FOREIGN_CORES:
        found.append(f"other processes used {figures.foreign_cores:.1f} of the devices' cores")
    if (figures.steal_cores or 0.0) >= FOREIGN_CORES / 2:
        found.append(f"the hypervisor took {figures.steal_cores:.1f} cores away")
    return found


def _communication(figures: Figures) -> Finding | None:
    if figures.share("wait") < WAIT_SHARE:
        return None
    return Finding(
        Verdict.COMMUNICATION,
        (
            f"{_percent(figures.share('wait'))} of the time is waits for other ranks, at degree "
            f"{figures.degree:.1f} on average",
        ),
        (
            "a narrower degree: `dynamictp layout set`, with more domains for the same devices",
            "one device per core or less: ranks that share a core wait for each other",
            "look for other processes on the devices' cores: one slow rank is everyone's wait",
        ),
    )


def _queueing(figures: Figures) -> Finding | None:
    if figures.waiting < 1 and not figures.refused:
        return None
    full = figures.rows_total > 0 and figures.running >= FULL_ROWS * figures.rows_total
    queue = figures.queue_s / figures.ttft_s if figures.queue_s and figures.ttft_s else 0.0
    evidence = [f"{figures.waiting:.1f} requests waiting on average"]
    if figures.refused:
        evidence.append(f"{figures.refused:.0f} requests refused: they would have waited too long")
    if full:
        evidence.append(f"all slots in use: {figures.running:.1f} of {figures.rows_total:.0f}")
    if queue >= QUEUE_SHARE and figures.ttft_s is not None:
        evidence.append(f"{_percent(queue)} of a TTFT of {figures.ttft_s:.2f} s is waiting for room")
    return Finding(
        Verdict.QUEUEING,
        tuple(evidence),
        (
            "a layout with more devices, or --mode dynamic",
            "a larger batch while the time per token allows it: --max-num-seqs",
            "refuse earlier, so that accepted requests keep their target (docs/overload.md)",
        ),
    )


def _bound(figures: Figures) -> Finding:
    """What a step's own time is made of."""
    split = (
        f"{_percent(figures.share('weights'))} of the time is products with the weights, "
        f"{_percent(figures.share('attention'))} attention"
    )
    rows = f"{figures.rows_per_step:.1f} tokens per step"
    others = tuple(_neighbours(figures))
    if figures.prefill_share >= PREFILL_SHARE:
        return Finding(
            Verdict.COMPUTE,
            (f"{_percent(figures.prefill_share)} of the time is steps that compute prompts", split, *others),
            (
                "a wider degree: prompts get faster by it, one by one",
                "shared beginnings first: the prefix cache saves whole pages",
            ),
        )
    if figures.rows_per_step >= COMPUTE_ROWS:
        return Finding(
            Verdict.COMPUTE,
            (
                f"{rows}: from about {COMPUTE_ROWS} on, a step takes the longer the more there are",
                split,
                *others,
            ),
            ("a wider degree, or more devices; batching more gains no more",),
        )
    if figures.share("attention") > figures.share("weights"):
        return Finding(
            Verdict.MEMORY,
            (f"{split}: long contexts are read again for each token", *others),
            ("a wider degree reads the KV cache with more cores", "shorter contexts"),
        )
    return Finding(
        Verdict.MEMORY,
        (f"{rows}: the weights are read once per step, for few tokens", split, *others),
        (
            "more requests at once cost little more: clients may send more in parallel",
            "--weights int8 halves the bytes",
            "a wider degree, as far as the memory has bandwidth (`dynamictp plan`)",
        ),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
