"""Why: the rules of thumb of the field against the numbers of a plan, in plain words. Pure.

Every rule says whether the recommendation agrees with it and by which numbers, or what outweighed it.
"""

from __future__ import annotations

import math

import msgspec

from dynamictp.advisor.placement import crossings
from dynamictp.advisor.search import Candidate, Performance, Plan
from dynamictp.advisor.topology import LinkKind
from dynamictp.cost.memory import rank_weight_bytes
from dynamictp.cost.shares import share

LONG_PROMPT, LONG_OUTPUT = 512, 128
"""Mean lengths from which a workload counts as long, between the four classes of B1."""
_SMALL_DEGREE = 2


class Reason(msgspec.Struct, frozen=True):
    """One rule applied. `agrees` is None where the rule says nothing about this case."""

    rule: str
    agrees: bool
    text: str


def explain(plan: Plan) -> tuple[Reason, ...]:
    """The rules that apply, most decisive first. Empty when nothing fits; see `why_nothing_fits`."""
    best = plan.best
    if best is None or best.performance is None:
        return ()
    found = [
        _smallest_degree(plan, best, best.performance),
        _island(plan, best),
        _pcie(plan, best, best.performance),
        _lengths(plan, best, best.performance),
        _uneven(plan, best),
        _nodes(plan, best),
        _failure(plan, best),
    ]
    return tuple(reason for reason in found if reason is not None)


def headline(plan: Plan) -> str:
    """The recommendation in one sentence."""
    best, rate = plan.best, plan.rate
    if best is None or best.performance is None:
        return why_nothing_fits(plan)
    performance, targets = best.performance, plan.question.targets
    load = f"{rate:.3g} req/s" + (
        "" if plan.rate_is_given else " (half of the best capacity, none was given)"
    )
    what = f"{best.name} on {best.devices} of {plan.question.machine.devices} devices carries {load}"
    times = (
        f"P99 of first token {seconds(performance.ttft_p99.estimate)}, "
        f"of a token {seconds(performance.tpot_p99.estimate)}"
    )
    if not best.stable:
        return (
            f"Nothing carries {load}. {best.name} comes closest: {performance.capacity.estimate:.3g} req/s; "
            "lower the load or add devices."
        )
    if best.meets_targets:
        limits = f"{seconds(targets.ttft_s)} and {seconds(targets.tpot_s)}"
        return f"{what}: {times}, inside the targets of {limits}."
    return (
        f"{what}, but not inside the targets: {times} against {seconds(targets.ttft_s)} and "
        f"{seconds(targets.tpot_s)}; {performance.goodput.estimate / rate:.0%} of the requests meet both."
    )


def why_nothing_fits(plan: Plan) -> str:
    """What is missing, and what would help."""
    question = plan.question
    if not plan.candidates:
        return "No configuration is possible: the model allows no degree on this machine."
    closest = max(plan.candidates, key=lambda candidate: candidate.memory.kv_bytes)
    device = question.machine.device
    if closest.memory.weights_fit and closest.reason:
        roomiest = max(plan.candidates, key=lambda candidate: candidate.memory.kv_tokens)
        return (
            f"The weights of {question.shape.name} fit on {question.machine}, but not the KV of one request: "
            f"at {roomiest.name}, which holds most, {roomiest.reason}. A shorter --context, a narrower KV "
            "type (--kv-bits 8), or more devices would help."
        )
    need = closest.memory.fixed / 1e9
    return (
        f"{question.shape.name} does not fit on {question.machine}: even {closest.name} needs {need:.1f} GB "
        f"a device (weights {closest.memory.weights / 1e9:.1f}) of {device.memory_bytes / 1e9:.1f} GB. "
        "More devices, a larger device, or quantised weights would help."
    )


def seconds(value: float) -> str:
    """A time for people: `1.23 s`, `12.3 ms`, `∞`."""
    if not math.isfinite(value):
        return "∞"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def _smallest_degree(plan: Plan, best: Candidate, performance: Performance) -> Reason:
    shape = plan.question.shape
    running = [c for c in plan.candidates if c.runs and c.pp == 1]
    weights = f"{shape.weight_bytes / 1e9:.1f} GB of weights"
    if not running:
        return Reason(
            "smallest TP that fits",
            True,
            f"{weights} fit on no TP group of one node, so stages are joined: TP{best.tp} PP{best.pp}.",
        )
    smallest = min(c.tp for c in running)
    rule = "fits on one device: replicas" if smallest == 1 else "smallest TP that fits"
    fits = (
        f"{weights} fit on one device with {_best_of_degree(plan, 1).memory.kv_tokens:,} tokens of KV beside"
        if smallest == 1
        else f"{weights} first fit at TP{smallest}, {rank_weight_bytes(shape, smallest) / 1e9:.1f} GB each"
    )
    if best.tp == smallest:
        return Reason(rule, True, f"{fits}; wider only adds communication.")
    narrow = _best_of_degree(plan, smallest)
    return Reason(rule, False, f"{fits}, but {_worse(plan, narrow, best, performance)}.")


def _best_of_degree(plan: Plan, tp: int) -> Candidate:
    return next(c for c in plan.candidates if c.tp == tp and c.pp == 1 and c.runs)


def _worse(plan: Plan, narrow: Candidate, best: Candidate, performance: Performance) -> str:
    """What speaks against the narrower candidate, most decisive first."""
    other, targets = narrow.performance, plan.question.targets
    assert other is not None
    if not narrow.stable:
        return f"{narrow.name} carries only {other.capacity.estimate:.3g} of the {plan.rate:.3g} req/s"
    if other.ttft_p99.estimate > targets.ttft_s:
        return (
            f"{narrow.name} has P99 of first token {seconds(other.ttft_p99.estimate)} against a target of "
            f"{seconds(targets.ttft_s)}; {best.name} has {seconds(performance.ttft_p99.estimate)}"
        )
    if other.tpot_p99.estimate > targets.tpot_s:
        return (
            f"{narrow.name} takes {seconds(other.tpot_p99.estimate)} a token at P99 against a target of "
            f"{seconds(targets.tpot_s)}; {best.name} takes {seconds(performance.tpot_p99.estimate)}"
        )
    if not math.isfinite(other.ttft_p99.high):
        return f"{narrow.name} is overloaded when the machine is at the slow end of what is assumed"
    return _preferred(plan, narrow, best)


def _preferred(plan: Plan, narrow: Candidate, best: Candidate) -> str:
    """Why `best`, where `narrow` meets the targets as well."""
    here, there = best.performance, narrow.performance
    assert here is not None
    assert there is not None
    if narrow.devices > best.devices:
        return f"{narrow.name} takes {narrow.devices} devices for it and {best.name} only {best.devices}"
    if plan.question.objective == "efficiency":
        return (
            f"both take {best.devices} devices, and 99 of 100 requests finish within "
            f"{seconds(here.e2e_p99.estimate)} under {best.name}, within {seconds(there.e2e_p99.estimate)} "
            f"under {narrow.name}"
        )
    return (
        f"{best.name} takes {seconds(here.tpot.estimate)} a token and carries "
        f"{here.capacity.estimate:.3g} req/s, {narrow.name} {seconds(there.tpot.estimate)} and "
        f"{there.capacity.estimate:.3g}: objective {plan.question.objective}"
    )


def _island(plan: Plan, best: Candidate) -> Reason | None:
    if best.tp == 1:
        return None
    machine, group = plan.question.machine, best.placement[0].stages[0]
    if machine.device.shared_memory:
        return None
    numa, islands = crossings(machine, group)
    link = best.placement[0].link
    assert link is not None
    what = f"TP{best.tp} group {','.join(map(str, group))}: slowest ring link {link.kind}, "
    what += f"{link.bandwidth.value / 1e9:.0f} GB/s ({link.bandwidth.provenance})"
    if islands == 1:
        return Reason("TP inside one fast island", True, f"{what}; the group stays inside one island.")
    where = f"it spans {islands} islands" + (f" and {numa} NUMA nodes" if numa > 1 else "")
    sizes = ", ".join(str(len(island)) for island in machine.graph.islands())
    return Reason(
        "TP inside one fast island",
        False,
        f"{what}; {where}: islands of this node hold {sizes} devices, and no narrower choice does better.",
    )


def _pcie(plan: Plan, best: Candidate, performance: Performance) -> Reason | None:
    machine = plan.question.machine
    fastest = machine.graph.fastest
    if fastest in (LinkKind.NVLINK, LinkKind.SELF) or machine.device.shared_memory:
        return None
    shares = (
        f"communication is {performance.prefill_communication:.0%} of a prefill and "
        f"{performance.decode_communication:.0%} of a decode step at TP{best.tp}"
    )
    if best.tp <= _SMALL_DEGREE:
        return Reason("PCIe machines stay small", True, f"no NVLink: {shares}.")
    return Reason(
        "PCIe machines stay small",
        False,
        f"no NVLink, and yet TP{best.tp}, because of the memory or the targets: {shares}. Benchmark it "
        "before relying on it.",
    )


def _lengths(plan: Plan, best: Candidate, performance: Performance) -> Reason:
    workload = plan.question.workload
    prompt, output = workload.mean_prompt, workload.mean_output
    lengths = f"{prompt:,.0f} tokens in and {output:,.0f} out on average"
    shares = (
        f"{performance.prefill_communication:.0%} of prefill and "
        f"{performance.decode_communication:.0%} of decode"
    )
    if prompt >= LONG_PROMPT and output < LONG_OUTPUT:
        text = (
            f"{lengths}: the wait for the first token decides, which TP shortens; communication is {shares}."
        )
        return Reason("long prompt, short output favours TP", best.tp > 1 or best.replicas == 1, text)
    if prompt < LONG_PROMPT and output >= LONG_OUTPUT:
        text = f"{lengths}: communication is paid at every token, {shares}."
        return Reason("short prompt, long output pays at every token", True, text)
    if prompt < LONG_PROMPT:
        text = f"{lengths}: many small requests, for which replicas scale best; communication is {shares}."
        return Reason(
            "short prompt, short output wants replicas", best.replicas > 1 or best.devices == 1, text
        )
    return Reason("long prompt, long output", True, f"{lengths}: KV and communication both weigh; {shares}.")


def _uneven(plan: Plan, best: Candidate) -> Reason | None:
    part = share(plan.question.shape, best.tp, shared_memory=plan.question.machine.device.shared_memory)
    loss = part.heads * best.tp - 1
    if loss < 0.02:
        return None
    return Reason(
        "even heads",
        False,
        f"at TP{best.tp} the fullest rank has {part.kv_heads} of {plan.question.shape.kv_heads} KV heads, "
        f"{loss:.0%} more attention than an even share.",
    )


def _nodes(plan: Plan, best: Candidate) -> Reason | None:
    machine = plan.question.machine
    if machine.nodes.nodes == 1:
        return None
    crossing = best.pp > 1 and any(
        len({device // machine.per_node for device in replica.devices}) > 1 for replica in best.placement
    )
    if not crossing:
        return Reason("nodes are joined by replicas", True, "no replica crosses the network.")
    return Reason(
        "nodes are joined by replicas",
        False,
        f"one node does not hold the model: {best.pp} stages cross the network, activations only.",
    )


def _failure(plan: Plan, best: Candidate) -> Reason | None:
    impact, machine = best.failure, plan.question.machine
    if impact is None:
        return None
    text = f"a lost device takes {impact.device:.0%} of the replicas"
    if impact.numa is not None:
        text += f", a lost NUMA node {impact.numa:.0%}"
    if machine.nodes.nodes > 1:
        text += f", a lost node {impact.node:.0%}"
    spread = best.replicas > 1 and (machine.nodes.nodes == 1 or impact.node < 1)
    return Reason("replicas in different failure domains", spread, text + ".")
