"""Several models on one node: how to divide its devices, 6 + 2 included. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dynamictp.advisor.graph import Ring
from dynamictp.advisor.machine import Machine
from dynamictp.advisor.search import Candidate, Question, make_plan
from dynamictp.errors import ConfigError


class ModelPart(msgspec.Struct, frozen=True):
    """One model's part of the node."""

    model: str
    candidate: Candidate
    placement: tuple[tuple[int, ...], ...]
    """Devices of each replica."""
    slo_capacity: float
    """Requests per second inside the targets."""
    demand: float
    """Requests per second asked, or what the model would carry alone on the node."""


class Division(msgspec.Struct, frozen=True):
    """A division of the node. `headroom` is the smallest capacity ÷ demand over the models."""

    parts: tuple[ModelPart, ...]
    headroom: float
    idle: int

    @property
    def layout(self) -> str:
        """As the server's configuration names it: `a:tp6+b:tp2`."""
        terms = []
        for part in self.parts:
            count = part.candidate.replicas
            terms.append((f"{count}*" if count > 1 else "") + f"{part.model}:tp{part.candidate.tp}")
        return "+".join(terms)


class Sharing(msgspec.Struct, frozen=True):
    """The best division, and the best when only powers of two are allowed."""

    best: Division | None
    powers_of_two: Division | None


def share_node(questions: Sequence[Question]) -> Sharing:
    """Divide the node of the first question among the models of all: the division whose worst-off model has
    the most capacity for its demand; ties to fewer devices. Raises `ConfigError` for more than one node.
    """
    machine = questions[0].machine
    if machine.nodes.nodes > 1:
        raise ConfigError("several models are planned for one node at a time; drop --nodes")
    names = [question.shape.name for question in questions]
    if len(set(names)) < len(names):
        raise ConfigError(f"each model once, got {', '.join(names)}")
    options, demands = [], []
    for question in questions:
        plan = make_plan(msgspec.structs.replace(question, machine=machine, max_stages=1))
        running = [c for c in plan.candidates if c.performance is not None and c.performance.slo_capacity > 0]
        options.append(running)
        demands.append(question.rate or max((_capacity(c) for c in running), default=0.0))
    narrow = [[c for c in choice if c.tp & (c.tp - 1) == 0] for choice in options]
    return Sharing(
        best=_best(machine, names, options, demands), powers_of_two=_best(machine, names, narrow, demands)
    )


def _capacity(candidate: Candidate) -> float:
    return candidate.performance.slo_capacity if candidate.performance is not None else 0.0


def _best(
    machine: Machine, names: Sequence[str], options: Sequence[Sequence[Candidate]], demands: Sequence[float]
) -> Division | None:
    if not all(options):
        return None
    by_size = [_by_size(choice, machine.devices) for choice in options]
    ranked = []
    for sizes in _splits(machine.devices, len(options)):
        chosen = [sized.get(size) for sized, size in zip(by_size, sizes, strict=True)]
        picked = [candidate for candidate in chosen if candidate is not None]
        if len(picked) < len(chosen):
            continue
        headroom = min(_capacity(c) / demand for c, demand in zip(picked, demands, strict=True))
        ranked.append((headroom, -sum(c.devices for c in picked), picked))
    if not ranked:
        return None
    headroom, used, picked = max(ranked, key=lambda entry: entry[:2])
    placed = _place(machine, picked)
    parts = [
        ModelPart(name, candidate, groups, _capacity(candidate), demand)
        for name, candidate, groups, demand in zip(names, picked, placed, demands, strict=True)
    ]
    return Division(tuple(parts), headroom, machine.devices + used)


def _by_size(choice: Sequence[Candidate], devices: int) -> dict[int, Candidate]:
    """The most capable candidate of at most that many devices."""
    best: dict[int, Candidate] = {}
    for size in range(1, devices + 1):
        fitting = [candidate for candidate in choice if candidate.devices <= size]
        if fitting:
            best[size] = max(fitting, key=lambda c: (_capacity(c), -c.devices, -c.tp))
    return best


def _splits(devices: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (devices,)
        return
    for first in range(1, devices - parts + 2):
        for rest in _splits(devices - first, parts - 1):
            yield (first, *rest)


def _place(machine: Machine, picked: Sequence[Candidate]) -> list[tuple[tuple[int, ...], ...]]:
    """Groups of each model, the widest placed first."""
    free = frozenset(range(machine.per_node))
    placed: list[list[tuple[int, ...]]] = [[] for _ in picked]
    wanted = sorted(
        ((c.tp, index) for index, c in enumerate(picked) for _ in range(c.replicas)), reverse=True
    )
    for tp, index in wanted:
        ring: Ring | None = machine.graph.choose(tp, free)
        assert ring is not None
        placed[index].append(ring.order)
        free -= set(ring.order)
    return [tuple(groups) for groups in placed]
