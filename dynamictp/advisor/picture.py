"""A node and a placement as a picture, by matplotlib (an optional dependency)."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamictp.advisor.machine import Machine
from dynamictp.advisor.search import Candidate
from dynamictp.advisor.topology import Link, LinkKind
from dynamictp.errors import ConfigError
from dynamictp.extras import need_plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#44aa99")
"""Paul Tol's bright palette: told apart by colour-blind readers, too."""
_FREE = "#dddddd"
_TURN = 0.35
_LINES: dict[LinkKind, tuple[str, float, float]] = {
    LinkKind.NVLINK: ("#228833", 2.4, 0.9),
    LinkKind.PIX: ("#4477aa", 1.8, 0.8),
    LinkKind.PXB: ("#4477aa", 1.2, 0.6),
    LinkKind.PHB: ("#bbbbbb", 1.0, 0.7),
    LinkKind.NODE: ("#bbbbbb", 0.8, 0.5),
    LinkKind.SYS: ("#cccccc", 0.6, 0.35),
    LinkKind.HOST: ("#dddddd", 0.5, 0.3),
}


def draw_picture(machine: Machine, candidate: Candidate | None, path: Path) -> None:
    """Write a .png or .svg of the first node: devices in their islands, links, and the candidate's TP groups.

    Raises `ConfigError` for another suffix or without matplotlib.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--picture {path}: expected a file name that ends with .png or .svg")
    need_plots("--picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    islands = machine.graph.islands()
    columns = min(len(islands), 4)
    rows = math.ceil(len(islands) / columns)
    figure = Figure(figsize=(3.6 * columns + 0.4, 3.4 * rows + 1.0), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = _places(islands, columns)
    _draw_links(axes, machine, places)
    _draw_devices(axes, machine, candidate, places)
    for index, island in enumerate(islands):
        _label_island(axes, machine, island, (index % columns, -(index // columns)))
    axes.set_xlim(-0.62, columns - 0.38)
    axes.set_ylim(-(rows - 1) - 0.62, 0.68)
    axes.set_axis_off()
    title = str(machine) if candidate is None else f"{candidate.name} on {machine}"
    axes.set_title(title, fontsize=12)
    _legend(axes, machine)
    figure.tight_layout()
    figure.savefig(path)


def _places(islands: tuple[tuple[int, ...], ...], columns: int) -> dict[int, tuple[float, float]]:
    """Devices on a circle around their island's centre."""
    places = {}
    for index, island in enumerate(islands):
        x, y = index % columns, -(index // columns)
        radius = 0.0 if len(island) == 1 else 0.2 if len(island) == 2 else 0.33
        for position, device in enumerate(island):
            # Turned a little, so that a link to the next island passes behind no other device.
            turn = _TURN if len(island) > 2 else 0.0
            angle = math.pi / 2 - turn - 2 * math.pi * position / len(island)
            places[device] = (x + radius * math.cos(angle), y + radius * math.sin(angle))
    return places


def _draw_links(axes: Axes, machine: Machine, places: dict[int, tuple[float, float]]) -> None:
    topology = machine.nodes.topology
    for a, b in combinations(range(topology.size), 2):
        link = topology.link(a, b)
        colour, _, alpha = _LINES[link.kind]
        (xa, ya), (xb, yb) = places[a], places[b]
        axes.plot(
            [xa, xb], [ya, yb], color=colour, linewidth=_width(link), alpha=alpha, zorder=10 - link.kind
        )


def _width(link: Link) -> float:
    """Few NVLinks are told apart by their width; a switch shows the same number everywhere."""
    width = _LINES[link.kind][1]
    few = link.kind is LinkKind.NVLINK and link.count < 5
    return width * (0.4 + 0.6 * link.count) if few else width


def _draw_devices(
    axes: Axes, machine: Machine, candidate: Candidate | None, places: dict[int, tuple[float, float]]
) -> None:
    owner: dict[int, int] = {}
    if candidate is not None:
        for index, replica in enumerate(candidate.placement):
            owner |= dict.fromkeys(replica.devices, index)
    for device, (x, y) in places.items():
        colour = _COLOURS[owner[device] % len(_COLOURS)] if device in owner else _FREE
        axes.scatter([x], [y], s=620, color=colour, edgecolors="white", linewidths=1.5, zorder=20)
        text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 10, "zorder": 21}
        axes.text(x, y, str(device), color="white" if device in owner else "#333333", **text)


def _label_island(axes: Axes, machine: Machine, island: tuple[int, ...], centre: tuple[float, float]) -> None:
    topology = machine.nodes.topology
    numa = ", ".join(map(str, topology.numa_nodes(island)))
    nics = sorted({nic for device in island for nic in topology.nearest_nics(device)})
    parts = [f"NUMA {numa}" if numa else "", " ".join(nics)]
    label = " · ".join(part for part in parts if part)
    axes.text(centre[0], centre[1] + 0.5, label, ha="center", fontsize=8, color="#555555")


def _legend(axes: Axes, machine: Machine) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415

    topology = machine.nodes.topology
    links = {topology.link(a, b) for a, b in combinations(range(topology.size), 2)}
    ordered = sorted(links, key=lambda link: (link.kind, -link.count))
    handles = [
        Line2D([], [], color=_LINES[link.kind][0], linewidth=_width(link), label=str(link))
        for link in ordered
    ]
    if handles:
        axes.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=9)
