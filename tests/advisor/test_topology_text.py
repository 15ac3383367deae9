"""`nvidia-smi topo -m` in the forms it takes, and what is wrong with texts that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamictp.advisor.topology import Link, LinkKind, Topology
from dynamictp.advisor.topology_text import parse_topology
from dynamictp.errors import ConfigError

FOLDER = Path(__file__).parent / "topologies"


def read(name: str) -> Topology:
    return parse_topology((FOLDER / f"{name}.txt").read_text(encoding="utf-8"), name)


def test_dgx_1_with_nics() -> None:
    topology = read("dgx1")
    assert topology.size == 8
    assert topology.link(0, 3) == Link(LinkKind.NVLINK, 2)
    assert topology.link(0, 4) == Link(LinkKind.NVLINK, 2)
    assert topology.link(0, 5) == Link(LinkKind.SYS)
    assert topology.nics == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert topology.nearest_nics(6) == ("mlx5_3",)
    assert topology.devices[7].cpus == "20-39,60-79"
    assert topology.numa_nodes((0, 1)) == (0,)
    assert topology.numa_nodes((0, 7)) == (0, 1)


def test_dgx_a100_after_a_prompt_and_with_a_nic_legend() -> None:
    topology = read("dgx-a100")
    assert all(topology.link(i, j) == Link(LinkKind.NVLINK, 12) for i in range(8) for j in range(i))
    assert [device.numa for device in topology.devices] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert topology.nearest_nics(2) == ("NIC1",)


def test_colour_codes_and_the_product_list() -> None:
    topology = read("h100-colour")
    assert topology.size == 8
    assert topology.devices[3].product == "NVIDIA H100 80GB HBM3"
    assert topology.link(0, 7) == Link(LinkKind.NVLINK, 18)


def test_every_pcie_class() -> None:
    topology = read("pcie-classes")
    found = [[str(link) for link in row] for row in topology.links]
    assert found == [
        ["X", "PIX", "PXB", "PHB"],
        ["PIX", "X", "PHB", "NODE"],
        ["PXB", "PHB", "X", "SYS"],
        ["PHB", "NODE", "SYS", "X"],
    ]


def test_spaces_for_tabs_and_ranges_with_spaces() -> None:
    topology = read("dual-socket-spaces")
    assert topology.devices[5].cpus == "32-63,96-127"
    assert topology.devices[5].numa == 1
    assert topology.link(6, 7).kind is LinkKind.PIX


def test_columns_run_together_and_no_numa() -> None:
    topology = read("workstation-run-together")
    assert topology.link(0, 1).kind is LinkKind.PHB
    assert topology.devices[0].cpus == "0-23"
    assert topology.devices[0].numa is None


def test_paired_nvlink() -> None:
    topology = read("paired-nvlink")
    assert topology.link(2, 3) == Link(LinkKind.NVLINK, 4)
    assert topology.link(1, 2).kind is LinkKind.PHB


def test_mig_instances_replace_their_gpu_and_have_no_peer_to_peer() -> None:
    topology = read("mig")
    assert [device.label for device in topology.devices] == ["GPU0:0", "GPU0:1", "GPU1:0", "GPU1:1"]
    assert all(device.mig == "3g.40gb" for device in topology.devices)
    assert topology.link(0, 1).kind is LinkKind.HOST
    assert topology.link(0, 2).kind is LinkKind.HOST
    assert topology.devices[2].numa == 1


def test_numa_ranges_and_missing_affinity() -> None:
    topology = read("numa-ranges")
    assert [device.numa for device in topology.devices] == [0, None]
    assert [device.cpus for device in topology.devices] == ["0-127", ""]


def test_a_single_device() -> None:
    assert read("single").size == 1


GOOD = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-7\nGPU1\tNV4\t X \t0-7\n"


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        (GOOD.replace("NV4\t0-7", "NVX\t0-7", 1), 2, "row GPU0, column GPU1: found 'NVX'"),
        (GOOD.replace("NV4\t0-7", "0-7", 1), 2, "found '0-7'"),
        (GOOD.replace("GPU1\tNV4\t X ", "GPU1\tNV2\t X "), 3, "GPU1-GPU0 is NV2 here and NV4 in line 2"),
        (GOOD.replace("GPU1\tNV4\t X ", "GPU1\t X \tNV4"), 3, "no X in its own column"),
        (GOOD.replace("GPU1\tNV4", "GPU0\tNV4"), 3, "row GPU0 appears twice"),
        (GOOD.replace("GPU1\tNV4", "GPU7\tNV4"), 3, "row GPU7 has no column"),
        ("\n".join(GOOD.split("\n")[:2]), 1, "column GPU1 has no row"),
        (GOOD.replace("NV4\t X \t0-7", "NV4\t X \tSYS\t0-7"), 3, "more cells than the header"),
        (GOOD.replace(" X \t0-7", " X \tall"), 3, "CPU affinity 'all'"),
        (GOOD.replace("GPU1\tNV4", "garbage\tNV4"), 3, "'garbage"),
        (GOOD.replace("\tGPU0\tGPU1", "\tGPU0\tGPU0"), 1, "column GPU0 appears twice"),
        (GOOD.split("\n", 1)[1], 1, "before its header"),
        (GOOD.replace("CPU Affinity", "Speed"), 1, "goes on with 'Speed'"),
    ],
)
def test_malformed_texts_are_refused_at_their_line(text: str, line: int, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_topology(text, "topo.txt")
    assert f"topo.txt, line {line}: " in str(refused.value)
    assert named in str(refused.value)


@pytest.mark.parametrize("text", ["", "hello\nworld\n"])
def test_a_text_without_a_matrix(text: str) -> None:
    with pytest.raises(ConfigError, match="no header line"):
        parse_topology(text)
