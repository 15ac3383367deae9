"""Length distributions of prompts and outputs, and their moments. Pure. Tokens.

Means alone mislead: a request is seen running in proportion to its length, and the tail decides P99. A
log-normal is described as in B1 by its mean and its P95, and evaluated as a few
bins with exact conditional means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import msgspec

_NORMAL = NormalDist()
_EDGES = (0.0, 0.1, 0.25, 0.4, 0.6, 0.75, 0.87, 0.94, 0.97, 0.985, 0.995, 1.0)
Z95 = _NORMAL.inv_cdf(0.95)
MAX_P95_OVER_MEAN = math.exp(Z95**2 / 2)
Z99 = _NORMAL.inv_cdf(0.99)


class Node(msgspec.Struct, frozen=True):
    """A bin of a distribution: its probability and its mean."""

    weight: float
    tokens: float


class Lengths(msgspec.Struct, frozen=True):
    """Log-normal with the given mean and P95, at least 1, cut at `limit`. Constant when both are equal."""

    typical: float
    """Mean before the cut."""
    p95: float
    limit: float = math.inf

    def __post_init__(self) -> None:
        if not 1 <= self.typical <= self.p95 < self.typical * MAX_P95_OVER_MEAN:
            raise ValueError(
                f"no log-normal has mean {self.typical:g} and P95 {self.p95:g}: the mean is at least 1, P95 "
                f"between it and {MAX_P95_OVER_MEAN:.2f} times as much"
            )

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: ln P95 − ln mean = z·σ − σ²/2, the smaller root."""
        return Z95 - math.sqrt(max(0.0, Z95**2 - 2 * math.log(self.p95 / self.typical)))

    @property
    def median(self) -> float:
        return self.typical * math.exp(-(self.sigma**2) / 2)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return _nodes(self.typical, self.sigma, self.limit)

    @property
    def mean(self) -> float:
        return sum(node.weight * node.tokens for node in self.nodes)

    def scaled(self, factor: float) -> Lengths:
        """All lengths times `factor` (B1's scale for small machines), never below one token."""
        return Lengths(max(1.0, self.typical * factor), max(1.0, self.p95 * factor), self.limit)

    def within(self, limit: float) -> Lengths:
        """The same lengths, none above `limit`."""
        if self.typical >= limit:
            return Lengths(limit, limit, limit)
        return Lengths(self.typical, self.p95, min(self.limit, limit))

    def quantile(self, q: float) -> float:
        return min(max(1.0, self.median * math.exp(self.sigma * _NORMAL.inv_cdf(q))), self.limit)


@cache
def _nodes(mean: float, sigma: float, limit: float) -> tuple[Node, ...]:
    if sigma == 0:
        return (Node(1.0, min(mean, limit)),)
    cuts = [_NORMAL.inv_cdf(q) if 0 < q < 1 else math.copysign(math.inf, q - 0.5) for q in _EDGES]
    nodes = []
    for low, high in pairwise(cuts):
        weight = _cdf(high) - _cdf(low)
        # E[X; a < Z < b] = mean · (Φ(b − σ) − Φ(a − σ)), the log-normal's partial expectation.
        inside = mean * (_cdf(high - sigma) - _cdf(low - sigma)) / weight
        nodes.append(Node(weight, min(max(inside, 1.0), limit)))
    return tuple(nodes)


def _cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


class RequestClass(msgspec.Struct, frozen=True):
    """A kind of request and its part of the arrivals."""

    name: str
    prompt: Lengths
    output: Lengths
    weight: float = 1.0


class Workload(msgspec.Struct, frozen=True):
    """Classes of requests; weights need not sum to one. In a class, lengths are independent."""

    name: str
    classes: tuple[RequestClass, ...]

    def capped(self, context: int) -> Workload:
        """Lengths cut so that prompt and output stay inside the model's context."""
        out = []
        for kind in self.classes:
            limit = min(kind.output.limit, context / 2)
            output = kind.output.within(limit)
            room = context - output.quantile(0.95)
            prompt = kind.prompt.within(room)
            out.append(msgspec.structs.replace(kind, prompt=prompt, output=output))
        return msgspec.structs.replace(self, classes=tuple(out))

    def shares(self) -> Iterator[tuple[float, RequestClass]]:
        total = sum(kind.weight for kind in self.classes)
        for kind in self.classes:
            yield kind.weight / total, kind

    @property
    def prompts(self) -> tuple[Node, ...]:
        return tuple(Node(w * n.weight, n.tokens) for w, kind in self.shares() for n in kind.prompt.nodes)

    @property
    def outputs(self) -> tuple[Node, ...]:
        return tuple(Node(w * n.weight, n.tokens) for w, kind in self.shares() for n in kind.output.nodes)

    @property
    def mean_prompt(self) -> float:
        return sum(share * kind.prompt.mean for share, kind in self.shares())

    @property
    def mean_output(self) -> float:
        return sum(share * kind.output.mean for share, kind in self.shares())

    @property
    def running_context(self) -> float:
        """Mean context of a running request at a random moment: long outputs run longer and so are seen more
        often, E[n·(p + n/2)] / E[n].
        """
        weighted = 0.0
        for part, kind in self.shares():
            outputs = kind.output.nodes
            second = sum(node.weight * node.tokens**2 for node in outputs)
            weighted += part * (kind.output.mean * kind.prompt.mean + second / 2)
        return weighted / self.mean_output

    @property
    def running_context_variance(self) -> float:
        """Variance of that context, E[n·(p² + p·n + n²/3)] / E[n] − mean²."""
        weighted = 0.0
        for part, kind in self.shares():
            p1, p2, _ = _moments(kind.prompt.nodes)
            n1, n2, n3 = _moments(kind.output.nodes)
            weighted += part * (n1 * p2 + p1 * n2 + n3 / 3)
        return max(0.0, weighted / self.mean_output - self.running_context**2)

    @property
    def longest(self) -> float:
        """P99 of prompt plus P99 of output of the longest class: what one request may need."""
        return max(kind.prompt.quantile(0.99) + kind.output.quantile(0.99) for kind in self.classes)


def _moments(nodes: Sequence[Node]) -> tuple[float, float, float]:
    first, second, third = (sum(node.weight * node.tokens**power for node in nodes) for power in (1, 2, 3))
    return first, second, third
