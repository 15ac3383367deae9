"""Topology descriptions in YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamictp.advisor.devices import find_device
from dynamictp.advisor.graph import Graph
from dynamictp.advisor.topology import LinkKind
from dynamictp.advisor.topology_file import read_topology
from dynamictp.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "node.yaml"
    path.write_text(text)
    return path


def test_groups_override_the_default_link(tmp_path: Path) -> None:
    text = """
devices: 4
link: SYS
groups:
  - {devices: [0, 1], link: NV4}
  - {devices: [2, 3], link: PIX}
numa: [0, 0, 1, 1]
nodes: 2
network_gbps: 50
measured_gbps: {SYS: 8.5}
"""
    nodes = read_topology(write(tmp_path, text))
    assert str(nodes.topology.link(0, 1)) == "NV4"
    assert nodes.topology.link(3, 2).kind is LinkKind.PIX
    assert nodes.topology.link(0, 2).kind is LinkKind.SYS
    assert (nodes.nodes, nodes.network_gbps) == (2, 50)
    link = Graph(nodes.topology, find_device("a6000"), nodes.measured_gbps).ring(range(4)).link
    assert link is not None
    assert link.bandwidth.value == 8.5e9
    assert link.bandwidth.provenance == "measured"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("devices: x", "devices"),
        ("devices: 0", "from 1"),
        ("devices: 2\nlinks: PIX", "links"),
        ("devices: 2\nlink: FAST", "'FAST' is no link class"),
        ("devices: 2\ngroups: [{devices: [0, 5], link: PIX}]", "device 5"),
        ("devices: 2\nnuma: [0]", "numa"),
        ("devices: 2\nmeasured_gbps: {ETH: 5}", "ETH"),
        ("devices: 2\nmeasured_gbps: {SYS: 0}", "above 0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_topology(write(tmp_path, text))
    assert named in str(refused.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.txt"):
        read_topology(tmp_path / "none.txt")
