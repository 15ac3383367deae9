"""A node and a placement as text. Pure."""

from __future__ import annotations

from dynamictp.advisor.machine import Machine
from dynamictp.advisor.placement import PlacedReplica
from dynamictp.advisor.topology import LinkKind

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def draw_topology(machine: Machine, replicas: tuple[PlacedReplica, ...] = ()) -> str:
    """Islands of the first node, the links between them, NICs, and which replica each device belongs to.

    ```
    island A  NV12     0·a  1·a  2·a  3·a   NUMA 0   NIC0
    island B  NV12     4·b  5·b  6·b  7·b   NUMA 1   NIC1
    A-B  SYS
    ```
    """
    topology, graph = machine.nodes.topology, machine.graph
    owner = {
        device: _replica_name(index) for index, replica in enumerate(replicas) for device in replica.devices
    }
    islands = graph.islands()
    rows = []
    for index, island in enumerate(islands):
        inside = _span(machine, island, island)
        devices = "  ".join(
            f"{device}·{owner[device]}" if device in owner else str(device) for device in island
        )
        numa = ", ".join(map(str, topology.numa_nodes(island)))
        nics = sorted({nic for device in island for nic in topology.nearest_nics(device)})
        rows.append(
            (f"island {_name(index)}", inside, devices, f"NUMA {numa}" if numa else "", " ".join(nics))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += _between(machine, islands)
    if machine.nodes.nodes > 1:
        lines.append(
            f"{machine.nodes.nodes} such nodes, {machine.nodes.network_gbps:g} GB/s network each way"
        )
    if any(replica.stage_link is not None for replica in replicas):
        lines.append("stages of a replica share its letter")
    return "\n".join(lines)


def _replica_name(index: int) -> str:
    return _LETTERS[index].lower() if index < len(_LETTERS) else f"r{index}"


def _name(index: int) -> str:
    return _LETTERS[index] if index < len(_LETTERS) else str(index)


def _span(machine: Machine, left: tuple[int, ...], right: tuple[int, ...]) -> str:
    """Links between two sets of devices: `NV12`, or `NV1-NV2`, or `NV2/SYS` from best to worst."""
    if machine.device.shared_memory:
        return "one memory"
    links = {machine.nodes.topology.link(a, b) for a in left for b in right if a != b}
    if not links:
        return "-"
    ordered = sorted(links, key=lambda link: (link.kind, -link.count))
    texts = [str(ordered[0])] + ([str(ordered[-1])] if len(ordered) > 1 else [])
    return "..".join(texts)


def _between(machine: Machine, islands: tuple[tuple[int, ...], ...]) -> list[str]:
    if len(islands) < 2 or machine.graph.fastest is LinkKind.SELF:
        return []
    by_span: dict[str, list[str]] = {}
    for i, left in enumerate(islands):
        for j in range(i + 1, len(islands)):
            by_span.setdefault(_span(machine, left, islands[j]), []).append(f"{_name(i)}-{_name(j)}")
    if len(by_span) == 1:
        return [f"between islands: {next(iter(by_span))}"]
    return [f"{span}: {' '.join(pairs)}" for span, pairs in by_span.items()]
