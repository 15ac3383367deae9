"""What the client saw of one request. Frozen; every metric is derived from the stamps.

All stamps are the injected clock's seconds, as received by this client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import cast

from dynamictp.bench.schedule import Request


class FailureKind(StrEnum):
    REFUSED = "refused"  # an HTTP status of 400 or more
    CONNECTION = "connection"  # no connection, or lost
    TIMEOUT = "timeout"
    STREAM = "stream"  # an error event after the stream began
    TRUNCATED = "truncated"  # ended without a finish reason
    PROTOCOL = "protocol"  # not the API's format, or counts that contradict each other
    CUT = "cut"  # the run ended first: no verdict on the server


@dataclass(frozen=True, slots=True)
class Failure:
    kind: FailureKind
    message: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One request's stamps and output.

    `chunk_s[i]` is when the i-th chunk that carried tokens arrived, `chunk_tokens[i]` how many
    it carried. Failed requests keep whatever had arrived.
    """

    request: Request
    intended_s: float
    sent_s: float
    end_s: float
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    request_id: str | None = None
    domain: str | None = None
    tp: int | None = None
    report: Mapping[str, object] | None = None

    @property
    def cut(self) -> bool:
        """Whether the run ended before the request did. Such requests are counted and otherwise left out."""
        return self.failure is not None and self.failure.kind is FailureKind.CUT

    @property
    def dispatch_delay_s(self) -> float:
        """How late this client was."""
        return self.sent_s - self.intended_s

    @property
    def output_tokens(self) -> int:
        """The server's usage, else what the chunks carried."""
        return sum(self.chunk_tokens) if self.completion_tokens is None else self.completion_tokens

    @property
    def first_token_s(self) -> float | None:
        return self.chunk_s[0] if self.chunk_s else None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from when the request was *due*: waits in the client count too."""
        return self.chunk_s[0] - self.intended_s if self.chunk_s else None

    @property
    def ttft_from_sent_s(self) -> float | None:
        """Time to first token from when the client began to connect."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def e2e_s(self) -> float | None:
        """From due to last token."""
        return self.chunk_s[-1] - self.intended_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, (E2E - TTFT)/(n - 1); None below two tokens."""
        if self.output_tokens < 2 or not self.chunk_s:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_tokens - 1)

    @property
    def chunk_gaps_s(self) -> tuple[float, ...]:
        """Time between chunks: what a reader sees stand still."""
        return tuple(b - a for a, b in pairwise(self.chunk_s))

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies: a chunk of k tokens after a gap Δ counts as k gaps of Δ/k."""
        return tuple(
            gap / tokens
            for gap, tokens in zip(self.chunk_gaps_s, self.chunk_tokens[1:], strict=True)
            for _ in range(tokens)
        )

    @property
    def longest_gap_s(self) -> float | None:
        return max(self.chunk_gaps_s, default=None)

    def count_of(self, name: str) -> int:
        """Sum of a counter (`handovers`, `recomputes`) over the choices of the server's report."""
        choices = (self.report or {}).get("choices")
        if not isinstance(choices, list):
            return 0
        values = (cast("Mapping[str, object]", choice).get(name, 0) for choice in choices)
        return sum(value for value in values if isinstance(value, int))
