"""The deployment matrix of the documentation: models x machines x load classes, made from the cost model.

Every cell is the whole machine cut into TP groups of 1, 2, 4 or 8; the winner carries the most requests
inside the targets. Where it is not what the rules of thumb say, a note gives the number that outweighs them.
"""

from __future__ import annotations

import msgspec

from dynamictp.advisor.catalogue import named_model
from dynamictp.advisor.devices import find_device
from dynamictp.advisor.explain import seconds
from dynamictp.advisor.machine import Machine, build_machine, default_nodes
from dynamictp.advisor.placement import failure_impact, place_replicas
from dynamictp.advisor.search import Evaluation, Question, shapes
from dynamictp.advisor.side_by_side import even_degrees
from dynamictp.advisor.workloads import FOUR_CLASSES, find_workload
from dynamictp.cost.batching import Targets

MODELS = {
    "7B/8B": "llama-3.1-8b",
    "14B": "qwen2.5-14b",
    "32B": "qwen2.5-32b",
    "70B": "llama-3.1-70b",
    "235B, MoE": "qwen3-235b-a22b",
    "405B": "llama-3.1-405b",
}
MACHINES = {
    "NVLink node": ("h100-80g", 1),
    "PCIe node": ("l40s", 1),
    "Two NVLink nodes": ("h100-80g", 2),
}
TARGETS = Targets()
_LATENCY_BOUND = 0.7
"""Below this part of its capacity, a cut is limited by the targets and not by KV or arithmetic."""
_CLOSE = 0.05
"""Capacities within this fraction are called equal; the rule of thumb then decides."""


class Option(msgspec.Struct, frozen=True):
    """One way to cut the machine."""

    tp: int
    pp: int
    replicas: int
    slo_capacity: float
    """Requests per second inside the targets; 0 when no load meets them."""
    capacity: float
    unloaded_ttft_s: float
    """P99 of a request that meets nobody."""
    max_batch: int
    prefill_communication: float
    """Share of communication in the prefill of a mean prompt."""

    @property
    def name(self) -> str:
        return f"TP{self.tp}" + (f" PP{self.pp}" if self.pp > 1 else "") + f" x {self.replicas}"


class Cell(msgspec.Struct, frozen=True):
    """One model on one machine under one class; `options` best first, empty when nothing fits."""

    model: str
    machine: str
    workload: str
    options: tuple[Option, ...]

    @property
    def winner(self) -> Option | None:
        """The most capable; among equals the narrowest."""
        if not self.options:
            return None
        best = max(option.slo_capacity for option in self.options)
        if best <= 0:
            return min(self.options, key=lambda option: option.unloaded_ttft_s)
        close = [option for option in self.options if option.slo_capacity >= best * (1 - _CLOSE)]
        return min(close, key=lambda option: (option.pp, option.tp))

    @property
    def narrowest(self) -> Option | None:
        """What the rule of thumb says: TP1 when it fits, else the smallest TP that does."""
        return min(self.options, key=lambda option: (option.pp, option.tp), default=None)


def cells() -> tuple[Cell, ...]:
    """All cells, by machine, then model, then class."""
    return tuple(
        _cell(model, machine, workload)
        for machine in MACHINES
        for model in MODELS
        for workload in FOUR_CLASSES
    )


def machine_of(name: str) -> Machine:
    device_name, nodes = MACHINES[name]
    device = find_device(device_name)
    return build_machine(device, default_nodes(device, 8, nodes))


def _cell(model: str, machine: str, workload: str) -> Cell:
    shape, where = named_model(MODELS[model]), machine_of(machine)
    question = Question(
        shape=shape,
        machine=where,
        workload=find_workload(workload).capped(shape.max_context),
        targets=TARGETS,
        whole_machine=True,
        degrees=even_degrees(where.per_node),
        max_stages=1,
    )
    options = _options(question) or _options(msgspec.structs.replace(question, max_stages=4))
    ranked = sorted(options, key=lambda option: (-option.slo_capacity, option.unloaded_ttft_s))
    return Cell(model, machine, workload, tuple(ranked))


def _options(question: Question) -> list[Option]:
    options = []
    for tp, pp in shapes(question):
        evaluation = Evaluation(question, tp, pp)
        if evaluation.verdict is None:
            options.append(
                Option(
                    tp=tp,
                    pp=pp,
                    replicas=evaluation.most,
                    slo_capacity=evaluation.slo_capacity(),
                    capacity=evaluation.capacity(evaluation.most),
                    unloaded_ttft_s=evaluation.unloaded().ttft_p99,
                    max_batch=evaluation.max_batch,
                    prefill_communication=evaluation.prefill_communication(),
                )
            )
    return options


def deviation(cell: Cell) -> str:
    """Why the winner is not the narrowest that fits, with the rule; empty when it is, or nothing fits."""
    winner, narrow = cell.winner, cell.narrowest
    if winner is None or narrow is None or winner == narrow:
        return ""
    return f"{_outweighed_by(winner, narrow)} (rule {1 if narrow.tp == 1 else 2})"


def _outweighed_by(winner: Option, narrow: Option) -> str:
    """The number that speaks against the narrowest cut."""
    against = f"{narrow.name} carries {_rate(narrow.slo_capacity)} inside the targets"
    if narrow.slo_capacity <= 0 and narrow.unloaded_ttft_s > TARGETS.ttft_s:
        wait = (
            f"{narrow.name} needs {seconds(narrow.unloaded_ttft_s)} to the first token at P99 even unloaded"
        )
        return f"{wait}, {winner.name} {seconds(winner.unloaded_ttft_s)}"
    if narrow.slo_capacity <= 0:
        return f"{narrow.name} meets the targets at no load"
    if narrow.slo_capacity < _LATENCY_BOUND * narrow.capacity:
        return (
            f"{against} of {_rate(narrow.capacity)} it could, {winner.name} {_rate(winner.slo_capacity)}: "
            f"its first token takes {seconds(narrow.unloaded_ttft_s)} at P99 unloaded instead of "
            f"{seconds(winner.unloaded_ttft_s)}, which leaves less room for waiting"
        )
    return (
        f"{against}, {winner.name} {_rate(winner.slo_capacity)}: KV holds {narrow.max_batch} requests a "
        f"replica instead of {winner.max_batch}"
    )


def matrix_page(note: str = "", found: tuple[Cell, ...] | None = None) -> str:
    """The page as Markdown; `note` goes before the title. `found`: the cells, when they are known already."""
    found = cells() if found is None else found
    parts = [note + _INTRODUCTION]
    for machine in MACHINES:
        here = [cell for cell in found if cell.machine == machine]
        where = machine_of(machine)
        parts.append(f"## {machine}: {where}\n")
        parts.append("| model | " + " | ".join(f"{n}: {m}" for n, m in FOUR_CLASSES.items()) + " |")
        parts.append("|---" * (len(FOUR_CLASSES) + 1) + "|")
        for model, name in MODELS.items():
            row = [_text(cell) for cell in here if cell.model == model]
            parts.append(f"| {model} (`{name}`) | " + " | ".join(row) + " |")
        parts.append("")
        parts += _notes(here)
    return "\n".join(parts) + "\n"


def _notes(here: list[Cell]) -> list[str]:
    """What needs a word beside the table of one machine."""
    lines = [f"- {cell.model}, {cell.workload}: {why}." for cell in here if (why := deviation(cell))]
    for cell in here:
        winner = cell.winner
        if winner is None:
            continue
        name = f"- {cell.model}, {cell.workload}"
        if winner.slo_capacity <= 0:
            lines.append(
                f"{name}: no cut meets {seconds(TARGETS.ttft_s)} to the first token at P99; {winner.name} "
                f"comes closest, {seconds(winner.unloaded_ttft_s)} unloaded."
            )
        elif cell.model == "70B" and winner.tp < 4:
            lines.append(
                f"{name}: rule 4 says TP4 or TP8, but so short requests need little KV: two devices hold the "
                f"weights and {winner.max_batch} requests, and {winner.name} pays for less communication."
            )
        elif cell.machine == "PCIe node" and winner.tp > 2:
            lines.append(
                f"{name}: communication is {winner.prefill_communication:.0%} of a prefill at {winner.name} "
                "without NVLink (rule 3): benchmark it first."
            )
    lines += _rule_six(here) + _rule_seven(here)
    return ["Where a rule of thumb is outweighed, and by what:\n", *lines, ""]


def _rule_six(here: list[Cell]) -> list[str]:
    """Long prompts with short outputs favour TP, unless the first token is in time anyway."""
    listed = []
    for cell in here:
        winner = cell.winner
        if cell.workload != "rag" or winner is None or len(cell.options) < 2:
            continue
        if winner == cell.narrowest and winner.slo_capacity > 0:
            listed.append(f"{cell.model} {seconds(winner.unloaded_ttft_s)} at TP{winner.tp}")
    if not listed:
        return []
    return [
        f"- rag: rule 6 would widen TP, but the first token is inside {seconds(TARGETS.ttft_s)} at P99 "
        f"without it ({', '.join(listed)}, unloaded), so capacity decides. A tighter target decides for TP."
    ]


def _rule_seven(here: list[Cell]) -> list[str]:
    """What the loss of a node takes, where there are several, and single replicas anywhere."""
    machine = machine_of(here[0].machine)
    lost: dict[tuple[str, float], list[str]] = {}
    for cell in here:
        if cell.winner is None:
            continue
        impact = failure_impact(machine, place_replicas(machine, cell.winner.tp, cell.winner.pp))
        part = impact.device if machine.nodes.nodes == 1 else impact.node
        if part == 1 or machine.nodes.nodes > 1:
            named = lost.setdefault((cell.winner.name, part), [])
            named += [cell.model] if cell.model not in named else []
    what = "device" if machine.nodes.nodes == 1 else "node"
    found = [f"{name} {part:.0%} ({', '.join(models)})" for (name, part), models in lost.items()]
    return [f"- rule 7: what a lost {what} takes: {'; '.join(found)}."] if found else []


def _text(cell: Cell) -> str:
    winner = cell.winner
    if winner is None:
        return "does not fit"
    if winner.slo_capacity <= 0:
        return f"({winner.name}) misses the targets"
    others = [option for option in cell.options if option != winner][:1]
    second = "".join(f"; {option.name} {_rate(option.slo_capacity)}" for option in others)
    return f"**{winner.name}** {_rate(winner.slo_capacity)}{second}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


_INTRODUCTION = f"""# Deployment matrix

Which way to cut a whole machine, by model, machine and kind of load. Every number is a prediction of the cost
model (`dynamictp plan`) with data-sheet figures and the assumptions named in [advisor](advisor.md), for BF16
weights; none was measured on these machines.

A cell names the cut that carries the most requests per second inside the targets (P99 of the first token
{seconds(TARGETS.ttft_s)}, of a token {seconds(TARGETS.tpot_s)}), then the runner-up. Cuts within
{_CLOSE:.0%} of each other count as equal, and the narrower is named.

The rules of thumb it is held against:

1. Fits on one device: TP1, and replicas.
2. Otherwise the smallest TP that fits; a TP group stays inside one NVLink island.
3. Machines with PCIe alone stay small: communication costs more than it shortens.
4. 70B: TP4 or TP8 with NVLink; with PCIe TP4, and only after a benchmark.
5. Nodes are joined by replicas, not by TP; by stages only when one node does not hold the model.
6. Long prompts with short outputs favour TP, for the first token; short prompts with long outputs pay for
   communication at every token; short prompts with short outputs want replicas.
7. Replicas lie in different failure domains.
"""
