"""Price of a switch and when it pays for itself (A7). Pure. Seconds, bytes, tokens.

On this design a switch copies no weights while the residency holds; what it costs is the preparation beside
running traffic, the drain in which old and new domain share devices, and the KV that has to move.
"""

from __future__ import annotations

import math

import msgspec

from dynamictp.cost.figures import Figure

COMMUNICATOR_S = Figure(0.6, "assumed", "one communicator of up to 8 ranks on CUDA, in the background")
PROOF_S = Figure(0.2, "assumed", "proof collective, warm-up, graphs, in pieces of 50 ms (design 7)")
COMMIT_S = Figure(0.005, "assumed", "the routing commit takes milliseconds (H2)")
CPU_PREPARE_S = Figure(0.03, "assumed", "views and a shared-memory communicator on the CPU server")


class SwitchPrice(msgspec.Struct, frozen=True):
    """What one switch costs. Seconds are wall-clock; `lost_device_s` is what serving loses meanwhile."""

    prepare_s: float
    commit_s: float
    drain_s: float
    weight_bytes_streamed: float
    """0 when every device already holds its new range."""
    kv_bytes_moved: float
    lost_device_s: float

    @property
    def total_s(self) -> float:
        return self.prepare_s + self.commit_s + self.drain_s


def switch_price(
    *,
    devices: int,
    shared_memory: bool,
    missing_weight_bytes: float,
    running_kv_bytes: float,
    kv_stays: float,
    bandwidth: float,
) -> SwitchPrice:
    """Price of replacing domains on `devices` devices.

    `missing_weight_bytes` per device are streamed before the switch (0 within the residency plan);
    `running_kv_bytes` is the KV of requests handed over, of which the fraction `kv_stays` is already on the
    right device; `bandwidth` of the link between devices, bytes/s. Preparation takes no device time but its
    proof and warm-up; the drain does.
    """
    moved = 0.0 if shared_memory else running_kv_bytes * (1 - kv_stays)
    drain = moved / devices / bandwidth if moved else 0.0
    prepare = CPU_PREPARE_S.value if shared_memory else COMMUNICATOR_S.value + PROOF_S.value
    prepare += missing_weight_bytes / bandwidth
    proof = 0.0 if shared_memory else PROOF_S.value
    return SwitchPrice(
        prepare_s=prepare,
        commit_s=COMMIT_S.value,
        drain_s=drain,
        weight_bytes_streamed=missing_weight_bytes * devices,
        kv_bytes_moved=moved,
        lost_device_s=devices * (proof + COMMIT_S.value + drain),
    )


def break_even_s(price: SwitchPrice, gain_devices: float) -> float:
    """How long the new layout must last to repay the switch: lost device-seconds ÷ devices gained.

    `gain_devices` is the gain in the same currency, devices' worth of serving freed or added
    (capacity gain × devices); infinite when there is none.
    """
    return math.inf if gain_devices <= 0 else price.lost_device_s / gain_devices
