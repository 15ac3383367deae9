"""The machine a plan is made for: nodes of one kind of device. Pure."""

from __future__ import annotations

from functools import cached_property

import msgspec

from dynamictp.advisor.devices import BRIDGED, CUBE_MESH, find_device, mig_slice
from dynamictp.advisor.graph import Graph
from dynamictp.advisor.topology import SELF, Device, Link, LinkKind, Topology, uniform
from dynamictp.advisor.topology_file import NodeSet
from dynamictp.cost.figures import Figure
from dynamictp.cost.hardware import GB, DeviceFacts, LinkFacts
from dynamictp.errors import ConfigError

_SWITCHED_LINKS = 6
"""NVLinks from which a device is sold in nodes that join all of them."""
_ONE_SOCKET = 4
_QUAD = ((0, 1, 1, 2), (1, 0, 2, 1), (1, 2, 0, 2), (2, 1, 2, 0))
"""NVLinks between the devices of one half of a cube mesh; each has the rest of its six to the same place
of the other half."""
_MESH_LINKS = 6


class Machine(msgspec.Struct, frozen=True, dict=True):
    """`nodes.nodes` nodes, each with the topology's devices. Device i of node k has number k·size + i."""

    device: DeviceFacts
    nodes: NodeSet

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.nodes.topology, self.device, self.nodes.measured_gbps)

    @property
    def per_node(self) -> int:
        return self.nodes.topology.size

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes.nodes

    @property
    def is_mig(self) -> bool:
        return any(device.mig for device in self.nodes.topology.devices)

    @property
    def network(self) -> LinkFacts:
        """Link between nodes, in one direction."""
        speed, latency = self.nodes.network_gbps * GB, self.nodes.network_latency_s
        return LinkFacts(
            "network",
            Figure(speed, "assumed", "network of a node as described", speed, speed * 0.6, speed),
            Figure(latency, "assumed", "latency of the network", latency / 2, latency * 2, 0.0),
        )

    def __str__(self) -> str:
        kind = f"{self.per_node} x {self.device.name}"
        return kind if self.nodes.nodes == 1 else f"{self.nodes.nodes} nodes of {kind}"


def default_nodes(device: DeviceFacts, devices: int, nodes: int = 1) -> NodeSet:
    """Without a topology, the usual node of that device, stated as an assumption in the plan: NVLink between
    all where the device has enough links (up to eight V100: the mesh of a DGX-1); up to four PCIe devices
    on one host bridge; more on two sockets, in pairs behind a PCIe switch each. NVLink bridges between cards
    are not assumed.
    """
    if devices < 1 or nodes < 1:
        raise ConfigError(f"--devices {devices} on {nodes} nodes: expected at least 1")
    if device.name in CUBE_MESH and devices <= 2 * len(_QUAD):
        return NodeSet(_cube_mesh(devices), nodes)
    if device.nvlinks >= _SWITCHED_LINKS and device.name not in BRIDGED:
        link = Link(LinkKind.NVLINK, device.nvlinks)
        return NodeSet(uniform(devices, link, source="assumed: NVLink between all"), nodes)
    if devices <= _ONE_SOCKET:
        source = "assumed: one host bridge"
        return NodeSet(uniform(devices, Link(LinkKind.PHB), source=source), nodes)
    return NodeSet(_two_sockets(devices), nodes)


def _cube_mesh(devices: int) -> Topology:
    quad = len(_QUAD)

    def link(a: int, b: int) -> Link:
        if a == b:
            return SELF
        if a // quad == b // quad:
            return Link(LinkKind.NVLINK, _QUAD[a % quad][b % quad])
        across = _MESH_LINKS - sum(_QUAD[a % quad])
        return Link(LinkKind.NVLINK, across) if a % quad == b % quad else Link(LinkKind.SYS)

    return Topology(
        devices=tuple(Device(f"GPU{i}", numa=i // quad) for i in range(devices)),
        links=tuple(tuple(link(a, b) for b in range(devices)) for a in range(devices)),
        source="assumed: the cube mesh of a DGX-1",
    )


def _two_sockets(devices: int) -> Topology:
    half = -(-devices // 2)

    def link(a: int, b: int) -> Link:
        if a == b:
            return SELF
        if a // half != b // half:
            return Link(LinkKind.SYS)
        return Link(LinkKind.PIX if a % half // 2 == b % half // 2 else LinkKind.NODE)

    return Topology(
        devices=tuple(Device(f"GPU{i}", numa=i // half) for i in range(devices)),
        links=tuple(tuple(link(a, b) for b in range(devices)) for a in range(devices)),
        source="assumed: two sockets, PCIe switches with two devices each",
    )


def build_machine(device: DeviceFacts, nodes: NodeSet) -> Machine:
    """A machine of that device on those nodes. MIG instances replace the device by their slice.

    Raises `ConfigError` for instances of different profiles: their plans do not add up.
    """
    profiles = {entry.mig for entry in nodes.topology.devices}
    if profiles == {""}:
        return Machine(device, nodes)
    if len(profiles) > 1:
        mixed = ", ".join(sorted(profile or "whole" for profile in profiles))
        raise ConfigError(
            f"{nodes.topology.source}: a mix of MIG profiles ({mixed}); plan for one kind at a time"
        )
    return Machine(mig_slice(device, profiles.pop()), nodes)


def device_from_products(nodes: NodeSet) -> DeviceFacts | None:
    """The device named by `nvidia-smi -L` lines before the matrix, when the table knows it."""
    product = nodes.topology.devices[0].product.lower()
    for needle, name in _PRODUCTS:
        if needle in product:
            return find_device(name)
    return None


_PRODUCTS = (
    ("a100-sxm4-80gb", "a100-80g"),
    ("a100-sxm4-40gb", "a100-40g"),
    ("a100 80gb pcie", "a100-80g-pcie"),
    ("h100 80gb hbm3", "h100-80g"),
    ("h100 pcie", "h100-pcie"),
    ("h200", "h200"),
    ("b200", "b200"),
    ("v100-sxm2-32gb", "v100-32g"),
    ("v100-sxm2-16gb", "v100-16g"),
    ("l40s", "l40s"),
    ("nvidia l4", "l4"),
    ("nvidia a40", "a40"),
    ("rtx a6000", "a6000"),
    ("rtx 6000 ada", "rtx6000-ada"),
    ("rtx 4090", "rtx4090"),
    ("rtx 3090", "rtx3090"),
    ("nvidia a10", "a10"),
    ("tesla t4", "t4"),
)
