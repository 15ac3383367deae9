"""Devices and links as values. Pure."""

from __future__ import annotations

import msgspec

from dynamictp.cost.figures import Figure
from dynamictp.kv import DYNAMIC_CAP

GB = 10**9
GIB = 1 << 30


class DeviceFacts(msgspec.Struct, frozen=True):
    """One kind of device. Bytes, bytes per second, FLOP per second (dense, without sparsity)."""

    name: str
    memory_bytes: float
    bandwidth: Figure
    """Memory bandwidth, bytes/s."""
    bf16_flops: Figure
    """Peak of 16-bit matrix products (FP16 where the device has no BF16)."""
    fp8_flops: Figure | None = None
    nvlink_gbps: float = 0.0
    """GB/s of one NVLink in one direction; 0: the device has none."""
    nvlinks: int = 0
    """Links of one device."""
    pcie_gbps: float = 32.0
    """GB/s of the PCIe slot in one direction, raw."""
    shared_bandwidth: Figure | None = None
    """Bytes/s that all devices of the node reach together, where they share one memory (CPU)."""
    shared_memory: bool = False
    """True on a CPU node: all devices read one memory, weights and KV exist once."""
    node_devices: int = 1
    """Devices over which a shared memory's weights are charged."""
    note: str = ""

    def flops(self, compute: str) -> Figure:
        """Peak for products of that type; FP8 falls back to 16 bits where the device has no FP8."""
        return self.fp8_flops if compute == "fp8" and self.fp8_flops is not None else self.bf16_flops


class LinkFacts(msgspec.Struct, frozen=True):
    """The weakest link of a group, as its ring sees it."""

    kind: str
    bandwidth: Figure
    """Bytes/s in one direction."""
    latency_s: Figure
    """Of one hop of a collective."""
    direct: bool = False
    """Every pair of the group has its own path (NVSwitch, a clique): one-shot collectives pay one hop."""


class Assumptions(msgspec.Struct, frozen=True):
    """What data sheets do not say. Fractions of peaks; times in seconds."""

    compute_efficiency: Figure = Figure(
        0.52, "assumed", "45-60 % of peak is typical for prefill (A4)", better=0.62, worse=0.42, ideal=1.0
    )
    memory_efficiency: Figure = Figure(
        0.75, "assumed", "decode kernels reach 60-88 % of data-sheet bandwidth", 0.88, 0.60, 1.0
    )
    link_efficiency: Figure = Figure(
        0.75, "assumed", "bus bandwidth of ring collectives at large sizes", 0.88, 0.55, 1.0
    )
    overlap: Figure = Figure(
        0.8, "assumed", "how far memory reads hide behind arithmetic in one kernel", 1.0, 0.5, 1.0
    )
    collective_base_s: Figure = Figure(
        8e-6, "assumed", "start of one collective kernel, order of NCCL's tuning constants", 4e-6, 15e-6, 0.0
    )
    step_overhead_s: Figure = Figure(
        1e-3, "assumed", "host work and gaps between kernels of one step, graphs captured", 4e-4, 3e-3, 0.0
    )
    request_overhead_s: Figure = Figure(
        5e-3,
        "assumed",
        "a request outside of steps: HTTP, tokenizer, messages, first token back; on cores of the host's own",
        better=2e-3,
        worse=15e-3,
        ideal=0.0,
    )
    bytes_per_exchange_element: float = 2.0

    def figures(self) -> dict[str, Figure]:
        """All of them by name, for a report."""
        return {
            name: value for name in self.__struct_fields__ if isinstance(value := getattr(self, name), Figure)
        }


class EngineLimits(msgspec.Struct, frozen=True):
    """Settings of the serving engine that shape its steps."""

    max_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_step_s: float = 0.0
    """Longest step beside running streams, 0: unlimited. Never less than a page of prefill."""
    page_tokens: int = 16
    steps_ahead: int = 1
    """Steps planned while one runs: a request that arrives begins after them."""
    kv_cap: float = 1.0
    """Part of the arena one domain may fill."""
    kv_bytes: float = 0.0
    """Memory for KV of the whole node, 0: what the devices have left."""
    communicators: int = 1
    """Communicators held in memory."""

    def for_switching(self) -> EngineLimits:
        """Of dynamic mode: room for a switch; communicators of the present, the next and a parked layout."""
        return msgspec.structs.replace(self, kv_cap=DYNAMIC_CAP, communicators=3)
