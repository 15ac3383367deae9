"""A workload and its seed to planned requests: times, lengths, tenants, who shares what. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from dynamictp.bench.workload import arrivals
from dynamictp.bench.workload.arrivals import RateCurve
from dynamictp.bench.workload.classes import (
    LONG_OUTPUT_TOKENS,
    LONG_PROMPT_TOKENS,
    PEAK_SHARE,
    Tenant,
    TrafficClass,
    Workload,
)
from dynamictp.bench.workload.spec import ClosedArrivals, OpenArrivals, ReplayArrivals, parse_arrivals
from dynamictp.bench.workload.traces import HASH_BLOCK_TOKENS, TraceRow, load_trace
from dynamictp.errors import ConfigError

MAX_REQUESTS = 1_000_000
MAX_TURNS = 32
WINDOW_S = 3600.0
"""Longer workloads can be planned a window at a time."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of text that every request naming the same key shares."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request before it has text. Due at `intended_s`, or `think_s` after `follows` has ended.

    `prompt_tokens` is the whole prompt: system text, earlier turns, template and all. `system` opens a
    conversation, `blocks` open the user's message.
    """

    name: str
    intended_s: float
    traffic_class: str
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0
    system: Block | None = None
    blocks: tuple[Block, ...] = ()
    follows: str = ""
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Planned requests in order of time, conversations' later turns after their first.

    `shortened` counts those cut to the workload's `longest_tokens`; `users` is set for closed loops.
    """

    requests: tuple[PlannedRequest, ...]
    shortened: int = 0
    users: int = 0
    think_s: float = 0.0

    @property
    def digest(self) -> str:
        """SHA-256 of the plan; equal plans ask the same of every server."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


@dataclass(frozen=True, slots=True)
class _Turn:
    """Prompt and output tokens of one turn, the prompt without what came before it."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class _Opening:
    """A conversation's first request before tenants and prefixes are drawn."""

    t_s: float
    traffic_class: str
    turns: tuple[_Turn, ...]
    blocks: tuple[Block, ...] = ()


def make_plan(workload: Workload) -> Plan:
    """Same workload and seed, same plan. Raises ConfigError for arrivals that make no sense."""
    parsed = parse_arrivals(workload.arrivals, workload.duration_s)
    # Independent streams: another mix leaves the times as they are, and the other way round.
    time_rng, class_rng, owner_rng = (np.random.default_rng((workload.seed, i)) for i in range(3))
    if isinstance(parsed, ReplayArrivals):
        openings = _replayed(parsed, workload, time_rng)
    elif isinstance(parsed, ClosedArrivals):
        even = arrivals.constant_rate(1.0, 1.0)
        openings = _drawn(workload, (0.0,) * parsed.requests, even, 1.0, class_rng)
    else:
        curve = parsed.curve
        openings = _drawn(workload, _times(parsed, time_rng), curve, curve.peak_per_s, class_rng)
    if not openings:
        raise ConfigError(f"{workload.arrivals} over {workload.duration_s:g} s brings no request")
    plan = _planned(openings, workload, owner_rng)
    if isinstance(parsed, ClosedArrivals):
        return replace(plan, users=parsed.users, think_s=parsed.think_s)
    return plan


def plan_windows(workload: Workload, window_s: float = WINDOW_S) -> Iterator[Plan]:
    """The workload's open-loop plan in windows, each drawn when it is asked for: memory for one of them,
    however long the workload is. Times are after the workload's start.

    A workload of one window is `make_plan`'s. A longer one has the same rates, classes and lengths, with
    random streams of their own for each window. Raises ConfigError for closed loops.
    """
    parsed = parse_arrivals(workload.arrivals, workload.duration_s)
    if isinstance(parsed, ClosedArrivals):
        raise ConfigError(f"{workload.arrivals}: a closed loop has no times to plan")
    if isinstance(parsed, ReplayArrivals) or workload.duration_s <= window_s:
        yield make_plan(workload)
        return
    first = 0
    for number in range(int(np.ceil(workload.duration_s / window_s))):
        start_s = number * window_s
        part = parsed.curve.part(start_s, min(start_s + window_s, workload.duration_s))
        if part is None:
            continue
        time_rng, class_rng, owner_rng = (
            np.random.default_rng((workload.seed, i, number + 1)) for i in range(3)
        )
        times = _times(replace(parsed, curve=part), time_rng)
        openings = _drawn(workload, times, part, parsed.curve.peak_per_s, class_rng)
        shifted = [replace(opening, t_s=opening.t_s + start_s) for opening in openings]
        yield _planned(shifted, workload, owner_rng, first)
        first += len(openings)


def _planned(
    openings: Sequence[_Opening], workload: Workload, rng: np.random.Generator, first: int = 0
) -> Plan:
    """Conversations with their owners; `first` is the number of the first."""
    draws = rng.random((len(openings), 3)).tolist()
    planned = [
        request
        for i, (opening, draw) in enumerate(zip(openings, draws, strict=True), first)
        for request in _conversation(i, opening, workload, draw)
    ]
    fitted = _fit(planned, workload.longest_tokens)
    return Plan(fitted, sum(a is not b for a, b in zip(planned, fitted, strict=True)))


def _times(parsed: OpenArrivals, rng: np.random.Generator) -> tuple[float, ...]:
    if parsed.curve.expected > MAX_REQUESTS:
        raise ConfigError(f"about {parsed.curve.expected:.0f} requests; at most {MAX_REQUESTS} make a plan")
    return arrivals.draw(parsed.curve, parsed.cv, rng)


def _drawn(
    workload: Workload,
    times: Sequence[float],
    curve: RateCurve,
    peak_per_s: float,
    rng: np.random.Generator,
) -> list[_Opening]:
    """A class and its lengths for each time; every class is sampled for all, so that weights don't
    change the lengths of the others. Classes of the peak come near `peak_per_s`.
    """
    count, threshold = len(times), PEAK_SHARE * peak_per_s
    usual = [item for item in workload.classes if item.when == "always"]
    picks = rng.random(count)
    turn_counts = np.minimum(rng.geometric(1 / workload.turns.mean, count), MAX_TURNS)
    total = int(turn_counts.sum())
    lengths = {
        item.name: (
            item.prompt.sample(rng, total, workload.scale),
            item.output.sample(rng, total, workload.scale),
        )
        for item in workload.classes
    }
    plain = {name: (prompts.tolist(), outputs.tolist()) for name, (prompts, outputs) in lengths.items()}
    near_peak = (curve.rates_at(times) >= threshold).tolist()
    always, at_peak = _picked(usual, picks), _picked(workload.classes, picks)
    openings = []
    first = 0
    for i, (t_s, turns) in enumerate(zip(times, turn_counts.tolist(), strict=True)):
        name = at_peak[i] if near_peak[i] else always[i]
        prompts, outputs = plain[name]
        both = range(first, first + turns)
        openings.append(_Opening(t_s, name, tuple([_Turn(prompts[k], outputs[k]) for k in both])))
        first += turns
    return openings


def _picked(items: Sequence[TrafficClass], picks: npt.NDArray[np.float64]) -> list[str]:
    """Names by weight; `picks` are uniform in [0, 1)."""
    bounds = np.cumsum([item.weight for item in items])
    found = np.minimum(np.searchsorted(bounds, picks * bounds[-1], side="right"), len(items) - 1)
    return [items[i].name for i in found.tolist()]


def _replayed(parsed: ReplayArrivals, workload: Workload, rng: np.random.Generator) -> list[_Opening]:
    rows = load_trace(parsed.trace)
    kept = rng.random(len(rows)) < parsed.keep
    times = [(row.t_s - parsed.start_s) / parsed.speed for row in rows]
    return [
        _opening_of(row, t_s, workload.scale)
        for row, t_s, keep in zip(rows, times, kept, strict=True)
        if keep and 0 <= t_s < workload.duration_s
    ]


def _opening_of(row: TraceRow, t_s: float, scale: float) -> _Opening:
    prompt = max(round(row.input_tokens * scale), 1)
    output = max(round(row.output_tokens * scale), 1)
    by_length = {
        (False, False): "qa", (False, True): "chat", (True, False): "rag", (True, True): "code",
    }  # fmt: skip
    long = (row.input_tokens > LONG_PROMPT_TOKENS, row.output_tokens > LONG_OUTPUT_TOKENS)
    block_tokens = max(round(HASH_BLOCK_TOKENS * scale), 1)
    blocks = tuple(Block(f"hash-{i}", block_tokens) for i in row.hash_ids)
    return _Opening(t_s, by_length[long], (_Turn(prompt, output),), blocks)


def _conversation(
    index: int, opening: _Opening, workload: Workload, draw: Sequence[float]
) -> Iterable[PlannedRequest]:
    """The turns of one conversation, of one tenant, under one system text; `draw` decides which."""
    owner, shared, group = draw
    tenant = _owner(workload.tenants, owner)
    prefixes, system = workload.prefixes, None
    if prefixes is not None and shared < prefixes.share:
        system = Block(
            f"system-{int(group * prefixes.groups)}", max(round(prefixes.tokens * workload.scale), 1)
        )
    context = system.tokens if system else 0
    name = f"{opening.traffic_class}-{index}"
    for number, turn in enumerate(opening.turns):
        context += turn.prompt
        if number and 0 < workload.longest_tokens < context + turn.output:
            return  # what was said so far leaves no room
        yield PlannedRequest(
            name=f"{name}.{number}" if number else name,
            intended_s=round(opening.t_s, 6),
            traffic_class=opening.traffic_class,
            prompt_tokens=context,
            output_tokens=turn.output,
            tenant=tenant.name if tenant else "",
            priority=tenant.priority if tenant else 0,
            system=system,
            blocks=opening.blocks,
            follows="" if number == 0 else name if number == 1 else f"{name}.{number - 1}",
            think_s=workload.turns.think_s if number else 0.0,
        )
        context += turn.output


def _owner(tenants: Sequence[Tenant], pick: float) -> Tenant | None:
    if not tenants:
        return None
    bounds = np.cumsum([tenant.share for tenant in tenants])
    return tenants[min(int(np.searchsorted(bounds, pick * bounds[-1], side="right")), len(tenants) - 1)]


def _fit(planned: Sequence[PlannedRequest], longest: int) -> tuple[PlannedRequest, ...]:
    """Requests over `longest` tokens keep their output up to half of it; the prompt gives way."""
    return tuple(
        request
        if not longest or request.prompt_tokens + request.output_tokens <= longest
        else _shortened(request, longest)
        for request in planned
    )


def _shortened(request: PlannedRequest, longest: int) -> PlannedRequest:
    output = max(min(request.output_tokens, longest // 2), 1)
    return replace(request, prompt_tokens=longest - output, output_tokens=output)
