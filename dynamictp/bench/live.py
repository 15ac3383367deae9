"""The live view of a run: progress, rates and percentiles, painted by another thread than the load's."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynamictp.bench.client import Sender
from dynamictp.bench.measure import estimate
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request
from dynamictp.clock import Clock, SystemClock

_RECENT = 500
_LINE_EVERY_S = 10.0


class Counters:
    """Counts requests on their way through a sender. Owns the live figures; the load's thread writes, the
    painter only reads.
    """

    def __init__(self) -> None:
        self.total = 0
        self.sent = 0
        self.running = 0
        self.failed = 0
        self.cut = 0
        self.tokens = 0
        self.origin_s = 0.0
        self.load_s = 0.0
        self.recent: deque[Result] = deque(maxlen=_RECENT)
        self._sender: Sender | None = None

    def start(self, sender: Sender, total: int, origin_s: float, load_s: float) -> None:
        """Counts anew, for a run of `total` requests due in `load_s` seconds from `origin_s` of the clock."""
        self.total, self.origin_s, self.load_s = total, origin_s, load_s
        self.sent = self.running = self.failed = self.cut = self.tokens = 0
        self.recent.clear()
        self._sender = sender

    @property
    def started(self) -> bool:
        return self._sender is not None

    async def send(self, request: Request, intended_s: float) -> Result:
        assert self._sender is not None
        self.sent += 1
        self.running += 1
        try:
            result = await self._sender.send(request, intended_s)
        finally:
            self.running -= 1
        self.cut += result.cut
        self.failed += result.failure is not None and not result.cut
        self.tokens += result.output_tokens
        self.recent.append(result)
        return result


class LiveView:
    """Paints counters: a live table on a terminal, now and then a line elsewhere. A context manager."""

    def __init__(self, console: Console, counters: Counters, label: str, clock: Clock | None = None) -> None:
        self._console, self._counters, self._label = console, counters, label
        self._clock = clock or SystemClock()
        self._live: Live | None = None
        self._next_line_s = 0.0

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(Text(""), console=self._console, auto_refresh=False, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def paint(self) -> None:
        """The state now."""
        counters = self._counters
        at_s = self._clock.now() - counters.origin_s
        if not counters.started:
            return
        if self._live is not None:
            self._live.update(live_table(counters, self._label, at_s), refresh=True)
        elif at_s >= self._next_line_s:
            self._next_line_s = at_s + _LINE_EVERY_S
            self._console.print(Text(live_line(counters, self._label, at_s)))


def live_line(counters: Counters, label: str, at_s: float) -> str:
    """One line, `at_s` seconds into the run."""
    return (
        f"{label}  {max(at_s, 0):5.1f} of {counters.load_s:.0f} s  sent {counters.sent}/{counters.total}"
        f"  running {counters.running}  failed {counters.failed}  {_rates(counters, at_s)}"
    )


def live_table(counters: Counters, label: str, at_s: float) -> Table:
    """Progress, rates, and percentiles of the last requests that finished."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("run", f"{label}, {max(at_s, 0):.1f} of {counters.load_s:.0f} s")
    table.add_row("requests", f"{counters.sent} of {counters.total} sent, {counters.running} running")
    table.add_row("failed", Text(str(counters.failed), style="red" if counters.failed else ""))
    table.add_row("rates", _rates(counters, at_s))
    recent = [result for result in tuple(counters.recent) if result.failure is None]
    for name, values in (
        ("TTFT ms", [result.ttft_s for result in recent]),
        ("TPOT ms", [result.tpot_s for result in recent]),
    ):
        seen = estimate(values, intervals=False)
        if seen is not None:
            table.add_row(
                f"{name}, last {seen.count}",
                f"P50 {seen.p50.value * 1e3:.0f}  P95 {seen.p95.value * 1e3:.0f}  max {seen.max * 1e3:.0f}",
            )
    return table


def _rates(counters: Counters, at_s: float) -> str:
    elapsed_s = max(at_s, 1e-3)
    return f"{counters.sent / elapsed_s:.1f} requests/s, {counters.tokens / elapsed_s:.0f} tokens/s finished"
