"""Islands, rings and placement on the link graph of one node. Pure.

A ring all-reduce is as fast as its slowest link, so a group is judged by the best ring it can form. Bandwidth
of a class: NVLink counts from the device's data sheet; PCIe paths as a part of the slot, assumed unless the
user measured them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import comb

import msgspec

from dynamictp.advisor.topology import LinkKind, Topology
from dynamictp.cost.figures import Figure, Provenance
from dynamictp.cost.hardware import GB, DeviceFacts, LinkFacts

_PATH = "assumed part of the PCIe slot's bandwidth on this path"
PATH_FRACTION: dict[LinkKind, tuple[float, float, float]] = {
    LinkKind.PIX: (1.0, 1.0, 0.8),
    LinkKind.PXB: (0.9, 1.0, 0.7),
    LinkKind.PHB: (0.65, 0.85, 0.4),
    LinkKind.NODE: (0.55, 0.75, 0.3),
    LinkKind.SYS: (0.4, 0.6, 0.2),
    LinkKind.HOST: (0.3, 0.5, 0.15),
}
"""(expected, better, worse) as parts of the slot."""
HOP_S: dict[LinkKind, tuple[float, float, float]] = {
    LinkKind.NVLINK: (1.5e-6, 0.8e-6, 3e-6),
    LinkKind.PIX: (3e-6, 2e-6, 6e-6),
    LinkKind.PXB: (4e-6, 2.5e-6, 8e-6),
    LinkKind.PHB: (6e-6, 3e-6, 12e-6),
    LinkKind.NODE: (7e-6, 4e-6, 14e-6),
    LinkKind.SYS: (9e-6, 5e-6, 20e-6),
    LinkKind.HOST: (15e-6, 8e-6, 30e-6),
}
SHARED_MEMORY_HOP = Figure(
    2e-6, "assumed", "write and barrier between cores that spin: 0.05-0.3 us and skew", 0.5e-6, 8e-6, 0.0
)
_EXHAUSTIVE = 4000


class Ring(msgspec.Struct, frozen=True):
    """The best ring of a group: devices in ring order, and the link that limits it."""

    order: tuple[int, ...]
    link: LinkFacts | None
    """None for a single device."""

    @property
    def bandwidth(self) -> float:
        return float("inf") if self.link is None else self.link.bandwidth.value


class Graph:
    """Link graph of one node with one kind of device. Immutable; answers are cached."""

    def __init__(
        self, topology: Topology, device: DeviceFacts, measured_gbps: Mapping[str, float] | None = None
    ) -> None:
        self.topology = topology
        self._device = device
        self._measured = dict(measured_gbps or {})
        self._rings: dict[frozenset[int], Ring] = {}
        self._islands: tuple[tuple[int, ...], ...] | None = None

    @property
    def fastest(self) -> LinkKind:
        """Fastest class between any two devices of the node."""
        kinds = [
            link.kind for i, row in enumerate(self.topology.links) for j, link in enumerate(row) if i != j
        ]
        return min(kinds, default=LinkKind.SELF)

    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Fast islands: disjoint groups of which every pair is joined by NVLink, or, on a node without it, by
        PCIe switches. Cliques, not components: a DGX-1's two quads are linked, yet they are two islands.
        """
        if self._islands is None:
            slowest = LinkKind.NVLINK if self.fastest <= LinkKind.NVLINK else LinkKind.PXB
            self._islands = self.groups(slowest)
        return self._islands

    def groups(self, slowest: LinkKind) -> tuple[tuple[int, ...], ...]:
        """Disjoint cliques of links no slower than `slowest`, the largest first, ties to more NVLinks, then
        lower numbers; ordered by their first device.
        """
        left = set(range(self.topology.size))
        found = []
        while left:
            clique = self._largest_clique(left, slowest)
            found.append(clique)
            left -= set(clique)
        return tuple(sorted(found))

    def _largest_clique(self, devices: set[int], slowest: LinkKind) -> tuple[int, ...]:
        near = {
            a: {b for b in devices if b != a and self.topology.link(a, b).kind <= slowest} for a in devices
        }
        best: tuple[int, ...] = ()
        best_count = -1

        def grow(clique: tuple[int, ...], candidates: set[int]) -> None:
            nonlocal best, best_count
            if len(clique) + len(candidates) < len(best):
                return
            if not candidates:
                count = sum(self.topology.link(a, b).count for a, b in combinations(clique, 2))
                if (len(clique), count) > (len(best), best_count):
                    best, best_count = clique, count
                return
            for device in sorted(candidates):
                grow((*clique, device), {c for c in candidates & near[device] if c > device})
            if len(clique) > len(best):
                best = clique

        if all(len(neighbours) == len(devices) - 1 for neighbours in near.values()):
            return tuple(sorted(devices))
        grow((), set(devices))
        return best

    def pair_gbps(self, a: int, b: int) -> float:
        """Expected bandwidth between two devices in one direction, GB/s."""
        link = self.topology.link(a, b)
        if link.kind.name in self._measured:
            return self._measured[link.kind.name]
        if link.kind is LinkKind.NVLINK:
            return link.count * (self._device.nvlink_gbps or 25.0)
        return PATH_FRACTION[link.kind][0] * self._device.pcie_gbps

    def ring(self, group: Iterable[int]) -> Ring:
        """The ring over `group` whose slowest link is fastest."""
        key = frozenset(group)
        if key not in self._rings:
            self._rings[key] = self._best_ring(tuple(sorted(key)))
        return self._rings[key]

    def _best_ring(self, group: tuple[int, ...]) -> Ring:
        if len(group) == 1:
            return Ring(group, None)
        speeds = sorted({self.pair_gbps(a, b) for a, b in combinations(group, 2)}, reverse=True)
        for speed in speeds:
            order = self._cycle(group, speed)
            if order is not None:
                return Ring(order, self._link(order))
        raise AssertionError("the slowest speed joins every pair")

    def _cycle(self, group: tuple[int, ...], speed: float) -> tuple[int, ...] | None:
        """A Hamiltonian cycle over links of at least `speed` (a path there and back for two devices)."""
        near = {a: {b for b in group if b != a and self.pair_gbps(a, b) >= speed} for a in group}
        if any(len(neighbours) < min(2, len(group) - 1) for neighbours in near.values()):
            return None
        path = [group[0]]

        def extend() -> bool:
            if len(path) == len(group):
                return path[0] in near[path[-1]]
            for device in sorted(near[path[-1]] - set(path)):
                path.append(device)
                if extend():
                    return True
                path.pop()
            return False

        return tuple(path) if extend() else None

    def _link(self, order: tuple[int, ...]) -> LinkFacts:
        if self._device.shared_memory:
            memory = self._device.shared_bandwidth or self._device.bandwidth
            return LinkFacts("shared memory", memory, SHARED_MEMORY_HOP)
        pairs = list(zip(order, (*order[1:], order[0]), strict=True))
        weakest = min(pairs, key=lambda pair: (self.pair_gbps(*pair), -self.topology.link(*pair).kind))
        link = self.topology.link(*weakest)
        slowest_hop = max(self.topology.link(*pair).kind for pair in pairs)
        expected, better, worse = HOP_S[slowest_hop]
        latency = Figure(expected, "assumed", f"one hop over {slowest_hop.name}", better, worse, 0.0)
        direct = all(self.topology.link(a, b).kind is LinkKind.NVLINK for a, b in combinations(order, 2))
        return LinkFacts(str(link), self._bandwidth(order, weakest, direct), latency, direct)

    def _bandwidth(self, order: tuple[int, ...], weakest: tuple[int, int], direct: bool) -> Figure:
        link = self.topology.link(*weakest)
        if link.kind.name in self._measured:
            return Figure(self._measured[link.kind.name] * GB, "measured", f"{link.kind.name} by the user")
        if link.kind is not LinkKind.NVLINK:
            slot = self._device.pcie_gbps * GB
            expected, better, worse = (part * slot for part in PATH_FRACTION[link.kind])
            return Figure(expected, "assumed", f"{link.kind.name}: {_PATH}", better, worse, slot)
        count = link.count
        if direct and len(order) > 2:
            # Several rings run at once over a clique's links; a switch shows all links on every pair.
            limit = self._device.nvlinks or count
            sums = (sum(self.topology.link(a, b).count for b in order if b != a) for a in order)
            count = min(min(total, max(limit, count)) for total in sums)
        speed = count * (self._device.nvlink_gbps or 25.0) * GB
        provenance: Provenance = "data sheet" if self._device.nvlink_gbps else "assumed"
        return Figure(speed, provenance, f"{count} NVLinks of {self._device.nvlink_gbps or 25.0:g} GB/s")

    def between(self, left: Sequence[int], right: Sequence[int]) -> LinkFacts:
        """Slowest link of rank i of `left` to rank i of `right`, for pipeline stages inside a node."""
        pairs = zip(left, right, strict=True)
        worst = min(pairs, key=lambda pair: self.pair_gbps(*pair))
        found = self._link(worst)
        return msgspec.structs.replace(found, direct=False)

    def choose(self, size: int, free: frozenset[int]) -> Ring | None:
        """The group of `size` free devices with the fastest ring; then the fewest NUMA nodes, then the
        tightest fit (fewest free devices left over in the islands it touches), then the lowest numbers.
        """
        if size > len(free):
            return None
        return min(
            (self.ring(group) for group in self._candidates(size, free)),
            key=lambda ring: (-ring.bandwidth, *self._spread(ring, free), tuple(sorted(ring.order))),
        )

    def _candidates(self, size: int, free: frozenset[int]) -> Iterable[tuple[int, ...]]:
        ordered = sorted(free)
        if comb(len(ordered), size) <= _EXHAUSTIVE:
            return combinations(ordered, size)
        grown = set()
        for first in ordered:
            group = [first]
            while len(group) < size:
                rest = [device for device in ordered if device not in group]
                speed = {d: min(self.pair_gbps(d, member) for member in group) for d in rest}
                group.append(max(rest, key=lambda d: (speed[d], -d)))
            grown.add(tuple(sorted(group)))
        return sorted(grown)

    def _spread(self, ring: Ring, free: frozenset[int]) -> tuple[int, int]:
        group = set(ring.order)
        touched = [island for island in self.islands() if group.intersection(island)]
        left = sum(len(free.intersection(island) - group) for island in touched)
        return len(self.topology.numa_nodes(ring.order)), left
