"""How far the load client can be trusted: its stamps against a server that says when each token left."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dynamictp.bench.client import Client, run_lowered
from dynamictp.bench.measure import Estimate, estimate
from dynamictp.bench.player import run_schedule
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.server import ServerProcess, interrupts_deferred
from dynamictp.clock import SystemClock
from dynamictp.errors import FatalError

STREAMS, STREAM_TOKENS, STREAM_GAP_MS = 32, 200, 25.0
RATE_PER_S, RATE_SECONDS = 500.0, 6.0
STALL_S, STALL_RATE_PER_S, STALL_LOAD_S = 1.0, 100.0, 3.0

MEDIAN_LIMIT_S, P99_LIMIT_S = 0.002, 0.010
DISPATCH_LIMIT_S, DELIVERED_LIMIT = 0.010, 0.99


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Stamps' errors (arrival at the client minus departure), in seconds, and the client's processor share.

    `ttft_error` is of first tokens, `gap_error` of the absolute difference of token gaps.
    """

    requests: int
    ttft_error: Estimate
    token_error: Estimate
    gap_error: Estimate | None
    dispatch: Estimate
    delivered: float
    cpu_share: float


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """Long streams at once, many short requests a second, and a server that stands still for a second.

    `stalled` requests were due while the server stood still; had they been omitted, or measured from
    when they could be sent, `stall_ttft_mean_s` would not be the `stall_expected_s` of an open loop.
    """

    streams: Accuracy
    rate: Accuracy
    rate_per_s: float
    stalled: int
    stall_ttft_mean_s: float
    stall_expected_s: float

    @property
    def held(self) -> bool:
        """Median error of stamps up to 2 ms and P99 up to 10 ms; the rate sustained; nothing omitted."""
        stamps = all(
            seen.token_error.p50.value <= MEDIAN_LIMIT_S
            and seen.token_error.p99 is not None
            and seen.token_error.p99.value <= P99_LIMIT_S
            for seen in (self.streams, self.rate)
        )
        sustained = (
            self.rate.delivered >= DELIVERED_LIMIT and self.rate.dispatch.p50.value <= DISPATCH_LIMIT_S
        )
        return stamps and sustained and abs(self.stall_ttft_mean_s - self.stall_expected_s) < 0.05


def measure_client() -> ClientFigures:
    """Takes about 15 seconds. Raises FatalError when a request fails."""
    server: ServerProcess | None = None
    try:
        with interrupts_deferred():
            server = ServerProcess([sys.executable, "-m", "dynamictp.bench.paced"])
        url = server.wait_ready(30.0)
        _play(url, _even(50.0, 0.5, tokens=2, gap_ms=1.0))  # first use of everything
        streams = _play(url, _streams())
        rate = _play(url, _even(RATE_PER_S, RATE_SECONDS, tokens=2, gap_ms=5.0))
        stall, _ = _play(url, _stalling())
        mean_s, count = _during_stall(stall)
        return ClientFigures(
            streams=accuracy(*streams),
            rate=accuracy(*rate),
            rate_per_s=RATE_PER_S,
            stalled=count,
            stall_ttft_mean_s=mean_s,
            stall_expected_s=STALL_S / 2,
        )
    finally:
        if server is not None:
            server.stop()


def accuracy(results: Sequence[Result], cpu_share: float) -> Accuracy:
    """The errors of a play against the paced server. Raises FatalError when a request failed."""
    first: list[float] = []
    tokens: list[float] = []
    gaps: list[float] = []
    for result in results:
        if result.failure is not None:
            raise FatalError(f"a request to the paced server failed: {result.failure}")
        left_s = [float(stamp) for stamp in result.text.split()]
        errors = [at_s - stamp for at_s, stamp in zip(result.chunk_s, left_s, strict=True)]
        first.append(errors[0])
        tokens += errors
        gaps += [abs(b - a) for a, b in pairwise(errors)]
    due_s = [result.intended_s for result in results]
    sent_s = [result.sent_s for result in results]
    due_span, sent_span = max(due_s) - min(due_s), max(sent_s) - min(due_s)
    ttft_error, token_error = estimate(first), estimate(tokens, intervals=False)
    dispatch = estimate(result.dispatch_delay_s for result in results)
    if ttft_error is None or token_error is None or dispatch is None:
        raise FatalError("the paced server sent no token")
    return Accuracy(
        requests=len(results),
        ttft_error=ttft_error,
        token_error=token_error,
        gap_error=estimate(gaps, intervals=False),
        dispatch=dispatch,
        delivered=min(due_span / sent_span, 1.0) if sent_span else 1.0,
        cpu_share=cpu_share,
    )


def _play(url: str, schedule: Sequence[Request]) -> tuple[list[Result], float]:
    """Results and the processor time of this process as a share of one core."""
    clock = SystemClock()
    client = Client(url, "paced", clock=clock, timeout_s=60.0)
    cpu_s, wall_s = time.process_time(), clock.now()
    results = run_lowered(lambda: run_schedule(schedule, client, clock))
    return results, (time.process_time() - cpu_s) / (clock.now() - wall_s)


def _streams() -> list[Request]:
    """Long streams whose tokens are spread evenly over time, as those of requests that arrived one by one."""
    spread_s = STREAM_GAP_MS / 1e3 / STREAMS
    return [
        Request(i * spread_s, "x", STREAM_TOKENS, extra={"gap_ms": STREAM_GAP_MS}) for i in range(STREAMS)
    ]


def _even(rate_per_s: float, duration_s: float, *, tokens: int, gap_ms: float) -> list[Request]:
    count = round(rate_per_s * duration_s)
    return [Request(i / rate_per_s, "x", tokens, extra={"gap_ms": gap_ms}) for i in range(count)]


def _stalling() -> list[Request]:
    """An even load, and one request after a second that makes the server stand still."""
    load = _even(STALL_RATE_PER_S, STALL_LOAD_S, tokens=1, gap_ms=0.0)
    stall = Request(1.0 - 1e-3, "x", 1, name="stall", extra={"stall_s": STALL_S})
    return sorted((*load, stall), key=lambda request: request.intended_s)


def _during_stall(results: Sequence[Result]) -> tuple[float, int]:
    """Mean TTFT of the requests due while the server stood still, and their number."""
    start_s = next(result.intended_s for result in results if result.request.name == "stall")
    due = [r for r in results if start_s < r.intended_s < start_s + STALL_S and r.ttft_s is not None]
    return sum(result.ttft_s or 0.0 for result in due) / max(len(due), 1), len(due)
