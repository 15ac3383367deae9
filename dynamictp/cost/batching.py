"""Continuous batching as a mean field: the running batch, latencies and capacity of one replica. Pure.

The batch B of decoding requests settles where Little's law holds, B = λ·E[n]·τ(B). A token takes
τ = d(B) ÷ (1 − λ·m(B)): the decode step d, stretched by the part of time that prompts take, m seconds each
beside B rows. Prompts queue for the step's token budget (M/G/R over R replicas when the router sends each
request to the shortest completion, M/G/1 behind a blind split), and requests queue for KV (Erlang C with as
many servers as sequences fit). All of it is over the length distribution, not its mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dynamictp.cost.figures import Corner, Figure
from dynamictp.cost.hardware import EngineLimits
from dynamictp.cost.lengths import Z99, Workload
from dynamictp.cost.memory import sequence_tokens
from dynamictp.cost.queueing import (
    NO_WAIT,
    Wait,
    bisect,
    erlang_c,
    mgc_wait,
    probability_beyond,
    quantile_of_sum,
)
from dynamictp.cost.steps import StepModel

_SAFETY_Z = 2.33
"""KV must hold the running batch in 99 of 100 moments, not only on average."""


WAIT_RANGE = Figure(
    1.0,
    "derived",
    "queueing formulas against step-by-step simulations: within a factor of two",
    0.5,
    1.5,
    0.0,
)


class PromptCost(msgspec.Struct, frozen=True):
    """One prompt beside B decoding rows. Seconds."""

    added: float
    """What it takes from the decoding rows."""
    latency: float
    """From its first step to its first token."""
    occupancy: float
    """How long it keeps the step's token budget."""


class _Beside(msgspec.Struct, frozen=True):
    """Steps of `rows` decoding rows, as a prompt beside them sees them. Tokens and seconds."""

    rows: float
    batch: float
    """Rows of one micro-batch."""
    chunk: float
    step_s: float
    plain_s: float
    """That step without attention."""
    full_chunk_s: float
    """What a full chunk adds to it."""


class SteadyState(msgspec.Struct, frozen=True):
    """A replica at a given load. Seconds and tokens; `stable` is false when no batch carries the load."""

    stable: bool
    batch: float
    """Requests decoding."""
    decode_step_s: float
    tpot_s: float
    tpot_sigma_s: float
    prefill_share: float
    """Part of the time that prompts take."""
    resident: float
    """Requests that hold KV, prefilling ones included."""


UNSTABLE = SteadyState(False, math.inf, math.inf, math.inf, 0.0, 1.0, math.inf)


class Latency(msgspec.Struct, frozen=True):
    """Quantiles of one load. Seconds; infinite when the load is beyond capacity."""

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    tpot_p99: float
    e2e_p50: float
    e2e_p99: float
    goodput_fraction: float
    """Part of the requests that meet both targets."""
    kv_wait: float
    """Probability that a request waits for KV."""
    wait_sigma: float = 0.0
    """Standard deviation of the waits in the time to first token."""


OVERLOADED = Latency(math.inf, math.inf, math.inf, math.inf, math.inf, math.inf, math.inf, 0.0, 1.0)


class Targets(msgspec.Struct, frozen=True):
    """Service level objective (C4's defaults). Seconds."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1


class Replica:
    """One domain serving a workload, in the corner of its step model. Immutable."""

    def __init__(self, steps: StepModel, workload: Workload, limits: EngineLimits, kv_tokens: float) -> None:
        self.steps = steps
        self._workload = workload
        self._limits = limits
        self._context = workload.running_context
        # The first token comes from the prompt's last step; the others take a decode step each.
        self.decode_tokens = max(workload.mean_output - 1, 0.5)
        self._prompts = workload.prompts
        self._output_pairs = [(node.weight, node.tokens) for node in workload.outputs]
        self._alone_costs: dict[float, PromptCost] = {}
        self._request_added_s = steps.request_added_s
        self._steps_before = 0.5 + limits.steps_ahead
        """Steps that a prompt waits for on average: the rest of the one that runs, and those planned."""
        self.max_batch = min(self._kv_batch(kv_tokens), limits.max_num_seqs)
        """Requests whose KV fits in 99 of 100 moments, at most the engine's rows; 0 when none does."""

    def _kv_batch(self, kv_tokens: float) -> int:
        # B·μ + z·σ·√B = K, solved for √B.
        mean = sequence_tokens(self._context, self._limits.page_tokens)
        spread = _SAFETY_Z * math.sqrt(self._workload.running_context_variance)
        root = (-spread + math.sqrt(spread * spread + 4 * mean * kv_tokens)) / (2 * mean)
        fits = int(root * root)
        longest = sequence_tokens(self._workload.longest, self._limits.page_tokens)
        return max(fits, 1) if kv_tokens >= longest else 0

    def decode_s(self, rows: float) -> float:
        """Seconds of a step that decodes `rows` rows at the workload's running context."""
        return self.steps.decode(max(rows, 1.0), self._context).total_s

    def chunk_tokens(self, rows: float) -> float:
        """Prompt tokens of one step beside `rows` decoding rows."""
        budget = float(self._limits.max_batched_tokens)
        if not self._limits.max_step_s or rows <= 0:
            return budget
        per_token = self.steps.base(budget, 1.0).total_s / budget
        left = (self._limits.max_step_s - self.decode_s(rows)) / per_token
        return min(max(left, float(self._limits.page_tokens)), budget - rows)

    def _alone(self, tokens: float) -> PromptCost:
        """A prompt on an idle replica."""
        known = self._alone_costs.get(tokens)
        if known is None:
            stages = self.steps.domain.pp
            seconds = self.steps.prompt(tokens, self.chunk_tokens(0.0)).total_s
            chunks = math.ceil(tokens / self._limits.max_batched_tokens)
            occupancy = seconds * chunks / (chunks + stages - 1)
            known = self._alone_costs[tokens] = PromptCost(occupancy, seconds, occupancy)
        return known

    def _beside(self, rows: float) -> _Beside:
        chunk, batch = self.chunk_tokens(rows), max(1.0, rows / self.steps.domain.pp)
        plain = self.steps.base(batch, batch).total_s
        full = self.steps.base(batch + chunk, batch + 1).total_s
        return _Beside(rows, batch, chunk, self.decode_s(rows), plain, max(full - plain, 0.0))

    def prompt(self, tokens: float, rows: float) -> PromptCost:
        """A prompt of `tokens` tokens when on average `rows` requests decode.

        Beside decoding rows it shares their steps: the weights are read anyway, only the difference counts.
        An idle replica (probability e^−rows, as if their number were Poisson) runs it alone.
        """
        return self._alone(tokens) if rows <= 0 else self._mixed(tokens, self._beside(rows))

    def _mixed(self, tokens: float, beside: _Beside) -> PromptCost:
        alone, shared = self._alone(tokens), self._shared(tokens, beside)
        idle = math.exp(-beside.rows)
        return PromptCost(
            added=idle * alone.added + (1 - idle) * shared.added,
            latency=idle * alone.latency + (1 - idle) * shared.latency,
            occupancy=idle * alone.occupancy + (1 - idle) * shared.occupancy,
        )

    def _shared(self, tokens: float, beside: _Beside) -> PromptCost:
        """A prompt in the steps of rows that decode for certain."""
        stages = self.steps.domain.pp
        whole = math.floor(tokens / beside.chunk)
        rest = tokens - whole * beside.chunk
        added = whole * beside.full_chunk_s
        if rest > 0:
            step = self.steps.base(beside.batch + rest, beside.batch + 1).total_s
            added += max(step - beside.plain_s, 0.0)
        added = (added + self.steps.prompt_attention_s(tokens)) / stages + self._request_added_s
        pieces = whole + (rest > 0)
        latency = added * (pieces + stages - 1) / pieces + (pieces + self._steps_before) * beside.step_s
        return PromptCost(added, latency, occupancy=added + tokens / beside.chunk * beside.step_s)

    def _mean_added(self, rows: float) -> tuple[float, float, float]:
        """E[m], E[m²] and the mean occupancy of prompts beside `rows` rows."""
        costs = self.prompt_costs(rows)
        return (
            sum(weight * cost.added for weight, cost in costs),
            sum(weight * cost.added**2 for weight, cost in costs),
            sum(weight * cost.occupancy for weight, cost in costs),
        )

    def capacity(self) -> float:
        """Requests per second that one replica carries with its largest batch:
        λ = B ÷ (E[n]·d(B) + B·m(B)), and no more than prompts fit into the token budget of the steps.
        """
        if self.max_batch < 1:
            return 0.0
        rates = []
        for rows in {1, -(-self.max_batch // 4), -(-self.max_batch // 2), self.max_batch}:
            added, _, occupancy = self._mean_added(rows)
            rate = rows / (self.decode_tokens * self.decode_s(rows) + rows * added)
            rates.append(min(rate, 1 / occupancy))
        return max(rates)

    def steady(self, rate: float) -> SteadyState:
        """The smallest batch at which `rate` requests per second are carried."""
        if self.max_batch < 1:
            return UNSTABLE
        outputs = self.decode_tokens

        def excess(rows: float) -> float:
            added, _, occupancy = self._mean_added(rows)
            if rate * added >= 1 or rate * occupancy >= 1:
                return math.inf
            return rate * outputs * self.decode_s(rows) / (1 - rate * added) - rows

        low, high = 0.0, 0.05
        while excess(high) > 0:
            if high >= self.max_batch:
                return UNSTABLE
            low, high = high, min(high * 2, float(self.max_batch))
        batch = bisect(lambda rows: excess(rows) > 0, low, high, rounds=12)
        return self.state(rate, batch)

    def state(self, rate: float, batch: float) -> SteadyState:
        """The state in which `rate` requests per second keep `batch` of them decoding."""
        added, second, occupancy = self._mean_added(batch)
        step = self.decode_s(batch)
        tpot = step / (1 - rate * added)
        # A request's TPOT varies with the batch it meets (Poisson) and the prompts that fall into its life.
        crowded = self.decode_s(batch + math.sqrt(batch)) / (1 - rate * added)
        interruptions = rate * second * tpot / self.decode_tokens
        return SteadyState(
            stable=True,
            batch=batch,
            decode_step_s=step,
            tpot_s=tpot,
            tpot_sigma_s=math.sqrt((crowded - tpot) ** 2 + interruptions),
            prefill_share=rate * added,
            resident=batch + rate * occupancy,
        )

    def latency(self, rate: float, replicas: int, targets: Targets) -> Latency:
        """Latencies when `replicas` such replicas together receive `rate` requests per second.

        In the SLOW corner requests are split blindly; in the IDEAL corner nobody waits and nobody shares.
        """
        if self.steps.corner is Corner.IDEAL:
            return self._unloaded(targets)
        state = self.steady(rate / replicas)
        return self._loaded(rate, replicas, state, targets) if state.stable else OVERLOADED

    def slo_capacity(self, replicas: int, targets: Targets) -> float:
        """Highest rate at which P99 of TTFT and of TPOT meet their targets; 0 when no rate does.

        The load is walked along the batch it leads to, so that no fixed point has to be found:
        λ(B) = B ÷ (E[n]·d(B) + B·m(B)).
        """

        def holds(rows: float) -> bool:
            asked = self._rate_of(rows) * replicas
            state, costs = self.state(asked / replicas, rows), self.prompt_costs(rows)
            if state.tpot_s + Z99 * state.tpot_sigma_s > targets.tpot_s:
                return False
            waits = self._waits(asked, replicas, state, costs)
            services = self.services(state, costs)
            return probability_beyond(targets.ttft_s, services, waits) <= 0.01

        smallest, largest = 0.01, float(self.max_batch)
        if self.max_batch < 1 or not holds(smallest):
            return 0.0
        edge = bisect(lambda x: holds(math.exp(x)), math.log(smallest), math.log(largest), rounds=12)
        return self._rate_of(math.exp(edge)) * replicas

    def _rate_of(self, rows: float) -> float:
        """Requests per second of one replica at which `rows` of them decode."""
        added = self._mean_added(rows)[0]
        return rows / (self.decode_tokens * self.decode_s(rows) + rows * added)

    def _loaded(self, rate: float, replicas: int, state: SteadyState, targets: Targets) -> Latency:
        waits = self._waits(rate, replicas, state, self.prompt_costs(state.batch))
        return self.latencies(state, waits, targets)

    def latencies(self, state: SteadyState, waits: tuple[Wait, Wait], targets: Targets) -> Latency:
        """Quantiles in a known state; `waits` are those for the token budget and for KV."""
        services = self.services(state, self.prompt_costs(state.batch))
        e2e = [
            (weight * part, service + (tokens - 1) * state.tpot_s)
            for weight, service in services
            for part, tokens in self._output_pairs
        ]
        in_time = sum(
            weight * max(0.0, 1 - sum(w.beyond(targets.ttft_s - service) for w in waits))
            for weight, service in services
            if service <= targets.ttft_s
        )
        return Latency(
            ttft_mean=sum(weight * service for weight, service in services) + sum(w.mean for w in waits),
            ttft_p50=quantile_of_sum(0.5, services, waits),
            ttft_p99=quantile_of_sum(0.99, services, waits),
            tpot_mean=state.tpot_s,
            tpot_p99=state.tpot_s + Z99 * state.tpot_sigma_s,
            e2e_p50=quantile_of_sum(0.5, e2e, waits),
            e2e_p99=quantile_of_sum(0.99, e2e, waits),
            goodput_fraction=in_time * _below(targets.tpot_s, state.tpot_s, state.tpot_sigma_s),
            kv_wait=waits[1].probability,
            wait_sigma=math.sqrt(sum(wait.variance for wait in waits)),
        )

    def services(
        self, state: SteadyState, costs: Sequence[tuple[float, PromptCost]]
    ) -> list[tuple[float, float]]:
        """(probability, seconds from a request's send to its first token, but for waits), with the costs of
        `prompt_costs`, in its order.

        The steps that a prompt waits for have other prompts in them: they take a TPOT, not a decode step,
        unless the replica idles. So has its own last one, as far as it leaves room in the budget.
        """
        busy, chunk = 1 - math.exp(-state.batch), self.chunk_tokens(state.batch)
        outside = (1 - busy) * self.steps.request_s(busy=False) + busy * self.steps.request_s(busy=True)
        others = busy * (state.tpot_s - state.decode_step_s)
        return [
            (weight, outside + cost.latency + (self._steps_before + 1 - node.tokens % chunk / chunk) * others)
            for (weight, cost), node in zip(costs, self._prompts, strict=True)
        ]

    def prompt_costs(self, rows: float) -> list[tuple[float, PromptCost]]:
        """(probability, cost) of the workload's prompts beside `rows` decoding rows."""
        if rows <= 0:
            return [(node.weight, self._alone(node.tokens)) for node in self._prompts]
        beside = self._beside(rows)
        return [(node.weight, self._mixed(node.tokens, beside)) for node in self._prompts]

    def decoding_costs(self, rows: float) -> list[tuple[float, PromptCost, float]]:
        """(probability, cost, steps of the decoding rows meanwhile) of the workload's prompts while `rows`
        rows decode for certain; `prompt_costs` is for a number that varies around `rows`.
        """
        if rows <= 0:
            return [(node.weight, self._alone(node.tokens), 0.0) for node in self._prompts]
        beside = self._beside(rows)
        return [
            (node.weight, self._shared(node.tokens, beside), node.tokens / beside.chunk)
            for node in self._prompts
        ]

    def _waits(
        self, rate: float, replicas: int, state: SteadyState, costs: Sequence[tuple[float, PromptCost]]
    ) -> tuple[Wait, Wait]:
        mean, second = _moments(costs)
        blind = self.steps.corner is Corner.SLOW
        servers = 1 if blind else replicas
        prompts = mgc_wait(rate / replicas if blind else rate, mean, second, servers)
        prompts = Wait(prompts.probability, prompts.scale * WAIT_RANGE.at(self.steps.corner))
        life = state.resident / (rate / replicas) if rate else 0.0
        slots = self.max_batch * servers
        if state.resident * servers >= slots:
            return prompts, Wait(1.0, math.inf)
        blocked = erlang_c(slots, state.resident * servers)
        if blocked < 1e-9:
            return prompts, NO_WAIT
        return prompts, Wait(blocked, life / (slots - state.resident * servers))

    def _unloaded(self, targets: Targets) -> Latency:
        outside = self.steps.request_s(busy=False)
        services = [(weight, outside + cost.latency) for weight, cost in self.prompt_costs(0.0)]
        shortest = min(self._workload.prompts, key=lambda node: node.tokens).tokens
        tpot = self.steps.decode(1.0, shortest).total_s
        e2e = [
            (weight * part, service + (tokens - 1) * tpot)
            for weight, service in services
            for part, tokens in self._output_pairs
        ]
        fast = sum(weight for weight, service in services if service <= targets.ttft_s)
        return Latency(
            ttft_mean=sum(weight * service for weight, service in services),
            ttft_p50=quantile_of_sum(0.5, services, ()),
            ttft_p99=quantile_of_sum(0.99, services, ()),
            tpot_mean=tpot,
            tpot_p99=tpot,
            e2e_p50=quantile_of_sum(0.5, e2e, ()),
            e2e_p99=quantile_of_sum(0.99, e2e, ()),
            goodput_fraction=fast * (tpot <= targets.tpot_s),
            kv_wait=0.0,
        )


def _moments(costs: Sequence[tuple[float, PromptCost]]) -> tuple[float, float]:
    """E[S] and E[S²] of the prompts' occupancy."""
    mean = sum(weight * cost.occupancy for weight, cost in costs)
    return mean, sum(weight * cost.occupancy**2 for weight, cost in costs)


def _below(limit: float, mean: float, sigma: float) -> float:
    """P(X ≤ limit) of a normal X."""
    if sigma <= 0:
        return float(mean <= limit)
    return 0.5 * math.erfc((mean - limit) / (sigma * math.sqrt(2)))
