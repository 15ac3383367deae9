"""Table of common accelerators, and devices described by the user.

Figures are the vendors' data sheets: dense peaks (without sparsity), memory in GiB as marketed, NVLink and
PCIe per direction. 16-bit peaks are BF16 with FP32 accumulation, or FP16 where the device has no BF16.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamictp.cost.figures import Figure
from dynamictp.cost.hardware import GB, GIB, DeviceFacts
from dynamictp.errors import ConfigError


class _Row(NamedTuple):
    memory_gib: float
    bandwidth_gbps: float
    tflops16: float
    tflops8: float  # 0: no FP8
    nvlinks: int
    nvlink_gbps: float  # one link, one direction
    pcie_gbps: float  # one direction, raw
    sheet: str
    note: str = ""


_NO_BF16 = "no BF16: the 16-bit peak is FP16"
_GEN3, _GEN4, _GEN5 = 15.75, 31.5, 63.0

TABLE: dict[str, _Row] = {
    "t4": _Row(16, 320, 65, 0, 0, 0, _GEN3, "NVIDIA T4 datasheet", _NO_BF16),
    "v100-16g": _Row(16, 900, 125, 0, 6, 25, _GEN3, "NVIDIA V100 datasheet (SXM2)", _NO_BF16),
    "v100-32g": _Row(32, 900, 125, 0, 6, 25, _GEN3, "NVIDIA V100 datasheet (SXM2)", _NO_BF16),
    "a10": _Row(24, 600, 125, 0, 0, 0, _GEN4, "NVIDIA A10 datasheet"),
    "a30": _Row(24, 933, 165, 0, 4, 25, _GEN4, "NVIDIA A30 datasheet"),
    "a40": _Row(48, 696, 149.7, 0, 4, 14.06, _GEN4, "NVIDIA A40 datasheet"),
    "a6000": _Row(48, 768, 154.8, 0, 4, 14.06, _GEN4, "NVIDIA RTX A6000 datasheet"),
    "a100-40g": _Row(40, 1555, 312, 0, 12, 25, _GEN4, "NVIDIA A100 datasheet (SXM4)"),
    "a100-80g": _Row(80, 2039, 312, 0, 12, 25, _GEN4, "NVIDIA A100 datasheet (SXM4)"),
    "a100-80g-pcie": _Row(80, 1935, 312, 0, 12, 25, _GEN4, "NVIDIA A100 datasheet (PCIe)"),
    "l4": _Row(24, 300, 121, 242, 0, 0, _GEN4, "NVIDIA L4 datasheet"),
    "l40s": _Row(48, 864, 362, 733, 0, 0, _GEN4, "NVIDIA L40S datasheet"),
    "rtx6000-ada": _Row(48, 960, 364.2, 728.5, 0, 0, _GEN4, "NVIDIA RTX 6000 Ada datasheet"),
    "rtx3090": _Row(24, 936, 71, 0, 4, 14.06, _GEN4, "NVIDIA GA102 whitepaper"),
    "rtx4090": _Row(
        24, 1008, 165.2, 330.3, 0, 0, _GEN4, "NVIDIA Ada whitepaper", "no peer-to-peer over PCIe"
    ),
    "h100-80g": _Row(80, 3350, 989, 1979, 18, 25, _GEN5, "NVIDIA H100 datasheet (SXM5)"),
    "h100-pcie": _Row(80, 2000, 756, 1513, 12, 25, _GEN5, "NVIDIA H100 datasheet (PCIe)"),
    "h200": _Row(141, 4800, 989, 1979, 18, 25, _GEN5, "NVIDIA H200 datasheet"),
    "b200": _Row(180, 7700, 2250, 4500, 18, 50, _GEN5, "NVIDIA DGX B200 datasheet, per GPU"),
    "mi250x-gcd": _Row(
        64, 1638, 191.5, 0, 4, 50, _GEN4, "AMD MI250X datasheet, one die", "Infinity Fabric links"
    ),
    "mi300x": _Row(192, 5300, 1307, 2615, 7, 64, _GEN5, "AMD MI300X datasheet", "Infinity Fabric links"),
}
BRIDGED = frozenset({"a100-80g-pcie", "h100-pcie"})
"""Cards whose NVLinks are bridges between two neighbours, sold apart: no node joins all of them."""
CUBE_MESH = frozenset({"v100-16g", "v100-32g"})
"""Devices whose nodes of eight have no switch: a hybrid cube mesh (NVIDIA DGX-1 white paper)."""
_ALIASES = {
    "a100": "a100-80g",
    "a100-80": "a100-80g",
    "a100-40": "a100-40g",
    "h100": "h100-80g",
    "v100": "v100-32g",
    "4090": "rtx4090",
    "3090": "rtx3090",
    "rtx-6000-ada": "rtx6000-ada",
    "h200-141g": "h200",
}

HOW_TO_DESCRIBE = (
    "describe it in a YAML file and pass that as --device: name, memory_gib, bandwidth_gbps, tflops (dense "
    "BF16), and where it has them tflops_fp8, nvlinks, nvlink_gbps (one link, one direction), pcie_gbps"
)


class DeviceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the user writes about a device that is not in the table."""

    name: str
    memory_gib: float
    bandwidth_gbps: float
    tflops: float
    tflops_fp8: float = 0.0
    nvlinks: int = 0
    nvlink_gbps: float = 0.0
    pcie_gbps: float = _GEN4
    source: str = "described by the user"


def device_names() -> tuple[str, ...]:
    return tuple(TABLE)


def find_device(name: str) -> DeviceFacts:
    """A device of the table or of a YAML file. Raises `ConfigError` saying how to describe an unknown one."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key in TABLE:
        return _from_row(key, TABLE[key])
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return read_device(path)
    raise ConfigError(f"device {name!r} is not known; known: {', '.join(TABLE)}, local; or {HOW_TO_DESCRIBE}")


def read_device(path: Path) -> DeviceFacts:
    """A device described by the user. Raises `ConfigError` naming what is wrong."""
    try:
        described = msgspec.yaml.decode(path.read_bytes(), type=DeviceFile)
    except OSError as error:
        raise ConfigError(f"--device {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--device {path}: {error}; {HOW_TO_DESCRIBE}") from error
    sizes = (described.memory_gib, described.bandwidth_gbps, described.tflops, described.pcie_gbps)
    if min(sizes) <= 0 or min(described.nvlinks, described.nvlink_gbps, described.tflops_fp8) < 0:
        raise ConfigError(f"--device {path}: memory, bandwidth, tflops and pcie_gbps must be above 0")
    row = _Row(
        described.memory_gib,
        described.bandwidth_gbps,
        described.tflops,
        described.tflops_fp8,
        described.nvlinks,
        described.nvlink_gbps,
        described.pcie_gbps,
        described.source,
    )
    return _from_row(described.name, row)


def _from_row(name: str, row: _Row) -> DeviceFacts:
    return DeviceFacts(
        name=name,
        memory_bytes=row.memory_gib * GIB,
        bandwidth=Figure(row.bandwidth_gbps * GB, "data sheet", row.sheet),
        bf16_flops=Figure(row.tflops16 * 1e12, "data sheet", row.sheet),
        fp8_flops=Figure(row.tflops8 * 1e12, "data sheet", row.sheet) if row.tflops8 else None,
        nvlink_gbps=row.nvlink_gbps,
        nvlinks=row.nvlinks,
        pcie_gbps=row.pcie_gbps,
        note=row.note,
    )


def mig_slice(device: DeviceFacts, profile: str) -> DeviceFacts:
    """One MIG instance, `3g.40gb`: that many of 7 compute slices, and memory and bandwidth in proportion.

    Raises `ConfigError` for a text that is no profile.
    """
    slices, dot, memory = profile.lower().partition(".")
    if not (dot and slices[:-1].isdigit() and slices.endswith("g") and memory.removesuffix("gb").isdigit()):
        raise ConfigError(f"MIG profile {profile!r}: expected a form such as 3g.40gb")
    compute = int(slices[:-1]) / 7
    nbytes = min(int(memory.removesuffix("gb")) * GB, device.memory_bytes)
    part = nbytes / device.memory_bytes

    def scaled(figure: Figure, by: float) -> Figure:
        return Figure(figure.value * by, "derived", f"{profile} of {figure.source}")

    return msgspec.structs.replace(
        device,
        name=f"{device.name}:{profile.lower()}",
        memory_bytes=float(nbytes),
        bandwidth=scaled(device.bandwidth, part),
        bf16_flops=scaled(device.bf16_flops, compute),
        fp8_flops=None if device.fp8_flops is None else scaled(device.fp8_flops, compute),
        nvlinks=0,
        note="a MIG instance: no peer-to-peer, so no tensor parallelism across instances",
    )
