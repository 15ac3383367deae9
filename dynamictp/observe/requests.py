"""Figures of requests: latencies, lengths, ends, by class of prompt length and by tenant.

Fed once at a request's first token and once at its end, never per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from dynamictp.observe.families import (
    DEGREES,
    E2E_S,
    TOKENS,
    TPOT_S,
    TTFT_S,
    Histogram,
    counter,
    counters,
    histogram,
    histograms,
)

MAX_TENANTS = 32
OTHER = "other"
"""Label of the tenants beyond the first `MAX_TENANTS`: the number of series stays bounded."""
NO_TENANT = "default"
CLASSES = ("short", "long")
LONG_PROMPT_TOKENS = 512
"""From here on a prompt is of the class `long`: it takes steps of its own."""

FAILURES = ("error", "unavailable", "deadline", "slow_client", "too_large", "cancelled")
_BY_STATUS = {503: "unavailable", 504: "deadline", 408: "slow_client", 400: "too_large"}


def class_of(prompt_tokens: int) -> str:
    """Class of a prompt of that length."""
    return "long" if prompt_tokens >= LONG_PROMPT_TOKENS else "short"


def failure_of(status: int) -> str:
    """Why a request with that HTTP status failed, as a label."""
    return _BY_STATUS.get(status, "error")


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended well. Times are seconds of one clock; `tp` is the degree it was last served at,
    0 for none.
    """

    reason: str
    arrival_s: float
    first_token_s: float
    last_token_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    tp: int = 0
    cached_tokens: int = 0
    handovers: int = 0
    recomputes: int = 0
    tenant: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class _Tenant:
    requests: int = 0
    tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_S))


class RequestMetrics:
    """Owner of the figures of requests."""

    def __init__(self) -> None:
        self.ttft = {name: Histogram(TTFT_S) for name in CLASSES}
        self.tpot = {name: Histogram(TPOT_S) for name in CLASSES}
        self._e2e = Histogram(E2E_S)
        self._queue = Histogram(TTFT_S)
        self._degree = Histogram(DEGREES)
        self._prompt_tokens = Histogram(TOKENS)
        self._output_tokens = Histogram(TOKENS)
        self._success: Counter[str] = Counter({"stop": 0, "length": 0})
        self._failures: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
        self._moves: Counter[str] = Counter({"handover": 0, "recompute": 0})
        self._tenants: dict[str, _Tenant] = {}
        self.arrivals = 0
        self._prompts = 0
        self._cached = 0

    # ------------------------------------------------------------ what happens

    def on_arrival(self) -> None:
        """A request was taken."""
        self.arrivals += 1

    def on_queued(self, seconds: float) -> None:
        """A request got its first token after waiting so long for a domain."""
        self._queue.observe(seconds)

    def on_first_token(self, prompt_tokens: int, seconds: float, tenant: str = "") -> None:
        """A request got its first token, `seconds` after its arrival."""
        self._prompts += prompt_tokens
        self.ttft[class_of(prompt_tokens)].observe(seconds)
        self._tenant(tenant).ttft.observe(seconds)

    def on_finish(self, request: Finished) -> None:
        """A request finished with reason stop or length."""
        self._success[request.reason] += 1
        self._e2e.observe(request.end_s - request.arrival_s)
        if request.tpot_s is not None:
            self.tpot[class_of(request.prompt_tokens)].observe(request.tpot_s)
        if request.tp:
            self._degree.observe(request.tp)
        self._prompt_tokens.observe(request.prompt_tokens)
        self._output_tokens.observe(request.output_tokens)
        self._cached += request.cached_tokens
        self._moves["handover"] += request.handovers
        self._moves["recompute"] += request.recomputes
        tenant = self._tenant(request.tenant)
        tenant.requests += 1
        tenant.tokens += request.output_tokens

    def on_failure(self, reason: str) -> None:
        """A request ended without its whole answer, for one of `FAILURES`."""
        self._failures[reason] += 1

    def _tenant(self, name: str) -> _Tenant:
        label = name or NO_TENANT
        found = self._tenants.get(label)
        if found is None:
            if len(self._tenants) >= MAX_TENANTS:
                label = OTHER
            found = self._tenants.setdefault(label, _Tenant())
        return found

    # ------------------------------------------------------------ scrape

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_ends()
        yield from self._collect_latencies()
        yield from self._collect_lengths()
        yield from self._collect_tenants()

    def _collect_ends(self) -> Iterator[Metric]:
        yield counter(
            "dtp_requests", "Requests taken, one per choice. How much traffic is there?", self.arrivals
        )
        yield counters(
            "dtp_request_success",
            "Requests finished, by reason. Do users get whole answers?",
            ["finish_reason"],
            (((reason,), count) for reason, count in self._success.items()),
        )
        yield counters(
            "dtp_request_failures",
            "Requests that were taken and ended without a whole answer; cancelled: the client went. "
            "Do users see errors, and whose fault are they?",
            ["reason"],
            (((reason,), count) for reason, count in self._failures.items()),
        )
        yield counters(
            "dtp_request_moves",
            "How often finished requests moved between domains, with their pages or computed again. "
            "What do switches and crashes cost requests?",
            ["kind"],
            (((kind,), count) for kind, count in self._moves.items()),
        )

    def _collect_latencies(self) -> Iterator[Metric]:
        yield histogram(
            "dtp_request_tp_degree",
            "Degree a request was served at, at its end. At which degree do users get their answers, "
            "whatever the layout says now?",
            self._degree,
        )
        yield histogram(
            "dtp_request_queue_time_seconds",
            "Arrival to the domain that took the request. How much of TTFT is waiting for room?",
            self._queue,
        )
        yield histogram(
            "dtp_e2e_request_latency_seconds",
            "Arrival to last token. How long does a whole answer take?",
            self._e2e,
        )
        yield histograms(
            "dtp_class_time_to_first_token_seconds",
            f"Arrival to first token; long: prompts from {LONG_PROMPT_TOKENS} tokens. Who waits, short "
            "prompts or long ones?",
            "class",
            self.ttft,
        )
        yield histograms(
            "dtp_time_per_output_token_seconds",
            "Mean time per token after the first of each request that finished. How fast does a stream flow?",
            "class",
            self.tpot,
        )

    def _collect_lengths(self) -> Iterator[Metric]:
        yield histogram(
            "dtp_request_prompt_tokens", "Prompt lengths of finished requests. What is asked?",
            self._prompt_tokens,
        )  # fmt: skip
        yield histogram(
            "dtp_request_generation_tokens", "Output lengths of finished requests. What is answered?",
            self._output_tokens,
        )  # fmt: skip
        yield counter(
            "dtp_prompt_tokens",
            "Prompt tokens of requests that got their first token. How much prompt work comes in?",
            self._prompts,
        )
        yield counter(
            "dtp_prompt_tokens_cached",
            "Prompt tokens of finished requests that were found in the prefix cache. What did sharing save?",
            self._cached,
        )

    def _collect_tenants(self) -> Iterator[Metric]:
        tenants = self._tenants
        text = f"at most {MAX_TENANTS} tenants, the rest are '{OTHER}'."
        yield counters(
            "dtp_tenant_requests",
            f"Requests finished; {text} Who uses the server?",
            ["tenant"],
            (((name,), tenant.requests) for name, tenant in tenants.items()),
        )
        yield counters(
            "dtp_tenant_generation_tokens",
            f"Output tokens of finished requests; {text} Who gets its tokens?",
            ["tenant"],
            (((name,), tenant.tokens) for name, tenant in tenants.items()),
        )
        yield histograms(
            "dtp_tenant_time_to_first_token_seconds",
            f"Arrival to first token; {text} Does one tenant wait for another?",
            "tenant",
            {name: tenant.ttft for name, tenant in tenants.items()},
        )
