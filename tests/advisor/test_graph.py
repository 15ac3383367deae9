"""Islands, rings and placement on known machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamictp.advisor.devices import find_device
from dynamictp.advisor.graph import Graph
from dynamictp.advisor.machine import Machine, build_machine, default_nodes
from dynamictp.advisor.placement import crossings, failure_impact, place_replicas
from dynamictp.advisor.topology import Link, LinkKind, uniform
from dynamictp.advisor.topology_file import NodeSet
from dynamictp.advisor.topology_text import parse_topology

FOLDER = Path(__file__).parent / "topologies"


def machine(name: str, device: str, nodes: int = 1) -> Machine:
    topology = parse_topology((FOLDER / f"{name}.txt").read_text(encoding="utf-8"), name)
    return build_machine(find_device(device), NodeSet(topology, nodes))


def test_a_dgx_1_is_two_cliques_not_one() -> None:
    graph = machine("dgx1", "v100-32g").graph
    assert graph.islands() == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_usual_node_of_v100_is_a_dgx_1(devices: int) -> None:
    device = find_device("v100-32g")
    assumed = default_nodes(device, devices).topology
    known = machine("dgx1", "v100-32g").nodes.topology
    for a in range(devices):
        assert [assumed.link(a, b) for b in range(devices)] == [known.link(a, b) for b in range(devices)]
    assert default_nodes(device, 16).topology.link(0, 15) == Link(LinkKind.NVLINK, 6), "a DGX-2 has switches"


@pytest.mark.parametrize("name", ["h100-pcie", "a100-80g-pcie", "l40s"])
def test_cards_in_slots_are_joined_by_pcie_until_a_topology_says_otherwise(name: str) -> None:
    device = find_device(name)
    eight = default_nodes(device, 8).topology
    assert eight.link(0, 1).kind is LinkKind.PIX
    assert eight.link(0, 7).kind is LinkKind.SYS
    assert default_nodes(device, 2).topology.link(0, 1).kind is LinkKind.PHB


def test_rings_of_a_dgx_1() -> None:
    graph = machine("dgx1", "v100-32g").graph
    quad = graph.ring(range(4))
    assert quad.link is not None
    assert quad.link.direct
    # Every device of a quad has four links inside it (1 + 1 + 2), 25 GB/s each way.
    assert quad.bandwidth == 100e9
    # Over all eight there is a ring of double links through both quads.
    whole = graph.ring(range(8))
    assert sorted(whole.order) == list(range(8))
    assert whole.link is not None
    assert whole.link.kind == "NV2"
    assert whole.bandwidth == 50e9
    pairs = zip(whole.order, (*whole.order[1:], whole.order[0]), strict=True)
    assert all(graph.topology.link(a, b).kind is LinkKind.NVLINK for a, b in pairs)
    # The pair with a double link beats the others.
    best = graph.choose(2, frozenset(range(8)))
    assert best is not None
    assert best.bandwidth == 50e9


def test_a_switched_node_is_one_island_of_full_bandwidth() -> None:
    graph = machine("dgx-a100", "a100-80g").graph
    assert graph.islands() == (tuple(range(8)),)
    for size in (2, 3, 8):
        ring = graph.choose(size, frozenset(range(8)))
        assert ring is not None
        assert ring.bandwidth == 300e9, "12 links, not 12 per peer"


def test_pcie_islands_are_the_switches() -> None:
    graph = machine("dual-socket-spaces", "l40s").graph
    assert graph.islands() == ((0, 1), (2, 3), (4, 5), (6, 7))
    four = graph.choose(4, frozenset(range(8)))
    assert four is not None
    assert four.link is not None
    assert four.link.kind == "NODE", "one socket"
    assert set(four.order) == {0, 1, 2, 3}
    assert graph.ring(range(8)).link is not None
    assert graph.ring(range(8)).bandwidth < four.bandwidth


def test_paired_nvlink_keeps_pairs_together() -> None:
    placed = place_replicas(machine("paired-nvlink", "a6000"), 2, 1)
    assert [replica.devices for replica in placed] == [(0, 1), (2, 3)]
    odd = machine("paired-nvlink", "a6000").graph.choose(3, frozenset(range(4)))
    assert odd is not None
    assert odd.link is not None
    assert odd.link.kind == "PHB"


def test_the_weakest_link_of_the_best_ring_counts() -> None:
    graph = machine("pcie-classes", "l40s").graph
    ring = graph.ring(range(4))
    assert ring.link is not None
    # Of the three rings over four devices two use the SYS path 2-3; 0-2-1-3 has NODE as its slowest.
    assert ring.link.kind == "NODE"
    assert ring.order in {(0, 2, 1, 3), (0, 3, 1, 2)}


def test_single_devices_fill_the_smallest_hole() -> None:
    graph = machine("dual-socket-spaces", "l40s").graph
    lone = graph.choose(1, frozenset({0, 1, 3}))
    assert lone is not None
    assert lone.order == (3,), "the pair 0,1 stays whole"


def test_odd_groups_are_placed_on_many_devices() -> None:
    link = Link(LinkKind.NVLINK, 18)
    graph = Graph(uniform(16, link), find_device("h100-80g"))
    ring = graph.choose(7, frozenset(range(16)))
    assert ring is not None
    assert ring.order == tuple(range(7))


def test_stages_leave_the_node_only_when_they_must() -> None:
    device = find_device("a100-80g")
    two = build_machine(device, default_nodes(device, 8, 2))
    inside = place_replicas(two, 4, 2)
    assert len(inside) == 2
    assert all(len({d // 8 for d in replica.devices}) == 1 for replica in inside)
    across = place_replicas(two, 8, 2)
    assert len(across) == 1
    assert across[0].stage_link is not None
    assert across[0].stage_link.kind == "network"
    assert across[0].stages[1] == tuple(range(8, 16))


def test_replicas_alternate_between_nodes() -> None:
    device = find_device("a100-80g")
    two = build_machine(device, default_nodes(device, 8, 2))
    first = place_replicas(two, 4, 1)[:2]
    assert [replica.devices[0] // 8 for replica in first] == [0, 1]
    assert failure_impact(two, first).node == 0.5


def test_failure_domains_of_two_sockets() -> None:
    here = machine("dual-socket-spaces", "l40s")
    impact = failure_impact(here, place_replicas(here, 2, 1))
    assert impact.device == 0.25
    assert impact.numa == 0.5
    assert failure_impact(here, place_replicas(here, 8, 1)).numa == 1.0


@pytest.mark.parametrize(("tp", "numa", "islands"), [(2, 1, 1), (4, 1, 2), (8, 2, 4)])
def test_crossings(tp: int, numa: int, islands: int) -> None:
    here = machine("dual-socket-spaces", "l40s")
    assert crossings(here, place_replicas(here, tp, 1)[0].stages[0]) == (numa, islands)
