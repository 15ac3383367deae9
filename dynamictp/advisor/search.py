"""Every (TP, PP, replicas, placement) of a model on a machine, judged for a load. Pure.

Capacities come first, because the load may be given relative to them; then latencies at that load, verdicts,
and the ranking by objective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from dynamictp.advisor.machine import Machine
from dynamictp.advisor.placement import FailureImpact, PlacedReplica, failure_impact, place_replicas
from dynamictp.cost.batching import Latency, Replica, Targets
from dynamictp.cost.calibration import Calibration
from dynamictp.cost.figures import Corner, Prediction
from dynamictp.cost.hardware import Assumptions, EngineLimits, LinkFacts
from dynamictp.cost.lengths import Workload
from dynamictp.cost.memory import MemoryPlan, memory_plan, sequence_tokens
from dynamictp.cost.shape import ModelShape
from dynamictp.cost.shares import degrees, residency
from dynamictp.cost.steps import Domain, StepModel

Verdict = Literal["fits", "fits with queueing", "infeasible at this TP for one request", "infeasible"]
Objective = Literal["efficiency", "latency", "throughput", "goodput"]

TARGET_LOAD = 0.5
"""Part of the best capacity that is asked for when no rate is given: the planner's target (C3)."""
KV_WAIT_LIMIT = 0.01
"""More requests than this waiting for KV is queueing."""
_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)


class Question(msgspec.Struct, frozen=True):
    """What is asked. `rate` in requests per second, None for half of what the machine can carry."""

    shape: ModelShape
    machine: Machine
    workload: Workload
    rate: float | None = None
    context: int = 0
    """Longest prompt + output to hold, tokens; 0: P99 of the workload."""
    targets: Targets = Targets()
    limits: EngineLimits = EngineLimits()
    assumptions: Assumptions = Assumptions()
    calibration: Calibration | None = None
    objective: Objective = "efficiency"
    resident: tuple[int, ...] = ()
    """Degrees between which the domains of a node may change without moving a weight (D1): devices hold the
    hull of their ranges, and no other degree is a candidate. Empty: static TP.
    """
    whole_machine: bool = False
    """Only configurations that leave no device idle that could hold another replica."""
    max_stages: int = 16
    degrees: tuple[int, ...] = ()
    """Only these TP degrees; empty: all that the range rules allow, odd ones included."""


class Performance(msgspec.Struct, frozen=True):
    """Predictions at the load. Seconds, requests per second; `capacity`'s bound is a ceiling."""

    capacity: Prediction
    ttft_p50: Prediction
    ttft_p99: Prediction
    tpot: Prediction
    tpot_p99: Prediction
    e2e_p50: Prediction
    e2e_p99: Prediction
    goodput: Prediction
    """Requests per second that meet both targets at the load."""
    slo_capacity: float
    """Highest rate at which P99 of TTFT and of TPOT meet the targets (goodput in DistServe's sense)."""
    output_tokens_per_s: float
    batch: float
    """Requests decoding per replica at the load."""
    max_batch: int
    prefill_communication: float
    decode_communication: float
    """Share of communication in a mean prompt's prefill and in a decode step at that batch."""


class Candidate(msgspec.Struct, frozen=True):
    """One configuration. `performance` is None where it can't run."""

    tp: int
    pp: int
    replicas: int
    verdict: Verdict
    reason: str
    memory: MemoryPlan
    placement: tuple[PlacedReplica, ...] = ()
    failure: FailureImpact | None = None
    performance: Performance | None = None
    meets_targets: bool = False

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.replicas

    @property
    def name(self) -> str:
        """`TP4 x 2`, with stages `TP4 PP2 x 2`."""
        stages = f" PP{self.pp}" if self.pp > 1 else ""
        return f"TP{self.tp}{stages} x {self.replicas}"

    @property
    def runs(self) -> bool:
        return self.performance is not None

    @property
    def stable(self) -> bool:
        """The load is below capacity."""
        return self.performance is not None and math.isfinite(self.performance.ttft_p99.estimate)


class Plan(msgspec.Struct, frozen=True):
    """The answer: all candidates, best first."""

    question: Question
    rate: float
    rate_is_given: bool
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The recommendation, None when nothing fits."""
        return next((candidate for candidate in self.candidates if candidate.runs), None)

    def find(self, tp: int, replicas: int, pp: int = 1) -> Candidate | None:
        return next((c for c in self.candidates if (c.tp, c.pp, c.replicas) == (tp, pp, replicas)), None)


def make_plan(question: Question) -> Plan:
    """Search and rank. Deterministic; takes a fraction of a second for one node."""
    workload = question.workload.capped(question.shape.max_context)
    question = msgspec.structs.replace(question, workload=workload)
    evaluations = [Evaluation(question, tp, pp) for tp, pp in shapes(question)]
    capacities = [
        evaluation.capacity(evaluation.most) for evaluation in evaluations if evaluation.verdict is None
    ]
    rate = question.rate if question.rate is not None else TARGET_LOAD * max(capacities, default=0.0)
    candidates = [candidate for evaluation in evaluations for candidate in evaluation.candidates(rate)]
    candidates = _settle_verdicts(candidates)
    ranked = sorted(candidates, key=lambda candidate: _rank(candidate, question.objective))
    return Plan(question, rate, question.rate is not None, tuple(ranked))


def shapes(question: Question) -> list[tuple[int, int]]:
    """(tp, pp) within the machine; stages hold at least one layer, and TP stays inside a node."""
    machine, shape = question.machine, question.shape
    widest = 1 if machine.is_mig else machine.per_node
    legal = degrees(shape, widest, shared_memory=machine.device.shared_memory)
    single = machine.is_mig or machine.device.shared_memory
    stages = [pp for pp in _STAGES if pp <= min(shape.layers, 1 if single else question.max_stages)]
    asked = question.resident or question.degrees
    wanted = [tp for tp in legal if not asked or tp in asked]
    return [(tp, pp) for tp in wanted for pp in stages if tp * pp <= machine.devices]


def resident_surplus(question: Question, tp: int) -> float:
    """Part of the cut weights that the fullest device holds beyond 1 / tp, for the other resident degrees."""
    if not question.resident or question.machine.device.shared_memory:
        return 0.0
    return max(0.0, residency(question.resident, question.machine.per_node).largest - 1 / tp)


def _speed(link: LinkFacts) -> float:
    return link.bandwidth.value


class Evaluation:
    """One (tp, pp): memory, placement and step models shared by its numbers of replicas."""

    def __init__(self, question: Question, tp: int, pp: int) -> None:
        self._question = question
        self.tp, self.pp = tp, pp
        self._placement = place_replicas(question.machine, tp, pp)
        self._models: dict[tuple[Corner, int], Replica] = {}
        self.memory = memory_plan(
            question.shape,
            question.machine.device,
            tp,
            pp,
            limits=question.limits,
            surplus_fraction=resident_surplus(question, tp),
        )
        self.verdict, self.reason = self._memory_verdict()
        self.most = len(self._placement)

    def _memory_verdict(self) -> tuple[Verdict | None, str]:
        memory, question = self.memory, self._question
        if not self._placement:
            return "infeasible", f"no {self.tp * self.pp} devices in TP groups of {self.tp}"
        if not memory.weights_fit:
            return "infeasible", (
                f"weights and buffers take {memory.fixed / 1e9:.1f} GB of {memory.capacity / 1e9:.1f} GB"
            )
        longest = sequence_tokens(question.context or question.workload.longest, question.limits.page_tokens)
        if memory.kv_tokens < longest:
            return "infeasible at this TP for one request", (
                f"{memory.kv_tokens:,} tokens of KV fit, one request needs {longest:,.0f}"
            )
        return None, ""

    def model(self, corner: Corner, replicas: int) -> Replica:
        """One of `replicas` replicas, in that corner."""
        device = self._question.machine.device
        active = self.tp * self.pp * replicas if device.shared_bandwidth is not None else 1
        key = (corner, active)
        if key not in self._models:
            # One model stands for all replicas: the one on the slowest links.
            links = [placed.link for placed in self._placement if placed.link is not None]
            between = [placed.stage_link for placed in self._placement if placed.stage_link is not None]
            domain = Domain(
                shape=self._question.shape,
                device=device,
                tp=self.tp,
                pp=self.pp,
                link=min(links, key=_speed, default=None),
                stage_link=min(between, key=_speed, default=None),
                assumptions=self._question.assumptions,
                calibration=self._question.calibration,
                active_devices=active,
            )
            self._models[key] = Replica(
                StepModel(domain, corner),
                self._question.workload,
                self._question.limits,
                self.memory.kv_tokens,
            )
        return self._models[key]

    def capacity(self, replicas: int, corner: Corner = Corner.EXPECTED) -> float:
        return self.model(corner, replicas).capacity() * replicas

    def slo_capacity(self) -> float:
        """Requests per second inside the targets with all replicas, expected."""
        return self.model(Corner.EXPECTED, self.most).slo_capacity(self.most, self._question.targets)

    def unloaded(self) -> Latency:
        """Latencies of requests that meet nobody, expected."""
        model = self.model(Corner.EXPECTED, self.most)
        return model.latency(1e-6 * model.capacity(), self.most, self._question.targets)

    def prefill_communication(self) -> float:
        """Share of communication in the prefill of a mean prompt."""
        steps, question = self.model(Corner.EXPECTED, self.most).steps, self._question
        chunk = float(question.limits.max_batched_tokens)
        return steps.prompt(question.workload.mean_prompt, chunk).communication_share

    @property
    def max_batch(self) -> int:
        """Requests that a replica holds."""
        return self.model(Corner.EXPECTED, self.most).max_batch

    def candidates(self, rate: float) -> list[Candidate]:
        if self.verdict is not None or not self.most:
            verdict = self.verdict or "infeasible"
            return [Candidate(self.tp, self.pp, max(1, self.most), verdict, self.reason, self.memory)]
        counts = [self.most] if self._question.whole_machine else _replica_counts(self.most)
        return [self._candidate(replicas, rate) for replicas in counts]

    def _candidate(self, replicas: int, rate: float) -> Candidate:
        question = self._question
        performance, expected = self._performance(replicas, rate)
        used = self._placement[:replicas]
        queueing = expected.kv_wait > KV_WAIT_LIMIT
        reason = ""
        if not math.isfinite(expected.ttft_p99):
            reason = f"overloaded: {rate:.2f} req/s asked, {performance.capacity.estimate:.2f} carried"
        elif queueing:
            reason = f"{expected.kv_wait:.0%} of the requests wait for KV"
        meets = expected.ttft_p99 <= question.targets.ttft_s and expected.tpot_p99 <= question.targets.tpot_s
        return Candidate(
            tp=self.tp,
            pp=self.pp,
            replicas=replicas,
            verdict="fits with queueing" if queueing else "fits",
            reason=reason,
            memory=self.memory,
            placement=used,
            failure=failure_impact(question.machine, used),
            performance=performance,
            meets_targets=meets,
        )

    def _performance(self, replicas: int, rate: float) -> tuple[Performance, Latency]:
        models = {corner: self.model(corner, replicas) for corner in Corner}
        targets = self._question.targets
        found = {corner: model.latency(rate, replicas, targets) for corner, model in models.items()}
        expected = models[Corner.EXPECTED]
        state = expected.steady(rate / replicas)
        batch = state.batch if state.stable else float(expected.max_batch)
        workload, steps = self._question.workload, expected.steps
        chunk = float(self._question.limits.max_batched_tokens)
        performance = Performance(
            capacity=Prediction.rate(lambda corner: self.capacity(replicas, corner)),
            ttft_p50=Prediction.of(lambda corner: found[corner].ttft_p50),
            ttft_p99=Prediction.of(lambda corner: found[corner].ttft_p99),
            tpot=Prediction.of(lambda corner: found[corner].tpot_mean),
            tpot_p99=Prediction.of(lambda corner: found[corner].tpot_p99),
            e2e_p50=Prediction.of(lambda corner: found[corner].e2e_p50),
            e2e_p99=Prediction.of(lambda corner: found[corner].e2e_p99),
            goodput=Prediction.rate(lambda corner: found[corner].goodput_fraction * rate),
            slo_capacity=expected.slo_capacity(replicas, targets),
            output_tokens_per_s=workload.mean_output * min(rate, self.capacity(replicas)),
            batch=batch,
            max_batch=expected.max_batch,
            prefill_communication=steps.prompt(workload.mean_prompt, chunk).communication_share,
            decode_communication=steps.decode(batch, workload.running_context).communication_share,
        )
        return performance, found[Corner.EXPECTED]


def _replica_counts(most: int) -> list[int]:
    """All counts up to 8; beyond, steps of about a fifth keep the table readable."""
    counts = list(range(1, min(most, 8) + 1))
    while counts[-1] < most:
        counts.append(min(most, counts[-1] + max(1, counts[-1] // 5)))
    return counts


def _settle_verdicts(candidates: Sequence[Candidate]) -> list[Candidate]:
    """`infeasible at this TP for one request` promises that another TP holds it; else plain infeasible."""
    if any(candidate.runs for candidate in candidates):
        return list(candidates)
    return [msgspec.structs.replace(candidate, verdict="infeasible") for candidate in candidates]


def _rank(candidate: Candidate, objective: Objective) -> tuple[float, ...]:
    """Smaller is better. Unrunnable last, overloaded before them; ties to fewer devices, then narrower TP.

    For `efficiency`, first what meets the targets and is not overloaded even in the slow corner of its band.
    Stages come after what does without them: they delay every first token, and the server refuses them today.
    """
    performance = candidate.performance
    tie = (candidate.devices, candidate.pp, candidate.tp)
    if performance is None:
        return (9.0, -candidate.memory.kv_bytes, *tie)
    by_objective = {
        "latency": performance.tpot.estimate,
        "throughput": -performance.capacity.estimate,
        "goodput": -performance.slo_capacity / candidate.devices,
    }
    if not candidate.stable:
        return (8.0, -performance.capacity.estimate, *tie)
    if objective != "efficiency":
        return (0.0, candidate.pp > 1, by_objective[objective], *tie)
    if candidate.meets_targets:
        tier = 0.0 if math.isfinite(performance.ttft_p99.high) else 1.0
        return (tier, candidate.pp > 1, candidate.devices, performance.e2e_p99.estimate, *tie)
    return (2.0, candidate.pp > 1, -performance.goodput.estimate, *tie)
