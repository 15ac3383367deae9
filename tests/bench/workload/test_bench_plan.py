from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamictp.bench.workload.classes import MIXES, Prefixes, Tenant, Turns, Workload, parse_mix
from dynamictp.bench.workload.plan import make_plan
from dynamictp.errors import ConfigError

LONG = Workload(arrivals="poisson:20", duration_s=200.0)


def test_the_seed_decides_everything() -> None:
    assert make_plan(LONG) == make_plan(LONG)
    assert make_plan(LONG).digest == make_plan(LONG).digest
    assert make_plan(LONG).digest != make_plan(replace(LONG, seed=1)).digest
    assert make_plan(LONG).digest != make_plan(replace(LONG, scale=0.5)).digest


def test_classes_come_by_weight_with_their_lengths() -> None:
    plan = make_plan(LONG)
    counts = Counter(request.traffic_class for request in plan.requests)
    assert counts["chat"] / len(plan.requests) == pytest.approx(0.8, abs=0.03)
    rag = [r for r in plan.requests if r.traffic_class == "rag"]
    assert np.mean([r.prompt_tokens for r in rag]) == pytest.approx(1500, rel=0.1)
    assert np.mean([r.output_tokens for r in rag]) == pytest.approx(40, rel=0.1)


def test_another_mix_leaves_the_times_alone() -> None:
    other = make_plan(replace(LONG, classes=MIXES["qa-code"]))
    assert [r.intended_s for r in other.requests] == [r.intended_s for r in make_plan(LONG).requests]


def test_giants_come_only_near_the_peak() -> None:
    workload = replace(LONG, arrivals="steps:0=5,100=20", classes=MIXES["peak-giants"])
    giants = [r for r in make_plan(workload).requests if r.traffic_class == "giant"]
    assert giants
    assert min(r.intended_s for r in giants) >= 100.0


def test_tenants_get_their_share_and_priority() -> None:
    tenants = (Tenant("gold", 1.0, 10), Tenant("free", 4.0))
    plan = make_plan(replace(LONG, tenants=tenants))
    counts = Counter((r.tenant, r.priority) for r in plan.requests)
    assert set(counts) == {("gold", 10), ("free", 0)}
    assert counts["gold", 10] / len(plan.requests) == pytest.approx(0.2, abs=0.03)


def test_turns_grow_by_what_was_said_and_keep_their_owner_and_prefix() -> None:
    workload = replace(
        LONG, turns=Turns(3, 0.5), prefixes=Prefixes(4, 50, 0.5), tenants=(Tenant("a", 1), Tenant("b", 1))
    )
    plan = make_plan(workload)
    by_name = {request.name: request for request in plan.requests}
    assert len(by_name) == len(plan.requests)
    later = [request for request in plan.requests if request.follows]
    openings = len(plan.requests) - len(later)
    assert len(plan.requests) / openings == pytest.approx(3, rel=0.1)
    for turn in later:
        before = by_name[turn.follows]
        assert turn.prompt_tokens > before.prompt_tokens + before.output_tokens
        assert (turn.tenant, turn.system, turn.think_s) == (before.tenant, before.system, 0.5)
    shared = [r for r in plan.requests if r.system is not None and not r.follows]
    assert len(shared) / openings == pytest.approx(0.5, abs=0.05)
    assert {r.system.key for r in shared if r.system} == {f"system-{i}" for i in range(4)}


def test_nothing_exceeds_the_longest() -> None:
    plan = make_plan(replace(LONG, turns=Turns(3), longest_tokens=600))
    assert plan.shortened > 0
    assert max(r.prompt_tokens + r.output_tokens for r in plan.requests) <= 600
    assert min(r.prompt_tokens for r in plan.requests) >= 1


def test_replay_keeps_times_and_lengths() -> None:
    plan = make_plan(replace(LONG, arrivals="replay:azure-conv,start=100,speed=10", duration_s=10.0))
    first = plan.requests[0]
    assert len(plan.requests) > 300
    assert all(0 <= r.intended_s < 10 for r in plan.requests)
    assert first.traffic_class in ("qa", "chat", "rag", "code")
    half = make_plan(replace(LONG, arrivals="replay:azure-conv,start=100,speed=10,keep=0.5", duration_s=10.0))
    assert len(half.requests) == pytest.approx(len(plan.requests) / 2, rel=0.15)
    scaled = make_plan(replace(LONG, arrivals="replay:azure-conv", scale=0.1))
    assert scaled.requests[0].prompt_tokens == 37  # 374 recorded


def test_hash_blocks_become_shared_text(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n')
    (request,) = make_plan(replace(LONG, arrivals=f"replay:{file}", scale=0.5)).requests
    assert [(block.key, block.tokens) for block in request.blocks] == [
        ("hash-7", 256), ("hash-8", 256), ("hash-9", 256)
    ]  # fmt: skip
    assert request.prompt_tokens == 550


def test_closed_loops_plan_requests_without_times() -> None:
    plan = make_plan(replace(LONG, arrivals="closed:users=3,think=2,requests=10"))
    assert (plan.users, plan.think_s, len(plan.requests)) == (3, 2.0, 10)


def test_mixes_in_text() -> None:
    assert parse_mix("chat-rag") == MIXES["chat-rag"]
    assert [(c.name, c.weight) for c in parse_mix("qa=3,code")] == [("qa", 3.0), ("code", 1.0)]
    (own,) = parse_mix("short(64:16/40)=2")
    assert (own.name, str(own.prompt), str(own.output), own.weight) == ("short", "64", "16/40", 2.0)


@pytest.mark.parametrize("text", ["no-such", "chat=x", "chat=0", "a(1)", "a(1:2", "(1:2)", "chat,giant=nan"])
def test_mixes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_mix(text)


def test_workloads_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="chat endpoint"):
        Workload(turns=Turns(2), endpoint="completions")
    with pytest.raises(ConfigError, match="peak"):
        Workload(classes=parse_mix("giant"))
    with pytest.raises(ConfigError, match="once"):
        Workload(classes=parse_mix("chat,chat"))
    with pytest.raises(ConfigError, match="no request"):
        make_plan(Workload(arrivals="poisson:0.001", duration_s=0.01))
    for bad in ("gold", "gold:x", "gold:0", ":1", "a:1:b"):
        with pytest.raises(ConfigError):
            Tenant.parse(bad)
    for bad in ("4", "0:5", "4:5:2", "a:b"):
        with pytest.raises(ConfigError):
            Prefixes.parse(bad)
    for bad in ("0.5", "x", "2:-1"):
        with pytest.raises(ConfigError):
            Turns.parse(bad)


@pytest.mark.parametrize("values", [{"duration_s": math.inf}, {"scale": math.inf}, {"scale": 1e300}])
def test_a_workload_without_bounds_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected more than 0"):
        Workload(classes=parse_mix("chat-rag"), **values)
