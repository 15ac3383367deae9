"""The devices of one node and how they are connected, as values. Pure.

Link classes are those of `nvidia-smi topo -m`, from fast to slow: NVLink (with a count), PIX (one PCIe
switch), PXB (several), PHB (the host bridge), NODE (host bridges of one NUMA node), SYS (between NUMA nodes,
over the processors' interconnect).
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from dynamictp.errors import ConfigError


class LinkKind(IntEnum):
    """Class of a path between two devices; a larger value is slower."""

    SELF = 0
    NVLINK = 1
    PIX = 2
    PXB = 3
    PHB = 4
    NODE = 5
    SYS = 6
    HOST = 7
    """No peer-to-peer: every byte goes through host memory (MIG instances)."""


class Link(msgspec.Struct, frozen=True):
    """A path: its class and, for NVLink, how many links."""

    kind: LinkKind
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> Link:
        """`X`, `NV12`, `PIX` … Raises `ConfigError` for anything else."""
        name = text.strip().upper()
        if name == "X":
            return SELF
        if name.startswith("NV") and name[2:].isdigit() and int(name[2:]) > 0:
            return cls(LinkKind.NVLINK, int(name[2:]))
        if name in ("PIX", "PXB", "PHB", "NODE", "SYS", "HOST"):
            return cls(LinkKind[name])
        raise ConfigError(f"{text!r} is no link class; known: NV# (as NV12), PIX, PXB, PHB, NODE, SYS")

    def __str__(self) -> str:
        if self.kind is LinkKind.SELF:
            return "X"
        return f"NV{self.count}" if self.kind is LinkKind.NVLINK else self.kind.name


SELF = Link(LinkKind.SELF)


class Device(msgspec.Struct, frozen=True):
    """One device as the node names it."""

    label: str
    numa: int | None = None
    cpus: str = ""
    """Affinity as listed, such as 0-31,64-95."""
    product: str = ""
    mig: str = ""
    """MIG profile when it is an instance, such as 3g.40gb."""


class Topology(msgspec.Struct, frozen=True):
    """One node. `links[i][j]` connects devices i and j; `nic_links[i][k]` device i and NIC k."""

    devices: tuple[Device, ...]
    links: tuple[tuple[Link, ...], ...]
    nics: tuple[str, ...] = ()
    nic_links: tuple[tuple[Link, ...], ...] = ()
    source: str = ""

    @property
    def size(self) -> int:
        return len(self.devices)

    def link(self, a: int, b: int) -> Link:
        return self.links[a][b]

    def numa_nodes(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """NUMA nodes that the group touches, where they are known."""
        return tuple(sorted({node for d in group if (node := self.devices[d].numa) is not None}))

    def nearest_nics(self, device: int) -> tuple[str, ...]:
        """NICs on the closest path of that device."""
        if not self.nic_links:
            return ()
        best = min(link.kind for link in self.nic_links[device])
        return tuple(
            nic for nic, link in zip(self.nics, self.nic_links[device], strict=True) if link.kind == best
        )


def uniform(devices: int, link: Link, *, numa: tuple[int, ...] = (), source: str = "") -> Topology:
    """A node where every pair has the same link."""
    return Topology(
        devices=tuple(Device(f"GPU{i}", numa[i] if numa else None) for i in range(devices)),
        links=tuple(tuple(SELF if i == j else link for j in range(devices)) for i in range(devices)),
        source=source,
    )
