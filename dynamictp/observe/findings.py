"""What can be so with a server: verdicts, and the checks that find them in its figures. Pure.

Each check gives a finding or None. `dynamictp.observe.diagnose` puts them in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dynamictp.observe.figures import Figures


class Verdict(StrEnum):
    """What limits a server."""

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
    Verdict.STALLED: "requests wait and no step ends",
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
BESIDE_SHARE = 0.5
"""That and norms, sampling and Python within steps: an eighth for one stream of a real model (measured)."""
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
MODEL_SHARE = 0.5
"""Weights and attention, of all: below it they are not what the time goes to."""
COMPUTING_CORES = 0.5
"""The workers together: from here on one of them computes or spins; asleep they take some thousandths."""


class Lever(StrEnum):
    """What an advice turns, up or down."""

    DEGREE = "degree"
    DEVICES = "devices"
    BATCH = "requests at once"
    OTHERS = "other processes"


@dataclass(frozen=True)
class Advice:
    """Something to try. Two findings may want a lever turned opposite ways: the first one has it."""

    text: str
    lever: Lever | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is so: why it is believed, and what to try."""

    verdict: Verdict
    evidence: tuple[str, ...]
    advice: tuple[Advice, ...]


NEIGHBOURS = Advice(
    "stop the other processes, bind them elsewhere, or lower their priority (nice 19)", Lever.OTHERS
)
NATIVE = Advice("use the native kernels (--kernels native says why when it can't)")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def neighbours(figures: Figures) -> list[str]:
    """Who else works on our cores. It is a cause only where ranks or steps wait for something."""
    found: list[str] = []
    if (figures.foreign_cores or 0.0) >= FOREIGN_CORES:
        found.append(f"other processes used {figures.foreign_cores:.1f} of the devices' cores")
    if (figures.steal_cores or 0.0) >= FOREIGN_CORES / 2:
        found.append(f"the hypervisor took {figures.steal_cores:.1f} cores away")
    return found


def crowded(figures: Figures) -> bool:
    """Ranks share cores: then they wait for each other, whoever else is there."""
    return figures.ranks_per_core > 1 and figures.degree > 1


def stalled(figures: Figures) -> Finding:
    """Requests without a step."""
    evidence = [
        f"no step ended in {figures.interval_s:.0f} s, {figures.waiting:.0f} requests waiting, "
        f"{figures.running:.0f} running"
    ]
    advice = [
        Advice("look at /ready and at the server's log: an engine or a worker may be starting again"),
        Advice("look at `dynamictp layout show`: is there a serving domain, does a switch hang?"),
        Advice("a request that fits only a wider layout waits for one: `dynamictp layout set` it"),
    ]
    if (figures.worker_cores or 0.0) >= COMPUTING_CORES:
        evidence.append(
            f"the workers used {figures.worker_cores:.1f} cores: a step may take longer than that"
        )
        advice.insert(0, Advice("watch for longer: --seconds 60"))
    others = neighbours(figures)
    if others:
        advice.insert(0, NEIGHBOURS)
    return Finding(Verdict.STALLED, (*evidence, *others), tuple(advice))


def idle(figures: Figures) -> Finding:
    """Neither steps nor requests."""
    return Finding(
        Verdict.IDLE,
        (f"no step in {figures.interval_s:.0f} s, no request waiting",),
        (Advice("look again under load, or play one: `dynamictp bench URL`"),),
    )


def healthy(figures: Figures, bound: Finding) -> Finding:
    """Steps, and time left between requests. `bound` says what the steps are made of."""
    return Finding(
        Verdict.HEALTHY,
        (
            f"the devices had work {percent(figures.busy)} of the time, {figures.waiting:.1f} requests "
            "waiting on average, no preemption",
            f"the steps themselves are {bound.verdict.value.replace('_', ' ')}: {bound.evidence[0]}",
        ),
        (Advice("nothing; a layout on fewer devices may do as well: `dynamictp plan` says"),),
    )


def kv_full(figures: Figures) -> Finding | None:
    """Pages are what requests wait for, or lose."""
    held_back = (
        figures.kv_usage >= KV_FULL_USAGE
        and (figures.waiting >= 1 or figures.refused > 0)
        and figures.running < FULL_ROWS * (figures.rows_total or float("inf"))
    )
    repeated = figures.preemptions >= max(2.0, PREEMPTED_SHARE * figures.prefill_steps)
    if not held_back and not repeated and not (figures.preemptions and figures.kv_usage >= KV_FULL_USAGE):
        return None
    evidence = [f"KV pages held by requests: up to {percent(figures.kv_usage)}"]
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
            Advice("give the KV cache more memory: --kv-memory"),
            Advice(
                "run fewer requests at once: --max-num-seqs; or shorter ones: --max-model-len", Lever.BATCH
            ),
            Advice("one wide domain holds longer contexts than several narrow ones", Lever.DEGREE),
        ),
    )


def host(figures: Figures) -> Finding | None:
    """Time that neither the model nor its ranks took."""
    evidence: list[str] = []
    advice: list[Advice] = []
    if disturbed(figures):
        evidence += neighbours(figures)
        advice.append(NEIGHBOURS)
    for name, cores in (("server", figures.server_cores), ("engine", figures.engine_cores)):
        if (cores or 0.0) >= BREATHLESS_CORES:
            evidence.append(f"the {name} process used {cores:.2f} of one core, all that its thread can")
            advice.append(
                Advice("fewer, longer requests; fewer log-probabilities; a core that is no device's")
            )
    if figures.share("host") >= HOST_SHARE:
        evidence.append(
            f"{percent(figures.share('host'))} of the time passed between steps while there was work"
        )
        advice.append(
            Advice("leave a core to server and engine: one device fewer than there are cores", Lever.DEVICES)
        )
    beside = figures.share("host") + figures.share("other")
    if figures.divided and beside >= BESIDE_SHARE:
        evidence.append(
            f"{percent(beside)} of the time is neither weights, attention nor waits: sampling, Python, "
            "messages"
        )
        advice += [
            NATIVE,
            Advice("fewer log-probabilities and penalties: they are computed beside the model"),
        ]
    return Finding(Verdict.HOST, tuple(evidence), tuple(dict.fromkeys(advice))) if evidence else None


def disturbed(figures: Figures) -> bool:
    """Someone else's work is what ranks or steps wait for."""
    waits = figures.share("wait") >= WAIT_SHARE or figures.share("host") >= HOST_SHARE / 2
    return waits and not crowded(figures) and bool(neighbours(figures))


def breathless(figures: Figures) -> bool:
    """A process around the model can do no more."""
    return max(figures.server_cores or 0.0, figures.engine_cores or 0.0) >= BREATHLESS_CORES


def communication(figures: Figures) -> Finding | None:
    """Ranks wait for ranks."""
    if figures.share("wait") < WAIT_SHARE:
        return None
    evidence = [
        f"{percent(figures.share('wait'))} of the time is waits for other ranks, at degree "
        f"{figures.degree:.1f} on average"
    ]
    advice = [
        Advice(
            "a narrower degree: `dynamictp layout set`, with more domains for the same devices", Lever.DEGREE
        ),
        Advice(
            "look for other processes on the devices' cores: one slow rank is everyone's wait", Lever.OTHERS
        ),
    ]
    if crowded(figures):
        evidence.append(
            f"{figures.ranks_per_core:.0f} ranks share a core: while one computes, the others wait"
        )
        evidence += neighbours(figures)
        advice.insert(0, Advice("one device per core or less: --devices", Lever.DEVICES))
    return Finding(Verdict.COMMUNICATION, tuple(evidence), tuple(advice))


def queueing(figures: Figures) -> Finding | None:
    """More comes than runs."""
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
        evidence.append(f"{percent(queue)} of a TTFT of {figures.ttft_s:.2f} s is waiting for room")
    return Finding(
        Verdict.QUEUEING,
        tuple(evidence),
        (
            Advice("a layout with more devices, or --mode dynamic", Lever.DEVICES),
            Advice(
                "a larger batch while the time per token allows it: --max-num-seqs"
                if full
                else "clients that send less at once: there are free slots, prompts are what waits",
                Lever.BATCH,
            ),
            Advice("refuse earlier, so that accepted requests keep their target (docs/overload.md)"),
        ),
    )


def bound(figures: Figures) -> Finding:
    """What a step's own time is made of."""
    split = (
        f"{percent(figures.share('weights'))} of the time is products with the weights, "
        f"{percent(figures.share('attention'))} attention"
        if figures.divided
        else "the torch kernels do not say what a step is made of; the native ones are several times faster"
    )
    rows = f"{figures.rows_per_step:.1f} tokens per step"
    others = tuple(neighbours(figures))
    native = () if figures.divided else (NATIVE,)
    if figures.prefill_share >= PREFILL_SHARE:
        return Finding(
            Verdict.COMPUTE,
            (f"{percent(figures.prefill_share)} of the time is steps that compute prompts", split, *others),
            (
                *native,
                Advice("a wider degree: prompts get faster by it, one by one", Lever.DEGREE),
                Advice("shared beginnings first: the prefix cache saves whole pages"),
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
            (
                *native,
                Advice("a wider degree, or more devices; batching more gains no more", Lever.DEGREE),
            ),
        )
    if figures.share("attention") > figures.share("weights"):
        return Finding(
            Verdict.MEMORY,
            (f"{split}: long contexts are read again for each token", *others),
            (
                Advice("a wider degree reads the KV cache with more cores", Lever.DEGREE),
                Advice("shorter contexts"),
            ),
        )
    return Finding(
        Verdict.MEMORY,
        (f"{rows}: the weights are read once per step, for few tokens", split, *others),
        (
            *native,
            Advice("more requests at once cost little more: clients may send more in parallel", Lever.BATCH),
            Advice("--weights int8 halves the bytes"),
            Advice("a wider degree, as far as the memory has bandwidth (`dynamictp plan`)", Lever.DEGREE),
        ),
    )
