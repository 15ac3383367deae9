"""A plan as plain data, for JSON: complete, and with names that stay. Pure.

Infinite times (a load beyond capacity) are null.
"""

from __future__ import annotations

import math
from typing import Any

from dynamictp.advisor.explain import explain, headline
from dynamictp.advisor.machine import Machine
from dynamictp.advisor.search import Candidate, Performance, Plan
from dynamictp.advisor.sharing import Division, Sharing
from dynamictp.advisor.side_by_side import ClassRow
from dynamictp.advisor.switches import switch_options
from dynamictp.cost.figures import Figure, Prediction
from dynamictp.cost.shape import ModelShape

SCHEMA = 1


def plan_json(plan: Plan) -> dict[str, Any]:
    """Everything the tables show, and what they leave out."""
    question = plan.question
    best = plan.best
    return {
        "schema": SCHEMA,
        "model": model_json(question.shape),
        "machine": machine_json(question.machine),
        "workload": {
            "name": question.workload.name,
            "mean_prompt_tokens": question.workload.mean_prompt,
            "mean_output_tokens": question.workload.mean_output,
            "rate_per_s": plan.rate,
            "rate_is_given": plan.rate_is_given,
            "ttft_target_s": question.targets.ttft_s,
            "tpot_target_s": question.targets.tpot_s,
            "context_tokens": question.context or question.workload.longest,
        },
        "resident_degrees": list(question.resident),
        "objective": question.objective,
        "headline": headline(plan),
        "reasons": [{"rule": r.rule, "agrees": r.agrees, "text": r.text} for r in explain(plan)],
        "best": None if best is None else best.name,
        "candidates": [candidate_json(candidate) for candidate in plan.candidates],
        "switches": [
            {
                "from": option.source,
                "to": option.target,
                "prepare_s": option.price.prepare_s,
                "commit_s": option.price.commit_s,
                "drain_s": option.price.drain_s,
                "kv_bytes_moved": option.price.kv_bytes_moved,
                "extra_weight_bytes": option.extra_weight_bytes,
                "gain_devices": option.gain_devices,
                "break_even_s": _finite(option.break_even_s),
            }
            for option in switch_options(plan)
        ],
        "figures": figures_json(plan),
        "calibration": None if question.calibration is None else question.calibration.source,
    }


def model_json(shape: ModelShape) -> dict[str, Any]:
    """Parameters by part, bytes, FLOPs."""
    parts = shape.parts
    return {
        "name": shape.name,
        "attention": shape.attention,
        "parameters": {
            "total": parts.total,
            "active": shape.active_parameters,
            "embedding": parts.embedding,
            "attention": parts.attention,
            "mlp": parts.mlp,
            "experts": parts.experts,
            "norms": parts.norms,
            "head": parts.head,
        },
        "weights": shape.weights.name,
        "weight_bytes": shape.weight_bytes,
        "kv_bytes_per_token": shape.kv_bytes(1),
        "flops_per_token": shape.flops_per_token(0),
        "prefill_flops_1000_tokens": shape.prefill_flops(1000),
        "layers": shape.layers,
        "query_heads": shape.query_heads,
        "kv_heads": shape.kv_heads,
        "max_context": shape.max_context,
        "note": shape.note,
    }


def machine_json(machine: Machine) -> dict[str, Any]:
    """Devices, islands and links."""
    topology = machine.nodes.topology
    return {
        "device": machine.device.name,
        "memory_bytes": machine.device.memory_bytes,
        "devices": machine.devices,
        "nodes": machine.nodes.nodes,
        "topology": topology.source,
        "islands": [list(island) for island in machine.graph.islands()],
        "links": [[str(link) for link in row] for row in topology.links],
        "numa": [device.numa for device in topology.devices],
        "nics": list(topology.nics),
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """One configuration; `performance` is null where it can't run."""
    memory, performance, failure = candidate.memory, candidate.performance, candidate.failure
    return {
        "name": candidate.name,
        "tp": candidate.tp,
        "pp": candidate.pp,
        "replicas": candidate.replicas,
        "devices": candidate.devices,
        "verdict": candidate.verdict,
        "reason": candidate.reason,
        "meets_targets": candidate.meets_targets,
        "memory": {
            "capacity_bytes": memory.capacity,
            "weights_bytes": memory.weights,
            "residency_surplus_bytes": memory.surplus,
            "context_bytes": memory.context,
            "communicator_bytes": memory.communicators,
            "activation_bytes": memory.activations,
            "reserve_bytes": memory.reserve,
            "kv_bytes": memory.kv_bytes,
            "kv_tokens": memory.kv_tokens,
            "kv_bytes_per_token_and_rank": memory.kv_per_token,
        },
        "placement": [[list(stage) for stage in replica.stages] for replica in candidate.placement],
        "link": next((r.link.kind for r in candidate.placement if r.link is not None), None),
        "lost_with": None
        if failure is None
        else {"device": failure.device, "node": failure.node, "numa_node": failure.numa},
        "performance": None if performance is None else _performance_json(performance),
    }


def _performance_json(performance: Performance) -> dict[str, Any]:
    return {
        "capacity_per_s": _prediction(performance.capacity),
        "slo_capacity_per_s": performance.slo_capacity,
        "ttft_p50_s": _prediction(performance.ttft_p50),
        "ttft_p99_s": _prediction(performance.ttft_p99),
        "tpot_mean_s": _prediction(performance.tpot),
        "tpot_p99_s": _prediction(performance.tpot_p99),
        "e2e_p50_s": _prediction(performance.e2e_p50),
        "e2e_p99_s": _prediction(performance.e2e_p99),
        "goodput_per_s": _prediction(performance.goodput),
        "output_tokens_per_s": performance.output_tokens_per_s,
        "batch": performance.batch,
        "max_batch": performance.max_batch,
        "communication_share": {
            "prefill": performance.prefill_communication,
            "decode": performance.decode_communication,
        },
    }


def figures_json(plan: Plan) -> dict[str, Any]:
    """Every input number with its range and provenance."""
    machine, best = plan.question.machine, plan.best
    device = machine.device
    figures: dict[str, Figure] = {
        "memory_bandwidth": device.bandwidth,
        "peak_flops": device.flops(plan.question.shape.weights.compute),
        **plan.question.assumptions.figures(),
    }
    link = best.placement[0].link if best is not None and best.placement else None
    if link is not None:
        figures |= {"link_bandwidth": link.bandwidth, "link_latency_s": link.latency_s}
    return {
        name: {
            "value": figure.value,
            "better": figure.better,
            "worse": figure.worse,
            "provenance": figure.provenance,
            "source": figure.source,
        }
        for name, figure in figures.items()
    }


def side_by_side_json(rows: tuple[ClassRow, ...]) -> list[dict[str, Any]]:
    """The four classes."""
    return [
        {
            "workload": row.workload,
            "rate_per_s": row.rate,
            "meets_targets": row.meets,
            "candidates": [candidate_json(candidate) for candidate in row.candidates],
        }
        for row in rows
    ]


def sharing_json(sharing: Sharing) -> dict[str, Any]:
    """The division of a node among several models."""
    return {"best": _division(sharing.best), "powers_of_two": _division(sharing.powers_of_two)}


def _division(division: Division | None) -> dict[str, Any] | None:
    if division is None:
        return None
    return {
        "layout": division.layout,
        "headroom": division.headroom,
        "idle_devices": division.idle,
        "models": [
            {
                "model": part.model,
                "configuration": part.candidate.name,
                "placement": [list(group) for group in part.placement],
                "slo_capacity_per_s": part.slo_capacity,
                "demand_per_s": part.demand,
            }
            for part in division.parts
        ],
    }


def _prediction(prediction: Prediction) -> dict[str, float | None]:
    return {
        "bound": _finite(prediction.bound),
        "low": _finite(prediction.low),
        "estimate": _finite(prediction.estimate),
        "high": _finite(prediction.high),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
