"""`python -m dynamictp.bench.unmetered ARGUMENTS`: the `dynamictp` command without the cost of its metrics.

The other side of the comparison that says what metrics cost: nothing is counted per token, per request or per
switch, and the history gets no points. What the engine and the kernels measure of their own steps stays: the
scheduler and the planner work with it.
"""

from __future__ import annotations

from dynamictp.cli import main
from dynamictp.messages import Snapshot, SwitchStatus
from dynamictp.observe.requests import Finished, RequestMetrics
from dynamictp.server.metrics import Metrics
from dynamictp.server.service import Service


class SilentRequests(RequestMetrics):
    """Counts nothing."""

    def on_arrival(self) -> None: ...

    def on_queued(self, seconds: float) -> None: ...

    def on_first_token(self, prompt_tokens: int, seconds: float, tenant: str = "") -> None: ...

    def on_finish(self, request: Finished) -> None: ...

    def on_failure(self, reason: str) -> None: ...


class SilentMetrics(Metrics):
    """Counts nothing."""

    request_metrics = SilentRequests

    def on_token(self, domain: str, seconds: float, *, first: bool) -> None: ...

    def on_snapshot(self, snapshot: Snapshot) -> None: ...

    def on_switch(self, status: SwitchStatus) -> None: ...


if __name__ == "__main__":
    Service.metrics_kind = SilentMetrics
    main()
