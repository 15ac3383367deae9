"""Parser of `nvidia-smi topo -m`, as it comes out of terminals, logs and tickets.

Accepted: tabs or any spacing, columns run together, colour codes, NIC rows and columns, CPU and NUMA affinity
with ranges, no legend, shell prompts around it, and the output of `nvidia-smi -L` before it (which names the
products and MIG instances). Anything that is not understood is an error that points at its line: a
misread matrix would be a wrong plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from dynamictp.advisor.topology import SELF, Device, Link, LinkKind, Topology
from dynamictp.errors import ConfigError

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LABEL = re.compile(r"\s*(GPU\d+|NIC\d+|mlx\d*_(?:bond_)?\d+|hfi\d+_\d+|bnxt_re\d+|irdma\d+|ib\d+)", re.ASCII)
_CELL = re.compile(r"\s*(X|NV\d+|PIX|PXB|PHB|NODE|SYS)", re.ASCII)
_GPU_LINE = re.compile(r"\s*GPU (\d+): (.+?)\s*(?:\(UUID: [^)]*\))?\s*$")
_MIG_LINE = re.compile(r"\s*MIG (\d+g\.\d+gb)\S*\s+Device\s+\d+", re.IGNORECASE)
_CPUS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*,?$")
_NUMA = re.compile(r"\d+([-,]\d+)*$")


@dataclass
class _Row:
    line: int
    cells: list[Link]
    cpus: str
    numa: int | None


@dataclass
class _Reading:
    """What has been read so far."""

    where: str
    columns: list[str] = field(default_factory=list)
    header_line: int = 0
    has_cpus: bool = False
    has_numa: bool = False
    rows: dict[str, _Row] = field(default_factory=dict)
    products: dict[int, str] = field(default_factory=dict)
    instances: dict[int, list[str]] = field(default_factory=dict)

    def fail(self, line: int, message: str) -> ConfigError:
        return ConfigError(f"{self.where}, line {line}: {message}")


def parse_topology(text: str, where: str = "topology") -> Topology:
    """The node described by the text. Raises `ConfigError` naming the line at fault."""
    reading = _Reading(where)
    last_gpu = -1
    for number, raw in enumerate(_COLOUR.sub("", text).splitlines(), start=1):
        line = raw.replace("\u00a0", " ").strip()
        if not line:
            continue
        if line.lower().startswith("legend"):
            break
        if (gpu := _GPU_LINE.match(line)) and not reading.columns:
            last_gpu = int(gpu[1])
            reading.products[last_gpu] = gpu[2]
        elif (mig := _MIG_LINE.match(line)) and last_gpu >= 0 and not reading.columns:
            reading.instances.setdefault(last_gpu, []).append(mig[1].lower())
        elif not reading.columns:
            _try_header(reading, line, number)
        elif _ends(reading, line):
            break
        else:
            _read_row(reading, line, number)
    return _finish(reading)


def _try_header(reading: _Reading, line: str, number: int) -> None:
    labels, rest = _take(_LABEL, line)
    if not labels:
        return  # a prompt or a banner before the matrix
    if _CELL.match(rest):
        raise reading.fail(number, "a row of the matrix comes before its header line (GPU0 GPU1 …)")
    doubled = {label for label in labels if labels.count(label) > 1}
    if doubled:
        raise reading.fail(number, f"column {min(doubled)} appears twice")
    if not any(label.startswith("GPU") for label in labels):
        raise reading.fail(number, "the header names no GPU")
    if rest and not rest.lower().startswith(("cpu", "numa", "gpu numa")):
        raise reading.fail(
            number, f"the header goes on with {rest!r}, expected devices, NICs or affinity columns"
        )
    reading.columns, reading.header_line = labels, number
    reading.has_cpus = "cpu aff" in rest.lower()
    reading.has_numa = "numa aff" in rest.lower()


def _ends(reading: _Reading, line: str) -> bool:
    """After all device rows, what is no row (a prompt, a NIC legend) ends the matrix."""
    label = _LABEL.match(line)
    complete = all(name in reading.rows for name in reading.columns if name.startswith("GPU"))
    return complete and (label is None or line[label.end() :].lstrip().startswith(":"))


def _read_row(reading: _Reading, line: str, number: int) -> None:
    label = _LABEL.match(line)
    if label is None:
        raise reading.fail(
            number, f"{line[:40]!r} is no row of the matrix; expected one of {_missing(reading)}"
        )
    name = label[1]
    if name not in reading.columns:
        raise reading.fail(number, f"row {name} has no column in the header (line {reading.header_line})")
    if name in reading.rows:
        raise reading.fail(number, f"row {name} appears twice (first in line {reading.rows[name].line})")
    rest = line[label.end() :]
    cells: list[Link] = []
    for column in reading.columns:
        cell = _CELL.match(rest)
        if cell is None:
            found = rest.split()[0] if rest.split() else "the end of the line"
            raise reading.fail(
                number,
                f"row {name}, column {column}: found {found!r}, expected X, NV#, PIX, PXB, PHB, NODE or SYS "
                f"({len(cells)} of {len(reading.columns)} cells read)",
            )
        cells.append(Link.parse(cell[1]))
        rest = rest[cell.end() :]
    if cells[reading.columns.index(name)] != SELF:
        raise reading.fail(number, f"row {name} has no X in its own column: cells are missing or shifted")
    cpus, numa = _affinity(reading, rest, number, name)
    reading.rows[name] = _Row(number, cells, cpus, numa)


def _affinity(reading: _Reading, rest: str, number: int, name: str) -> tuple[str, int | None]:
    tokens = re.sub(r",\s+", ",", rest).split()
    cpus, numa = "", None
    if tokens and _CELL.fullmatch(tokens[0]):
        raise reading.fail(number, f"row {name} has more cells than the header has columns")
    if tokens and (reading.has_cpus or not reading.has_numa):
        first = tokens.pop(0)
        if first != "N/A" and not _CPUS.match(first):
            raise reading.fail(number, f"row {name}: CPU affinity {first!r}, expected ranges as 0-31,64-95")
        cpus = "" if first == "N/A" else first.rstrip(",")
    if tokens:
        second = tokens.pop(0)
        if second != "N/A" and not _NUMA.match(second):
            raise reading.fail(number, f"row {name}: NUMA affinity {second!r}, expected a node such as 0")
        numa = None if second == "N/A" else int(re.split(r"[-,]", second)[0])
    return cpus, numa


def _finish(reading: _Reading) -> Topology:
    if not reading.columns:
        raise ConfigError(
            f"{reading.where}: no header line (GPU0 GPU1 …); expected the output of `nvidia-smi topo -m`"
        )
    gpus = [name for name in reading.columns if name.startswith("GPU")]
    nics = [name for name in reading.columns if not name.startswith("GPU")]
    for name in gpus:
        if name not in reading.rows:
            raise reading.fail(reading.header_line, f"column {name} has no row: the matrix is cut off")
    at = {name: i for i, name in enumerate(reading.columns)}
    for i, a in enumerate(gpus):
        for b in gpus[:i]:
            here, there = reading.rows[a].cells[at[b]], reading.rows[b].cells[at[a]]
            if here != there:
                raise reading.fail(
                    reading.rows[a].line,
                    f"{a}-{b} is {here} here and {there} in line {reading.rows[b].line}: they must be equal",
                )
    topology = Topology(
        devices=tuple(
            Device(
                name,
                reading.rows[name].numa,
                reading.rows[name].cpus,
                reading.products.get(int(name[3:]), ""),
            )
            for name in gpus
        ),
        links=tuple(tuple(reading.rows[a].cells[at[b]] for b in gpus) for a in gpus),
        nics=tuple(nics),
        nic_links=tuple(tuple(reading.rows[a].cells[at[n]] for n in nics) for a in gpus) if nics else (),
        source=reading.where,
    )
    return _with_instances(topology, reading.instances) if reading.instances else topology


def _with_instances(topology: Topology, instances: dict[int, list[str]]) -> Topology:
    """GPUs that are cut into MIG instances are replaced by them; instances have no peer-to-peer."""
    origin: list[int] = []
    devices: list[Device] = []
    for index, device in enumerate(topology.devices):
        profiles = instances.get(int(device.label[3:]), [])
        for position, profile in enumerate(profiles):
            devices.append(msgspec.structs.replace(device, label=f"{device.label}:{position}", mig=profile))
            origin.append(index)
        if not profiles:
            devices.append(device)
            origin.append(index)

    def link(i: int, j: int) -> Link:
        if i == j:
            return SELF
        if devices[i].mig or devices[j].mig:
            return Link(LinkKind.HOST)
        return topology.links[origin[i]][origin[j]]

    return msgspec.structs.replace(
        topology,
        devices=tuple(devices),
        links=tuple(tuple(link(i, j) for j in range(len(devices))) for i in range(len(devices))),
        nic_links=tuple(topology.nic_links[i] for i in origin) if topology.nic_links else (),
    )


def _missing(reading: _Reading) -> str:
    return ", ".join(name for name in reading.columns if name not in reading.rows)


def _take(pattern: re.Pattern[str], text: str) -> tuple[list[str], str]:
    """As many matches as follow each other from the start, and the rest."""
    found = []
    while match := pattern.match(text):
        found.append(match[1])
        text = text[match.end() :]
    return found, text.strip()
