"""What the planner's cost model knows of a pool. One frozen value, JSON for the journal's head. Pure."""

from __future__ import annotations

import math

import msgspec

from dynamictp.cost.calibration import Calibration
from dynamictp.cost.hardware import Assumptions, DeviceFacts, EngineLimits, LinkFacts
from dynamictp.cost.shape import ModelShape
from dynamictp.cost.steps import Domain


class PoolFacts(msgspec.Struct, frozen=True):
    """The model and the devices of one pool. Capacities start from these: data sheet, profile or file."""

    shape: ModelShape
    device: DeviceFacts
    limits: EngineLimits
    kv_tokens_per_device: float
    """Tokens of context per device that a domain may fill: its quota, the cap of dynamic mode applied."""
    links: tuple[tuple[int, LinkFacts], ...] = ()
    """(degree, weakest link inside a domain of that degree); other degrees take the nearest one's."""
    assumptions: Assumptions = Assumptions()
    calibration: Calibration | None = None
    """Measured before (`dynamictp calibrate`); the online calibration corrects on top of it."""

    def link(self, tp: int) -> LinkFacts | None:
        """Weakest link inside a domain of that degree; None for one device."""
        if tp == 1 or not self.links:
            return None
        return min(self.links, key=lambda entry: abs(math.log(entry[0] / tp)))[1]

    def domain(self, tp: int, active_devices: int, calibration: Calibration | None) -> Domain:
        """The cost model's domain of that degree while so many devices of the node work."""
        return Domain(
            shape=self.shape,
            device=self.device,
            tp=tp,
            link=self.link(tp),
            assumptions=self.assumptions,
            calibration=calibration,
            active_devices=max(active_devices, tp),
        )
