"""Which requests are taken: the production policy, with the speeds that the simulated pool has."""

from __future__ import annotations

from collections import Counter

from dynamictp.control.admission import Ask, Bounds, Capacity, Queue, Refusal, Share, admit
from dynamictp.sim.node import Node
from dynamictp.sim.requests import SimRequest

_BOUNDS = Bounds(requests=10_000, tokens=16_000_000)
"""The server's defaults."""
_WEIGHT = 0.05
_FIRST_TPOT_S, _FIRST_OUTPUT = 0.05, 64.0


class Gate:
    """Owner of what admission learns of streams: their speed and length. `wait_s` 0: everyone is taken."""

    def __init__(self, node: Node, wait_s: float) -> None:
        self._node, self._wait_s = node, wait_s
        self._tpot_s, self._output = _FIRST_TPOT_S, _FIRST_OUTPUT

    def finished(self, request: SimRequest) -> None:
        self._output += _WEIGHT * (request.output - self._output)
        if request.output > 1:
            self._tpot_s += _WEIGHT * (request.tpot_s - self._tpot_s)

    def refusal(self, request: SimRequest) -> Refusal | None:
        """None to take it. Who finds an empty queue always is."""
        if not self._wait_s or not self._node.waiting:
            return None
        ask = Ask(request.tenant, request.priority, 1, request.prompt, request.prompt, self._wait_s)
        return admit(ask, self._queue(request), self._capacity(), _BOUNDS)

    def _queue(self, request: SimRequest) -> Queue:
        requests: Counter[tuple[str, int]] = Counter()
        tokens: Counter[tuple[str, int]] = Counter()
        for waiting in self._node.waiting:
            key = waiting.tenant, waiting.priority
            requests[key] += 1
            tokens[key] += waiting.to_prefill
        shares = tuple(
            Share(tenant, priority, count, tokens[tenant, priority], count, tokens[tenant, priority])
            for (tenant, priority), count in requests.items()
        )
        own = [share for share in shares if share.tenant == request.tenant]
        return Queue(
            len(self._node.waiting),
            sum(tokens.values()),
            sum(share.requests for share in own),
            sum(share.tokens for share in own),
            0,
            0,
            shares,
        )

    def _capacity(self) -> Capacity:
        rate, rows, decoding = self._node.speed()
        return Capacity(rate, rows, decoding, self._output, self._tpot_s)
