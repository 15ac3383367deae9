"""What metrics cost: a server that counts and is scraped every second, and the same server counting nothing.

One server that switches its metrics off and on (`dynamictp.bench.unmetered`): two of them differ in where
their memory lies by more than what is measured. A round plays the same load on each side, in alternating
order, and the figure is the median over the rounds' ratios: the machine's state changes more between rounds
than between two plays of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np
import psutil

from dynamictp.bench.admin import Admin
from dynamictp.bench.client import Client, run_lowered
from dynamictp.bench.measure import Figure, estimate
from dynamictp.bench.player import run_schedule
from dynamictp.bench.probe import http_client
from dynamictp.bench.prompts import LONG_TEXT, exact_prompts
from dynamictp.bench.schedule import Request, together
from dynamictp.bench.server import ServerProcess, interrupts_deferred, serve_command
from dynamictp.bench.stats import summarise
from dynamictp.bench.unmetered import OFF, ON
from dynamictp.clock import SystemClock
from dynamictp.errors import FatalError

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 128
LAYOUT = "tp2"
SCRAPE_EVERY_S = 1.0
LEAST_RATIO = 0.98
"""Metrics may cost 2 % of the throughput."""


@dataclass(frozen=True, slots=True)
class MetricsCost:
    """`with_` and `without` are medians over the rounds: output tokens per second of the whole play, prefill
    included, and processor time of the server process per output token. `ratio` is the median over rounds of
    throughput with ÷ without, with its 95 % interval.
    """

    streams: int
    layout: str
    rounds: int
    with_tokens_per_s: float
    without_tokens_per_s: float
    ratio: Figure
    with_cpu_us: float
    without_cpu_us: float
    scrapes: int
    scrape_ms: float

    @property
    def held(self) -> bool:
        return self.ratio.value >= LEAST_RATIO


@dataclass
class Side:
    """What the plays with metrics, or those without, gave."""

    counting: bool
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    scrape_s: list[float] = field(default_factory=list)

    async def play(self, server: psutil.Process, url: str, schedule: Sequence[Request]) -> None:
        """Play the load once. Raises FatalError when a request fails."""
        server.send_signal(ON if self.counting else OFF)
        client = Client(url, "demo", return_token_ids=True)
        before_s = _cpu_s(server)
        scraping = asyncio.create_task(self._scrape(url)) if self.counting else None
        try:
            results = await run_schedule(schedule, client, SystemClock())
        finally:
            if scraping is not None:
                scraping.cancel()
                with suppress(asyncio.CancelledError):
                    await scraping
        used_s = _cpu_s(server) - before_s
        for result in results:
            if result.failure is not None:
                raise FatalError(f"a request failed: {result.failure}")
        summary = summarise(results)
        self.tokens_per_s.append(summary.tokens_per_s)
        self.cpu_us.append(used_s * 1e6 / summary.output_tokens)

    async def _scrape(self, url: str) -> None:
        clock = SystemClock()
        async with http_client(url, None) as http:
            while True:
                began_s = clock.now()
                (await http.get("/metrics")).raise_for_status()
                self.scrape_s.append(clock.now() - began_s)
                await asyncio.sleep(SCRAPE_EVERY_S)


def measure_metrics_cost(
    rounds: int, flags: Sequence[str] = (), on_round: Callable[[int], None] = lambda _round: None
) -> MetricsCost:
    """Starts a server of the embedded model with `flags` and plays `rounds` rounds on it.

    Raises FatalError when the server does not start or a request fails.
    """
    command = ["dynamictp.bench.unmetered" if part == "dynamictp" else part for part in serve_command(LAYOUT)]
    metered, silent = Side(counting=True), Side(counting=False)
    with ExitStack() as stack:
        with interrupts_deferred():
            server = stack.enter_context(ServerProcess([*command, *flags]))
        url, process = server.wait_ready(), psutil.Process(server.pid)
        ids = run_lowered(lambda: _tokens(url))
        rng = np.random.default_rng(0)
        for number in range(rounds + 1):
            # The first round warms up: the server's first use of everything.
            for side in (metered, silent) if number % 2 else (silent, metered):
                # Other prompts each time: the prefix cache knows the last ones.
                prompts = exact_prompts(ids, PROMPT_TOKENS, STREAMS, rng)
                schedule = together(prompts, OUTPUT_TOKENS, {"ignore_eos": True})
                run_lowered(partial(side.play, process, url, schedule))
            on_round(number)
    return cost_of(metered, silent)


def cost_of(metered: Side, silent: Side) -> MetricsCost:
    """The figures of all rounds but the first. Pure."""
    with_, without = metered.tokens_per_s[1:], silent.tokens_per_s[1:]
    ratios = estimate(mine / other for mine, other in zip(with_, without, strict=True))
    if ratios is None:
        raise FatalError("no round was played")
    return MetricsCost(
        STREAMS,
        LAYOUT,
        len(with_),
        median(with_),
        median(without),
        ratios.p50,
        median(metered.cpu_us[1:]),
        median(silent.cpu_us[1:]),
        len(metered.scrape_s),
        median(metered.scrape_s) * 1e3 if metered.scrape_s else 0.0,
    )


async def _tokens(url: str) -> tuple[int, ...]:
    async with Admin(url) as admin:
        return await admin.tokenize(LONG_TEXT)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
