"""Where decode steps spend their time: the difference between two looks at the server's `/metrics`.

The counters are explained at `dynamictp.messages.StepTotals`. A server without them has no split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from dynamictp.bench.probe import http_client, scrape
from dynamictp.clock import Clock, SystemClock

# The server refreshes its counters every 0.25 s.
_SETTLE_S = 2.0
_POLL_S = 0.02
_RUNNING = "dtp_num_requests_running"


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """Means over the `steps` of one degree that computed no prompt token, on rank 0, in ms.

    The first four are parts of a step; `host_ms` passes between two steps although there is work. Together
    they are the time from one token of a stream to the next.
    """

    steps: int
    weights_ms: float
    attention_ms: float
    wait_ms: float
    other_ms: float
    host_ms: float

    @property
    def step_ms(self) -> float:
        return self.weights_ms + self.attention_ms + self.wait_ms + self.other_ms

    @property
    def wait_share(self) -> float:
        return self.wait_ms / self.step_ms if self.step_ms else 0.0

    @property
    def host_share(self) -> float:
        """Of the time from step to step."""
        total_ms = self.step_ms + self.host_ms
        return self.host_ms / total_ms if total_ms else 0.0


async def settled_metrics(url: str, clock: Clock | None = None) -> Mapping[str, float]:
    """Samples of `/metrics` once they show no running request; of a server without metrics none.

    After 2 s they are taken as they are.
    """
    clock = clock or SystemClock()
    until_s = clock.now() + _SETTLE_S
    async with http_client(url, None) as http:
        while True:
            samples = await scrape(http)
            if not samples.get(_RUNNING) or clock.now() >= until_s:
                return samples
            await asyncio.sleep(_POLL_S)


def decode_split(before: Mapping[str, float], after: Mapping[str, float], tp: int) -> DecodeSplit | None:
    """The split of a degree's decode steps between two looks. Pure."""
    labels = f"{{phase=decode}}{{tp={tp}}}"

    def grown(key: str) -> float:
        return after.get(key, 0.0) - before.get(key, 0.0)

    steps = round(grown(f"dtp_steps_total{labels}"))
    if steps <= 0:
        return None
    parts = ("weights", "attention", "wait", "other", "host")
    means_ms = (grown(f"dtp_step_seconds_total{{part={part}}}{labels}") / steps * 1e3 for part in parts)
    return DecodeSplit(steps, *means_ms)


def engine_us(metrics: Mapping[str, float]) -> float | None:
    """Engine time per step in microseconds, the median of the last 128 steps."""
    seconds = metrics.get("dtp_engine_step_seconds")
    return None if seconds is None else seconds * 1e6
