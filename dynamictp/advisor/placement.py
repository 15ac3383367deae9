"""Where replicas go: TP groups on fast rings, stages next to each other, replicas apart. Pure."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from dynamictp.advisor.machine import Machine
from dynamictp.cost.hardware import LinkFacts


class PlacedReplica(msgspec.Struct, frozen=True):
    """One replica: its TP group per stage, in ring order, as device numbers of the machine."""

    stages: tuple[tuple[int, ...], ...]
    link: LinkFacts | None
    """Weakest link inside a TP group; None at TP1."""
    stage_link: LinkFacts | None
    """Weakest link between stages; None without stages."""

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for stage in self.stages for device in stage)


class _Group(msgspec.Struct, frozen=True):
    node: int
    local: tuple[int, ...]
    link: LinkFacts | None


def place_replicas(machine: Machine, tp: int, pp: int) -> tuple[PlacedReplica, ...]:
    """As many replicas of tp × pp as the machine holds.

    A TP group never leaves its node; stages stay inside a node when they fit. Replicas of different nodes
    alternate, so that the first R of the tuple lie in as many failure domains as possible.
    """
    per_node = _groups_of_node(machine, tp)
    inside = tp * pp <= machine.per_node and len(per_node) >= pp
    if inside:
        kept = len(per_node) // pp * pp
        by_node = [[_on(node, group) for group in per_node[:kept]] for node in range(machine.nodes.nodes)]
        chains = [[groups[i : i + pp] for i in range(0, kept, pp)] for groups in by_node]
        ordered = [chain for position in zip(*chains, strict=True) for chain in position]
    else:
        groups = [_on(node, group) for node in range(machine.nodes.nodes) for group in per_node]
        ordered = [groups[i : i + pp] for i in range(0, len(groups) // pp * pp, pp)]
    return tuple(_replica(machine, chain) for chain in ordered)


def _groups_of_node(machine: Machine, tp: int) -> list[_Group]:
    free = frozenset(range(machine.per_node))
    groups = []
    while (ring := machine.graph.choose(tp, free)) is not None:
        groups.append(_Group(0, ring.order, ring.link))
        free -= set(ring.order)
    return groups


def _on(node: int, group: _Group) -> _Group:
    return msgspec.structs.replace(group, node=node)


def _replica(machine: Machine, chain: list[_Group]) -> PlacedReplica:
    links = [group.link for group in chain if group.link is not None]
    between = [
        machine.graph.between(left.local, right.local) if left.node == right.node else machine.network
        for left, right in pairwise(chain)
    ]
    size = machine.per_node
    return PlacedReplica(
        stages=tuple(tuple(group.node * size + device for device in group.local) for group in chain),
        link=min(links, key=lambda link: link.bandwidth.value, default=None),
        stage_link=min(between, key=lambda link: link.bandwidth.value, default=None),
    )


class FailureImpact(msgspec.Struct, frozen=True):
    """Part of the replicas lost when one device, or the node with the most of them, is lost."""

    device: float
    node: float
    numa: float | None = None
    """Of one NUMA node, where the topology tells them apart."""


def failure_impact(machine: Machine, replicas: tuple[PlacedReplica, ...]) -> FailureImpact:
    """What each failure domain takes with it."""
    total, size = len(replicas), machine.per_node
    nodes = [{device // size for device in replica.devices} for replica in replicas]
    by_node = max(sum(node in touched for touched in nodes) for node in range(machine.nodes.nodes))
    numa = None
    if machine.nodes.nodes == 1 and len(machine.nodes.topology.numa_nodes(tuple(range(size)))) > 1:
        touched_numa = [set(machine.nodes.topology.numa_nodes(replica.devices)) for replica in replicas]
        every = set().union(*touched_numa)
        numa = max(sum(node in touched for touched in touched_numa) for node in every) / total
    return FailureImpact(1 / total, by_node / total, numa)


def crossings(machine: Machine, group: tuple[int, ...]) -> tuple[int, int]:
    """(NUMA nodes, fast islands) that a TP group of one node touches."""
    local = tuple(device % machine.per_node for device in group)
    islands = sum(1 for island in machine.graph.islands() if set(local).intersection(island))
    return len(machine.nodes.topology.numa_nodes(local)) or 1, islands
