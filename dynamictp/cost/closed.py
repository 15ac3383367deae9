"""A closed load: a fixed number of users who each wait for an answer and ask again at once. Pure.

A finite-source queue (the machine repairman; Kleinrock, "Queueing Systems" I, 3.8): a birth-death chain over
the number of prompts that wait for or have the step's token budget. While one has it, the others decode only
as fast as steps with a full budget come, so that prompts also hold back the requests after them. Times that
are neither (the way to the engine, steps planned ahead) are a pure delay, whose users are not in the chain
(Little's law). Service times other than exponential scale the wait (Lee and Longton 1959).
"""

from __future__ import annotations

import math

import msgspec

from dynamictp.cost.batching import OVERLOADED, Latency, Replica, Targets
from dynamictp.cost.figures import Figure
from dynamictp.cost.queueing import NO_WAIT, Wait

WAIT_RANGE = Figure(
    1.0, "derived", "the chain against step-by-step simulations: within a quarter", 0.75, 1.25, 0.0
)
_ROUNDS = 50
_FEWEST = 1e-3
_MOST_PREFILL = 0.999
"""Part of the time that prompts take in the mean field of a saturated replica: it needs less than one."""


class Level(msgspec.Struct, frozen=True):
    """A number of decoding rows. Rates per second, seconds."""

    decoding: float
    """Requests that end their decoding while no prompt is there."""
    beside: float
    """The same beside a prompt."""
    service: float
    """Mean time for which a prompt keeps the token budget."""
    square: float
    """Mean of its square."""


class Balance(msgspec.Struct, frozen=True):
    """The chain in equilibrium. Rates per second, seconds."""

    rate: float
    wait: float
    """Mean wait of a prompt for the token budget."""
    exponential_wait: float
    """What it is in the chain, whose service times are exponential."""
    busy: float
    rows: float


def closed_load(replica: Replica, users: int, replicas: int, targets: Targets) -> tuple[float, Latency]:
    """(requests per second, latencies) of `users` users spread evenly over `replicas` such replicas.

    Raises ValueError without a user per replica.
    """
    if users < replicas:
        raise ValueError(f"{users} users leave some of {replicas} replicas idle")
    share = min(users / replicas, float(replica.max_batch))
    if share < 1:
        return 0.0, OVERLOADED
    levels = [_level(replica, rows) for rows in range(math.ceil(share) + 1)]
    known = [balance(levels[: most + 1]) for most in range(len(levels))]
    present, uncertain = share, WAIT_RANGE.at(replica.steps.corner)
    for _ in range(_ROUNDS):
        found = _between(known, present)
        tpot = found.rows / (found.rate * replica.decode_tokens)
        costs = replica.prompt_costs(found.rows)
        most = _MOST_PREFILL / sum(weight * cost.added for weight, cost in costs)
        state = msgspec.structs.replace(replica.state(min(found.rate, most), found.rows), tpot_s=tpot)
        service = sum(weight * cost.occupancy for weight, cost in costs)
        first_token = sum(weight * seconds for weight, seconds in replica.services(state, costs))
        delay = first_token - service + uncertain * found.wait - found.exponential_wait
        present = (present + min(max(share - found.rate * delay, _FEWEST), share)) / 2
    busy = min(max(found.busy, 1e-9), 1.0)
    wait = Wait(busy, uncertain * found.wait / busy) if found.wait > 0 else NO_WAIT
    return found.rate * replicas, replica.latencies(state, (wait, NO_WAIT), targets)


def _level(replica: Replica, rows: int) -> Level:
    costs = replica.decoding_costs(rows)
    service = sum(weight * cost.occupancy for weight, cost, _ in costs)
    steps = sum(weight * steps for weight, _, steps in costs)
    return Level(
        decoding=rows / (replica.decode_tokens * replica.decode_s(rows)),
        beside=rows / replica.decode_tokens * steps / service,
        service=service,
        square=sum(weight * cost.occupancy**2 for weight, cost, _ in costs),
    )


def balance(levels: list[Level]) -> Balance:
    """Equilibrium of as many users as there are levels beyond 0; `levels[r]` holds while r of them decode.

    State k, with k prompts: births at the rate at which N − k rows end, deaths at 1 ÷ the prompts' service.
    """
    users = len(levels) - 1
    weights = [1.0]
    for prompts in range(users):
        before, after = levels[users - prompts], levels[users - prompts - 1]
        births = before.beside if prompts else before.decoding
        weights.append(weights[-1] * births * after.service)
    total = sum(weights)
    states = [weight / total for weight in weights]
    serving = [(part, levels[users - prompts]) for prompts, part in enumerate(states) if prompts]
    rate = sum(part / level.service for part, level in serving)
    if rate <= 0:
        return Balance(0.0, 0.0, 0.0, 0.0, float(users))
    busy = sum(part for part, _ in serving)
    queue = sum(part * (prompts - 1) for prompts, part in enumerate(states) if prompts)
    mean = sum(part * level.service for part, level in serving) / busy
    square = sum(part * level.square for part, level in serving) / busy
    rows = sum(part * (users - prompts) for prompts, part in enumerate(states))
    return Balance(rate, queue / rate * square / (2 * mean**2), queue / rate, busy, rows)


def _between(known: list[Balance], users: float) -> Balance:
    """Of a number of users that is no integer, linear; of less than one, a part of one's."""
    low = min(math.floor(users), len(known) - 2)
    part = users - low
    names = Balance.__struct_fields__
    pairs = ((getattr(known[low], name), getattr(known[low + 1], name)) for name in names)
    return Balance(*(left * (1 - part) + right * part for left, right in pairs))
