"""The search: verdicts, ranking, and the cases the advisor must get right."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from dynamictp.advisor.catalogue import named_model
from dynamictp.advisor.devices import find_device
from dynamictp.advisor.machine import Machine, build_machine, default_nodes, device_from_products
from dynamictp.advisor.search import Candidate, Plan, Question, make_plan
from dynamictp.advisor.sharing import share_node
from dynamictp.advisor.side_by_side import side_by_side
from dynamictp.advisor.switches import switch_options
from dynamictp.advisor.topology_file import read_topology
from dynamictp.advisor.workloads import find_workload
from dynamictp.cost.batching import Targets
from dynamictp.cost.hardware import EngineLimits

TOPOLOGIES = Path(__file__).parent / "topologies"


def node(device: str, devices: int = 8, nodes: int = 1) -> Machine:
    facts = find_device(device)
    return build_machine(facts, default_nodes(facts, devices, nodes))


def question(model: str, machine: Machine, workload: str = "chat", **changes: object) -> Question:
    asked = Question(named_model(model), machine, find_workload(workload), max_stages=1)
    return msgspec.structs.replace(asked, **changes)


def found(plan: Plan, tp: int, replicas: int) -> Candidate:
    candidate = plan.find(tp, replicas)
    assert candidate is not None
    return candidate


CHAT_AND_RAG = "chat(1000/3000:300/1000)=0.5,rag(4500/9500:300/1000)=0.5"
"""P95 of all prompts about 8,000 tokens, of outputs 1,000."""


@pytest.mark.parametrize("rate", [None, 0.3, 0.6, 1.0])
def test_eight_pcie_cards_of_48_gb_with_a_32b(rate: float | None) -> None:
    machine = build_machine(find_device("l40s"), read_topology(TOPOLOGIES / "dual-socket-spaces.txt"))
    asked = question(
        "qwen2.5-32b", machine, CHAT_AND_RAG, context=16384, whole_machine=True, degrees=(2, 4, 8), rate=rate
    )
    plan = make_plan(asked)
    order = [found(plan, tp, 8 // tp).performance for tp in (2, 4, 8)]
    assert all(performance is not None for performance in order)
    waits = [performance.ttft_p99.estimate for performance in order if performance is not None]
    assert waits == sorted(waits), "TP2 x 4 before TP4 x 2 before TP8 x 1"
    shares = [performance.prefill_communication for performance in order if performance is not None]
    assert shares == sorted(shares)
    assert shares[0] < 0.35
    assert shares[2] > 0.7


def test_the_p95_prompt_of_that_case_is_8k() -> None:
    nodes = sorted((node.tokens, node.weight) for node in find_workload(CHAT_AND_RAG).prompts)
    above = 0.0
    for tokens, weight in reversed(nodes):
        above += weight
        if above >= 0.05:
            assert 7000 < tokens < 9000
            break


def test_what_fits_on_one_device_becomes_replicas() -> None:
    plan = make_plan(question("llama-3.1-8b", node("h100-80g"), objective="goodput", whole_machine=True))
    assert plan.best is not None
    assert plan.best.name == "TP1 x 8"


def test_verdicts() -> None:
    plan = make_plan(question("llama-3.1-70b", node("a100-80g"), context=131_072))
    narrow = found(plan, 2, 4)
    assert narrow.verdict == "infeasible at this TP for one request"
    assert "one request needs 131,080" in narrow.reason
    assert found(plan, 4, 2).runs
    tight = make_plan(question("llama-3.1-70b", node("a100-80g")))
    assert found(tight, 1, 8).verdict == "infeasible"
    hopeless = make_plan(question("llama-3.1-405b", node("l40s")))
    assert hopeless.best is None
    assert {candidate.verdict for candidate in hopeless.candidates} == {"infeasible"}


def test_a_request_too_long_for_every_degree_is_plainly_infeasible() -> None:
    plan = make_plan(question("llama-3.1-8b", node("t4", 1), "qa", context=131_072))
    assert {candidate.verdict for candidate in plan.candidates} == {"infeasible"}


def test_more_load_than_the_kv_holds_is_queueing() -> None:
    quiet = make_plan(question("llama-3.1-70b", node("a100-80g"), "rag", rate=0.5))
    assert found(quiet, 2, 4).verdict == "fits"
    busy = make_plan(question("llama-3.1-70b", node("a100-80g"), "rag", rate=50.0))
    overloaded = found(busy, 2, 4)
    assert overloaded.verdict == "fits with queueing"
    assert not overloaded.stable
    assert "overloaded" in overloaded.reason
    assert overloaded.performance is not None
    assert math.isinf(overloaded.performance.ttft_p99.estimate)


def test_odd_degrees_are_candidates() -> None:
    plan = make_plan(question("llama-3.1-70b", node("a100-80g")))
    assert {candidate.tp for candidate in plan.candidates} == set(range(1, 9))
    assert found(plan, 3, 2).runs
    assert found(plan, 6, 1).runs


def test_bounds_and_bands_are_in_order() -> None:
    plan = make_plan(question("qwen2.5-14b", node("a100-80g", 4), "chat-rag"))
    for candidate in plan.candidates:
        if candidate.performance is None:
            continue
        for name in ("ttft_p50", "ttft_p99", "tpot", "tpot_p99", "e2e_p50", "e2e_p99"):
            value = getattr(candidate.performance, name)
            assert value.bound <= value.low <= value.estimate <= value.high, (candidate.name, name)
        capacity = candidate.performance.capacity
        assert capacity.low <= capacity.estimate <= capacity.high <= capacity.bound


def test_objectives() -> None:
    machine = node("a100-80g")
    asked = question("llama-3.1-8b", machine, rate=2.0)
    fewest = make_plan(asked).best
    assert fewest is not None
    assert fewest.devices == 1
    latency = make_plan(msgspec.structs.replace(asked, objective="latency"))
    assert latency.best is not None
    assert latency.best.performance is not None
    tpots = [
        c.performance.tpot.estimate for c in latency.candidates if c.performance is not None and c.stable
    ]
    assert latency.best.performance.tpot.estimate == min(tpots)
    assert latency.best.tp > 1
    throughput = make_plan(msgspec.structs.replace(asked, objective="throughput")).best
    assert throughput is not None
    assert throughput.name == "TP1 x 8"


def test_efficiency_prefers_what_is_not_overloaded_at_the_slow_end() -> None:
    plan = make_plan(question("llama-3.1-70b", node("a100-80g")))
    assert plan.best is not None
    assert plan.best.meets_targets
    assert plan.best.performance is not None
    assert math.isfinite(plan.best.performance.ttft_p99.high)


def test_nodes_are_joined_by_replicas() -> None:
    plan = make_plan(
        question("llama-3.1-70b", node("h100-80g", 8, 2), objective="goodput", whole_machine=True)
    )
    assert plan.best is not None
    for replica in plan.best.placement:
        assert len({device // 8 for device in replica.devices}) == 1


def test_a_model_larger_than_a_node_takes_stages() -> None:
    asked = question("llama-3.1-405b", node("h100-80g", 8, 2), max_stages=4)
    plan = make_plan(asked)
    assert plan.best is not None
    assert plan.best.pp == 2
    assert plan.best.placement[0].stage_link is not None
    assert plan.best.placement[0].stage_link.kind == "network"


def test_dynamic_mode_holds_less_kv() -> None:
    static = make_plan(question("llama-3.1-70b", node("a100-80g")))
    limits = EngineLimits(kv_cap=0.7, communicators=3)
    dynamic = make_plan(question("llama-3.1-70b", node("a100-80g"), limits=limits))
    assert found(dynamic, 4, 2).memory.kv_tokens < 0.7 * found(static, 4, 2).memory.kv_tokens


def test_resident_degrees_cost_memory_and_exclude_others() -> None:
    machine = node("a100-80g")
    static = make_plan(question("llama-3.1-70b", machine))
    resident = make_plan(question("llama-3.1-70b", machine, resident=(4, 6, 8)))
    assert {candidate.tp for candidate in resident.candidates} == {4, 6, 8}
    eight = found(resident, 8, 1)
    assert eight.memory.surplus == pytest.approx((1 / 3 - 1 / 8) * (70.55e9 - 128256 * 8192) * 2, rel=0.01)
    assert eight.memory.kv_tokens < found(static, 8, 1).memory.kv_tokens


def test_mig_instances_are_replicas_only() -> None:
    nodes = read_topology(TOPOLOGIES / "mig.txt")
    device = device_from_products(nodes)
    assert device is not None
    assert device.name == "a100-80g"
    machine = build_machine(device, nodes)
    plan = make_plan(Question(named_model("llama-3.1-8b"), machine, find_workload("chat")))
    assert {(candidate.tp, candidate.pp) for candidate in plan.candidates} == {(1, 1)}
    assert plan.best is not None
    assert max(candidate.replicas for candidate in plan.candidates) == 4


def test_a_plan_is_deterministic() -> None:
    asked = question("qwen2.5-14b", node("a100-80g", 4))
    assert make_plan(asked) == make_plan(asked)


def test_two_models_share_a_node_as_six_and_two() -> None:
    machine = node("a100-80g")
    big = question("llama-3.1-70b", machine, rate=13.0)
    small = question("qwen2.5-32b", machine, rate=9.0)
    sharing = share_node([big, small])
    assert sharing.best is not None
    sizes = [part.candidate.devices for part in sharing.best.parts]
    assert sizes == [6, 2]
    assert sharing.best.layout in {"llama-3.1-70b:tp6+qwen2.5-32b:tp2", "2*llama-3.1-70b:tp3+qwen2.5-32b:tp2"}
    used = [device for part in sharing.best.parts for group in part.placement for device in group]
    assert len(used) == len(set(used)) == 8
    assert sharing.powers_of_two is not None
    assert sharing.powers_of_two.headroom <= sharing.best.headroom


def test_switches_have_a_price_and_a_break_even() -> None:
    options = switch_options(make_plan(question("llama-3.1-70b", node("a100-80g"))))
    assert options
    for option in options:
        assert option.price.total_s > 0
        assert option.extra_weight_bytes >= 0
        assert option.break_even_s > 0


def test_the_four_classes_side_by_side() -> None:
    rows = side_by_side(question("llama-3.1-70b", node("h100-80g"), targets=Targets()))
    assert [row.workload for row in rows] == ["qa", "chat", "rag", "code"]
    for row in rows:
        assert {c.name for c in row.candidates} == {"TP1 x 8", "TP2 x 4", "TP4 x 2", "TP8 x 1"}
        assert row.winner is not None
        assert row.winner.tp in (2, 4, 8)
