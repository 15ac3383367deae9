"""Nothing may get lost: requests, tokens, pages and devices are counted twice and compared."""

from __future__ import annotations

import math

from dynamictp.errors import DynamicTPError
from dynamictp.sim.collect import Balance
from dynamictp.sim.pool import SimPool


class SimulationError(DynamicTPError):
    """The simulator contradicts itself. Its figures are worth nothing; this is a bug."""


def check_integrity(pool: SimPool, balance: Balance) -> None:
    """At any moment between two events. Raises `SimulationError` that says what does not add up."""
    _check_requests(pool, balance)
    _check_pages(pool)
    _check_devices(pool)


def _check_requests(pool: SimPool, balance: Balance) -> None:
    live = list(pool.node.live())
    if len({id(request) for request in live}) < len(live):
        raise SimulationError("a request is in two places at once")
    known = balance.refused + balance.finished + len(live)
    if balance.arrived != known:
        raise SimulationError(f"{balance.arrived} requests arrived, {known} are accounted for")
    totals = pool.node.totals
    running = sum(tokens for domain in pool.node.domains.values() for _, tokens in domain.settled())
    waiting = sum(request.generated for request in pool.node.waiting)
    told = balance.outputs + running + waiting
    made = totals.decoded + totals.prompts
    if told != made:
        raise SimulationError(f"{made} tokens were generated, requests have {told}")


def _check_pages(pool: SimPool) -> None:
    for domain in pool.node.domains.values():
        held = domain.held_tokens()
        if not math.isclose(domain.used, held, abs_tol=1e-3, rel_tol=1e-9):
            raise SimulationError(
                f"domain {domain.epoch} accounts for {domain.used:g} tokens, holds {held:g}"
            )


def _check_devices(pool: SimPool) -> None:
    node, now = pool.node, pool.loop.now()
    node.account()
    totals = node.totals
    for domain in node.domains.values():
        if not set(domain.devices) <= set(range(node.devices)):
            raise SimulationError(f"domain {domain.epoch} is on devices {domain.devices} that do not exist")
    serving = [domain for domain in node.domains.values() if domain.state == "serving"]
    taken = [device for domain in serving for device in domain.devices]
    if pool.switcher.view is None and len(set(taken)) < len(taken):
        raise SimulationError(f"serving domains share devices: {sorted(taken)}")
    if totals.device_s > node.devices * now * (1 + 1e-9) + 1e-6:
        raise SimulationError(f"{totals.device_s:g} device-seconds in {now:g} s of {node.devices} devices")
    if totals.busy_s > totals.device_s * 1.01 + 1.0:
        raise SimulationError(f"devices were busy {totals.busy_s:g} of {totals.device_s:g} device-seconds")
