"""A closed load: a fixed number of users who each wait for an answer and ask again at once. Pure.

Mean value analysis (Reiser and Lavenberg 1980) of two stations: prompts queue for the step's token budget
(first come, first served, any distribution), decoding is a delay. The delay depends on the batch and on the
prompts beside it, so both are solved together.
"""

from __future__ import annotations

import math

import msgspec

from dynamictp.cost.batching import WAIT_RANGE, Latency, Replica, Targets
from dynamictp.cost.queueing import NO_WAIT, Wait

_ROUNDS = 60
_MOST_PREFILL = 0.999
"""Part of the time that prompts may take before the fixed point is found: below one, so that it is finite."""


class _Round(msgspec.Struct, frozen=True):
    """One evaluation of mean value analysis."""

    rate: float
    wait: float
    """Mean wait of a prompt before its first step, seconds."""
    busy: float
    rows: float


def closed_load(replica: Replica, users: int, replicas: int, targets: Targets) -> tuple[float, Latency]:
    """(requests per second, latencies) of `users` users spread evenly over `replicas` such replicas.

    Raises ValueError without a user per replica.
    """
    if users < replicas:
        raise ValueError(f"{users} users leave some of {replicas} replicas idle")
    share = min(users / replicas, float(replica.max_batch))
    rate, rows = 0.0, share / 2
    for _ in range(_ROUNDS):
        found = _analyse(replica, share, rate, rows)
        rate, rows = (rate + found.rate) / 2, (rows + found.rows) / 2
    state = replica.state(rate, rows)
    uncertain = WAIT_RANGE.at(replica.steps.corner)
    wait = Wait(found.busy, uncertain * found.wait / found.busy) if found.wait > 0 else NO_WAIT
    return rate * replicas, replica.latencies(state, (wait, NO_WAIT), targets)


def _analyse(replica: Replica, users: float, rate: float, rows: float) -> _Round:
    costs = replica.prompt_costs(rows)
    service = sum(weight * cost.occupancy for weight, cost in costs)
    residual = sum(weight * cost.occupancy**2 for weight, cost in costs) / (2 * service)
    added = sum(weight * cost.added for weight, cost in costs)
    latency = sum(weight * cost.latency for weight, cost in costs)
    tpot = replica.decode_s(rows) / (1 - min(rate * added, _MOST_PREFILL))
    decoding = replica.decode_tokens * tpot
    delay = decoding + latency - service
    below = _recursion(math.floor(users), service, residual, delay)
    above = _recursion(math.ceil(users), service, residual, delay)
    part = users - math.floor(users)
    found, wait = (low * (1 - part) + high * part for low, high in zip(below, above, strict=True))
    return _Round(found, wait, min(found * service, 1.0), min(found * decoding, users))


def _recursion(users: int, service: float, residual: float, delay: float) -> tuple[float, float]:
    """(throughput, wait) for that many users: an arrival sees the queue of one user fewer."""
    rate, queue, wait = 0.0, 0.0, 0.0
    for present in range(1, users + 1):
        busy = min(rate * service, 1.0)
        wait = max(queue - busy, 0.0) * service + busy * residual
        rate = present / (wait + service + delay)
        queue = rate * (wait + service)
    return rate, wait
