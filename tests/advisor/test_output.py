"""Explanations, tables, JSON, drawings, pictures: what a user gets to see."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType

from dynamictp.advisor.catalogue import named_model
from dynamictp.advisor.devices import find_device
from dynamictp.advisor.drawing import draw_topology
from dynamictp.advisor.explain import explain, headline
from dynamictp.advisor.machine import Machine, build_machine, default_nodes
from dynamictp.advisor.picture import draw_picture
from dynamictp.advisor.placement import place_replicas
from dynamictp.advisor.render import render_plan, render_sharing, render_side_by_side
from dynamictp.advisor.report import plan_json, side_by_side_json
from dynamictp.advisor.search import Plan, Question, make_plan
from dynamictp.advisor.sharing import share_node
from dynamictp.advisor.side_by_side import side_by_side
from dynamictp.advisor.topology_file import read_topology
from dynamictp.advisor.workloads import find_workload
from dynamictp.errors import ConfigError

TOPOLOGIES = Path(__file__).parent / "topologies"


def machine(name: str, device: str) -> Machine:
    return build_machine(find_device(device), read_topology(TOPOLOGIES / f"{name}.txt"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    nodes = machine("dual-socket-spaces", "l40s")
    return make_plan(Question(named_model("qwen2.5-32b"), nodes, find_workload("chat-rag"), rate=4.0))


def shown(part: RenderableType, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_headline_names_choice_load_and_targets(plan: Plan) -> None:
    assert plan.best is not None
    text = headline(plan)
    assert text.startswith(plan.best.name)
    assert "4 req/s" in text
    assert "2.00 s" in text


def test_every_reason_cites_a_number(plan: Plan) -> None:
    reasons = explain(plan)
    assert len(reasons) >= 4
    for reason in reasons:
        assert any(character.isdigit() for character in reason.text), reason
    rules = {reason.rule for reason in reasons}
    assert "PCIe machines stay small" in rules
    assert "TP inside one fast island" in rules


def test_what_does_not_fit_says_what_would_help() -> None:
    device = find_device("l40s")
    nodes = build_machine(device, default_nodes(device, 8))
    text = headline(make_plan(Question(named_model("llama-3.1-405b"), nodes, find_workload("qa"))))
    assert "does not fit" in text
    assert "quantised weights" in text


def test_a_request_that_no_degree_holds_says_that_it_is_the_kv() -> None:
    device = find_device("t4")
    nodes = build_machine(device, default_nodes(device, 2))
    plan = make_plan(Question(named_model("llama-3.1-8b"), nodes, find_workload("qa"), context=131_072))
    text = headline(plan)
    assert text.startswith("The weights of llama-3.1-8b fit on 2 x t4, but not the KV of one request")
    assert "one request needs 131,080" in text
    assert "does not fit" not in text


def test_an_impossible_load_is_said() -> None:
    device = find_device("l40s")
    nodes = build_machine(device, default_nodes(device, 8))
    asked = Question(named_model("qwen2.5-32b"), nodes, find_workload("code"), rate=500.0, max_stages=1)
    assert headline(make_plan(asked)).startswith("Nothing carries 500 req/s")


def test_the_terminal_output_fits_100_columns_and_shows_the_essentials(plan: Plan) -> None:
    text = shown(render_plan(plan, "qwen2.5-32b", rows=6))
    assert all(len(line.rstrip()) <= 100 for line in text.splitlines())
    assert "…" not in text, "no cell is cut"
    assert plan.best is not None
    for part in (
        plan.best.name,
        "32.76 B parameters",
        "island A",
        "bound < est. (band)",
        "assumed:",
        "data sheet:",
    ):
        assert part in text, part
    assert f"dynamictp serve qwen2.5-32b --devices {plan.best.devices}" in text
    assert f"tp{plan.best.tp}" in text


def test_the_side_by_side_table_fits_too(plan: Plan) -> None:
    rows = side_by_side(plan.question)
    text = shown(render_side_by_side(rows))
    assert all(len(line.rstrip()) <= 100 for line in text.splitlines())
    assert "…" not in text
    for name in ("TP8 x 1", "TP4 x 2", "TP2 x 4", "qa", "chat", "rag", "code"):
        assert name in text
    encoded = side_by_side_json(rows)
    assert [row["workload"] for row in encoded] == ["qa", "chat", "rag", "code"]


def test_sharing_names_the_layout(plan: Plan) -> None:
    other = msgspec.structs.replace(plan.question, shape=named_model("llama-3.1-8b"), rate=5.0)
    sharing = share_node([plan.question, other])
    assert sharing.best is not None
    assert sharing.best.layout in shown(render_sharing(sharing))


def test_json_is_complete_and_has_no_infinity(plan: Plan) -> None:
    text = json.dumps(plan_json(plan), allow_nan=False)
    data = json.loads(text)
    assert data["schema"] == 1
    assert data["model"]["parameters"]["total"] == 32_763_876_352
    assert data["machine"]["islands"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(data["candidates"]) == len(plan.candidates)
    first = data["candidates"][0]
    assert set(first["performance"]["ttft_p99_s"]) == {"bound", "low", "estimate", "high"}
    assert first["performance"]["communication_share"]["prefill"] > 0
    assert first["memory"]["kv_tokens"] > 0
    assert {figure["provenance"] for figure in data["figures"].values()} <= {
        "measured", "data sheet", "assumed", "derived"
    }  # fmt: skip
    assert all(figure["source"] for figure in data["figures"].values())


def test_json_of_what_fits_nowhere() -> None:
    device = find_device("t4")
    nodes = build_machine(device, default_nodes(device, 1))
    plan = make_plan(Question(named_model("llama-3.1-405b"), nodes, find_workload("qa")))
    data = plan_json(plan)
    assert data["best"] is None
    assert data["candidates"][0]["performance"] is None


def test_a_drawing_of_two_cliques() -> None:
    nodes = machine("dgx1", "v100-32g")
    assert draw_topology(nodes, place_replicas(nodes, 4, 1)).splitlines() == [
        "island A  NV2..NV1  0·a  1·a  2·a  3·a  NUMA 0  mlx5_0 mlx5_1",
        "island B  NV2..NV1  4·b  5·b  6·b  7·b  NUMA 1  mlx5_2 mlx5_3",
        "between islands: NV2..SYS",
    ]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(plan: Plan, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"node.{suffix}"
    draw_picture(plan.question.machine, plan.best, path)
    head = path.read_bytes()[:8]
    assert head == b"\x89PNG\r\n\x1a\n" if suffix == "png" else head.startswith(b"<?xml")


def test_a_picture_of_another_kind_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        draw_picture(plan.question.machine, plan.best, tmp_path / "node.gif")
