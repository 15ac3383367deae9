"""More than a real server can do: `python -m dynamictp.testing.overload --seconds 300`.

Measures what the server can do, then sends twice as much for a while, then little again. Who is taken must
get the first token within the target, who is not must be told so at once, and a few seconds after the flood
everyone must be served as before it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import click
import httpx

from dynamictp.bench.client import Client
from dynamictp.bench.result import FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.clock import SystemClock
from dynamictp.testing.server_process import ServerProcess

TTFT_S = 2.0
TTFT_TOKEN_S = 0.002
REFUSAL_S = 0.1
NORMAL_AGAIN_S = 5.0
CAPACITY_REQUESTS = 96
QUIET_S = 8.0
QUIET_SHARE = 0.4
"""Of the capacity, before and after the flood."""
CAPACITY_STREAMS = 16
PROMPT_TOKENS = (30, 250)
OUTPUT_TOKENS = (8, 48)
VOCAB = 49_000
_PROBE_EVERY_S = 1.0


@dataclass
class OverloadReport:
    """Outcome of one run. Results are those of each phase, by when they were sent."""

    seed: int
    factor: float
    capacity_rps: float = 0.0
    before: list[Result] = field(default_factory=list)
    flood: list[Result] = field(default_factory=list)
    settling: list[Result] = field(default_factory=list)
    """Sent in the first seconds after the flood."""
    after: list[Result] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Note what does not hold."""
        results = (*self.before, *self.flood, *self.settling, *self.after)
        for result in results:
            failure = result.failure
            if failure is not None and not _refused(result):
                self.faults.append(f"{failure.kind} {failure.status}: {failure.message[:200]}")
        late = [result for result in _taken(results) if lateness(result) > 1.0]
        # One in a hundred: the machine may stand still for a moment, and a prediction is one.
        if len(late) > len(_taken(results)) / 100:
            self.faults.append(f"{len(late)} of {len(_taken(results))} that were taken waited too long")
        refusals = [result.end_s - result.sent_s for result in results if _refused(result)]
        if percentile(refusals, 99) > REFUSAL_S:
            self.faults.append(f"P99 of refusals: {percentile(refusals, 99) * 1e3:.0f} ms")
        if not refusals:
            self.faults.append("nobody was refused: that was no overload")
        refused_after = sum(map(_refused, self.after))
        if refused_after:
            self.faults.append(f"{refused_after} of {len(self.after)} refused after the flood was over")

    def lines(self) -> Sequence[str]:
        return (
            f"seed {self.seed}: capacity {self.capacity_rps:.1f} requests/s, flood {self.factor:g} times it",
            *(
                f"{name}: {_describe(results)}"
                for name, results in (
                    ("before", self.before),
                    ("flood", self.flood),
                    (f"first {NORMAL_AGAIN_S:g} s after", self.settling),
                    ("later", self.after),
                )
            ),
            f"Retry-After, s: {sorted(set(self.retry_after_s))}",
            *self._criteria(),
            f"faults {len(self.faults)}",
            *self.faults,
        )

    def _criteria(self) -> Sequence[str]:
        """What must hold, and what was seen."""
        results = (*self.before, *self.flood, *self.settling, *self.after)
        taken = _taken(results)
        within = sum(lateness(result) <= 1.0 for result in taken)
        refusals = [result.end_s - result.sent_s for result in results if _refused(result)]
        return (
            f"who is taken begins within {TTFT_S:g} s + {TTFT_TOKEN_S * 1e3:g} ms a prompt token, 99 of 100: "
            f"{within} of {len(taken)}",
            f"P99 of refusals within {REFUSAL_S * 1e3:.0f} ms: {percentile(refusals, 99) * 1e3:.1f} ms",
            f"nobody refused from {NORMAL_AGAIN_S:g} s after the flood on: "
            f"{sum(map(_refused, self.after))} of {len(self.after)}",
        )


def lateness(result: Result) -> float:
    """Time to the first token as a share of the target."""
    ttft_s = result.ttft_from_sent_s
    assert ttft_s is not None
    return ttft_s / (TTFT_S + TTFT_TOKEN_S * len(result.request.prompt))


def percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


def _refused(result: Result) -> bool:
    failure = result.failure
    return failure is not None and failure.kind is FailureKind.REFUSED and failure.status in (429, 503)


def _taken(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.chunk_s]


def _describe(results: Sequence[Result]) -> str:
    taken = _taken(results)
    ttft = [result.ttft_from_sent_s or 0.0 for result in taken]
    refusals = [result.end_s - result.sent_s for result in results if _refused(result)]
    within = sum(lateness(result) <= 1.0 for result in taken)
    return (
        f"{len(taken)} taken, {within} in target, TTFT P50 {percentile(ttft, 50):.2f} s, "
        f"P99 {percentile(ttft, 99):.2f} s, longest {max(ttft, default=0.0):.2f} s; {len(refusals)} refused, "
        f"P50 {percentile(refusals, 50) * 1e3:.1f} ms, P99 {percentile(refusals, 99) * 1e3:.1f} ms, "
        f"longest {max(refusals, default=0.0) * 1e3:.1f} ms"
    )


class _Load:
    """Sends requests of random lengths. Owner of the random numbers."""

    def __init__(self, url: str, seed: int) -> None:
        self._clock = SystemClock()
        self._client = Client(url, "demo", clock=self._clock)
        self._rng = random.Random(seed)

    async def capacity(self, count: int) -> float:
        """Requests a second that are finished while always a few wait, over `count` requests."""
        began, left = self._clock.now(), count

        async def one_after_the_other() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                # Ready to wait: nobody is refused.
                result = await self._send(timeout=120)
                if result.failure is not None:
                    raise RuntimeError(f"measuring the capacity: {result.failure}")

        await asyncio.gather(*(one_after_the_other() for _ in range(CAPACITY_STREAMS)))
        return count / (self._clock.now() - began)

    async def play(self, rate: float, seconds: float) -> list[asyncio.Task[Result]]:
        """Poisson arrivals; returns when the time is over, though some still run."""
        tasks: list[asyncio.Task[Result]] = []
        due_s = self._clock.now()
        end_s = due_s + seconds
        while (due_s := due_s + self._rng.expovariate(rate)) < end_s:
            await asyncio.sleep(max(0.0, due_s - self._clock.now()))
            tasks.append(asyncio.create_task(self._send()))
        await asyncio.sleep(max(0.0, end_s - self._clock.now()))
        return tasks

    async def _send(self, **extra: object) -> Result:
        rng = self._rng
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(*PROMPT_TOKENS)))
        request = Request(0.0, prompt, rng.randint(*OUTPUT_TOKENS), extra={"ignore_eos": True, **extra})
        return await self._client.send(request, self._clock.now())


async def _probe(http: httpx.AsyncClient, report: OverloadReport) -> None:
    """Look now and then at a refusal as a whole."""
    while True:
        await asyncio.sleep(_PROBE_EVERY_S)
        response = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        if response.status_code == 200:
            continue
        value = response.headers.get("retry-after", "")
        if response.status_code not in (429, 503) or not value.isdigit() or int(value) < 1:
            report.faults.append(f"status {response.status_code} with Retry-After '{value}'")
        else:
            report.retry_after_s.append(int(value))


async def run_overload(seed: int, seconds: float, factor: float = 2.0, layout: str = "tp2") -> OverloadReport:
    """A flood of `factor` times the capacity for `seconds`, on a server of its own."""
    report = OverloadReport(seed, factor)
    # Waits that leave room for the first step within the target of 2 s.
    patience = ("--max-wait-s", "1.5")
    with ServerProcess("serve", "demo", "--devices", "2", "--layout", layout, *patience) as server:
        load = _Load(server.url, seed)
        await load.capacity(CAPACITY_STREAMS)
        report.capacity_rps = await load.capacity(CAPACITY_REQUESTS)
        quiet = QUIET_SHARE * report.capacity_rps
        before = await load.play(quiet, QUIET_S)
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
            probing = asyncio.create_task(_probe(http, report))
            flood = await load.play(factor * report.capacity_rps, seconds)
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        settling = await load.play(quiet, NORMAL_AGAIN_S)
        after = await load.play(quiet, QUIET_S)
        for phase, tasks in (
            (report.before, before),
            (report.flood, flood),
            (report.settling, settling),
            (report.after, after),
        ):
            phase.extend(await asyncio.gather(*tasks))
    report.judge()
    return report


@click.command()
@click.option("--seconds", default=300.0, show_default=True, help="of overload")
@click.option("--factor", default=2.0, show_default=True, help="load as a multiple of the capacity")
@click.option("--layout", default="tp2", show_default=True)
@click.option("--seed", type=int, help="default: random, printed")
def main(seconds: float, factor: float, layout: str, seed: int | None) -> None:
    """Flood a real server and print what came of it."""
    seed = random.SystemRandom().randrange(1 << 20) if seed is None else seed
    report = asyncio.run(run_overload(seed, seconds, factor, layout))
    for line in report.lines():
        click.echo(line)
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
