"""Topologies from a file: `nvidia-smi topo -m` text, or a YAML description.

```yaml
devices: 8
link: PHB                       # between any two devices not named in a group
groups:                         # every pair inside a group has this link
  - {devices: [0, 1], link: NV4}
numa: [0, 0, 0, 0, 1, 1, 1, 1]  # optional, one entry a device
nodes: 2                        # optional: so many such nodes
network_gbps: 25                # GB/s of a node in one direction
network_latency_us: 10
measured_gbps: {PHB: 11.5}      # optional: bandwidth of a link class, measured, GB/s in one direction
```
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dynamictp.advisor.topology import SELF, Device, Link, LinkKind, Topology
from dynamictp.advisor.topology_text import parse_topology
from dynamictp.errors import ConfigError

_MAX_DEVICES = 64
_MAX_NODES = 1024


class LinkGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    devices: tuple[int, ...]
    link: str


class TopologyYaml(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description file."""

    devices: int
    link: str = "PHB"
    groups: tuple[LinkGroup, ...] = ()
    numa: tuple[int, ...] = ()
    nodes: int = 1
    network_gbps: float = 25.0
    network_latency_us: float = 10.0
    measured_gbps: dict[str, float] = {}


class NodeSet(msgspec.Struct, frozen=True):
    """One kind of node, how many of them, and the network between them."""

    topology: Topology
    nodes: int = 1
    network_gbps: float = 25.0
    network_latency_s: float = 10e-6
    measured_gbps: dict[str, float] = {}
    """GB/s by link class where the user measured it."""


def read_topology(path: Path) -> NodeSet:
    """Raises `ConfigError` naming the file and, for text, the line at fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--topology {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--topology {path}: is no text: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(text, str(path))
    return NodeSet(parse_topology(text, str(path)))


def _from_yaml(text: str, where: str) -> NodeSet:
    try:
        described = msgspec.yaml.decode(text.encode(), type=TopologyYaml)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    n = described.devices
    if not (1 <= n <= _MAX_DEVICES and 1 <= described.nodes <= _MAX_NODES):
        raise ConfigError(f"{where}: devices go from 1 to {_MAX_DEVICES} and nodes from 1 to {_MAX_NODES}")
    if described.numa and len(described.numa) != n:
        raise ConfigError(f"{where}: numa has {len(described.numa)} entries for {n} devices")
    if described.network_gbps <= 0 or any(value <= 0 for value in described.measured_gbps.values()):
        raise ConfigError(f"{where}: bandwidths must be above 0")
    for name in described.measured_gbps:
        if name not in LinkKind.__members__:
            raise ConfigError(
                f"{where}: measured_gbps names {name!r}; known: {', '.join(LinkKind.__members__)}"
            )
    default = Link.parse(described.link)
    links = [[SELF if i == j else default for j in range(n)] for i in range(n)]
    for group in described.groups:
        link = Link.parse(group.link)
        outside = [device for device in group.devices if not 0 <= device < n]
        if outside:
            raise ConfigError(f"{where}: group {list(group.devices)} names device {outside[0]} of {n}")
        for a in group.devices:
            for b in group.devices:
                if a != b:
                    links[a][b] = link
    numa = described.numa
    return NodeSet(
        topology=Topology(
            devices=tuple(Device(f"GPU{i}", numa[i] if numa else None) for i in range(n)),
            links=tuple(map(tuple, links)),
            source=where,
        ),
        nodes=described.nodes,
        network_gbps=described.network_gbps,
        network_latency_s=described.network_latency_us * 1e-6,
        measured_gbps=dict(described.measured_gbps),
    )
