"""`python -m dynamictp.bench.unmetered ARGUMENTS`: the `dynamictp` command, whose metrics can be turned off.

One side of the comparison that says what metrics cost: while off, nothing is counted per token, per request
or per switch, and the history gets no points. What the engine and the kernels measure of their own steps
stays: the scheduler and the planner work with it. SIGUSR2 switches off, SIGUSR1 on; it starts on. What is
counted over a change is of no use, so the server is only good for measuring.
"""

from __future__ import annotations

import signal
from types import FrameType

from dynamictp.cli import main
from dynamictp.messages import Snapshot, SwitchStatus
from dynamictp.observe.requests import Finished, RequestMetrics
from dynamictp.server.metrics import Metrics
from dynamictp.server.service import Service

ON, OFF = signal.SIGUSR1, signal.SIGUSR2


class Switch:
    """Of all metrics of this process."""

    counting = True


def set_counting(number: int, _frame: FrameType | None = None) -> None:
    """`ON` or `OFF`; a handler of these signals."""
    Switch.counting = number == ON


class SwitchedRequests(RequestMetrics):
    """Counts nothing while off."""

    def on_arrival(self) -> None:
        if Switch.counting:
            super().on_arrival()

    def on_queued(self, seconds: float) -> None:
        if Switch.counting:
            super().on_queued(seconds)

    def on_first_token(self, prompt_tokens: int, seconds: float, tenant: str = "") -> None:
        if Switch.counting:
            super().on_first_token(prompt_tokens, seconds, tenant)

    def on_finish(self, request: Finished) -> None:
        if Switch.counting:
            super().on_finish(request)

    def on_failure(self, reason: str) -> None:
        if Switch.counting:
            super().on_failure(reason)


class SwitchedMetrics(Metrics):
    """Counts nothing while off."""

    request_metrics = SwitchedRequests

    def on_token(self, domain: str, seconds: float, *, first: bool) -> None:
        if Switch.counting:
            super().on_token(domain, seconds, first=first)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        if Switch.counting:
            super().on_snapshot(snapshot)

    def on_switch(self, status: SwitchStatus) -> None:
        if Switch.counting:
            super().on_switch(status)


if __name__ == "__main__":
    for number in (ON, OFF):
        signal.signal(number, set_counting)
    Service.metrics_kind = SwitchedMetrics
    main()
