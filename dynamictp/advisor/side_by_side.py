"""TP8 x 1, TP4 x 2, TP2 x 4 … of the whole machine against each other, for the four classes. Pure."""

from __future__ import annotations

import math

import msgspec

from dynamictp.advisor.search import Candidate, Question, make_plan
from dynamictp.advisor.workloads import FOUR_CLASSES, find_workload


class ClassRow(msgspec.Struct, frozen=True):
    """One class: the load all configurations are compared at, and the configurations, best first."""

    workload: str
    meaning: str
    rate: float
    candidates: tuple[Candidate, ...]

    @property
    def winner(self) -> Candidate | None:
        """The configuration with the highest capacity inside the targets; without any, the one that comes
        first by its first token; None when nothing runs."""
        return next((c for c in self.candidates if c.runs), None)

    @property
    def meets(self) -> bool:
        """Some configuration meets the targets at some load."""
        best = self.winner
        return best is not None and best.performance is not None and best.performance.slo_capacity > 0


def even_degrees(devices: int) -> tuple[int, ...]:
    """Powers of two up to `devices`: the degrees of the usual comparison."""
    return tuple(2**power for power in range(int(math.log2(devices)) + 1))


def side_by_side(question: Question, scale: float = 1.0) -> tuple[ClassRow, ...]:
    """The question's model and machine under each class, at half of the best capacity, without stages
    unless nothing runs without them.
    """
    rows = []
    for name, meaning in FOUR_CLASSES.items():
        asked = msgspec.structs.replace(
            question,
            workload=find_workload(name, scale),
            rate=None,
            objective="goodput",
            whole_machine=True,
            degrees=even_degrees(question.machine.per_node),
            max_stages=1,
        )
        plan = make_plan(asked)
        if plan.best is None:
            plan = make_plan(msgspec.structs.replace(asked, max_stages=question.max_stages))
        ranked = sorted(plan.candidates, key=_order)
        rows.append(ClassRow(name, meaning, plan.rate, tuple(ranked)))
    return tuple(rows)


def _order(candidate: Candidate) -> tuple[float, ...]:
    performance = candidate.performance
    if performance is None:
        return (2.0, 0.0, candidate.tp)
    if performance.slo_capacity > 0:
        return (0.0, -performance.slo_capacity, candidate.tp)
    return (1.0, performance.ttft_p99.low, candidate.tp)
