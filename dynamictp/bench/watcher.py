"""The server's layout over time: polled during a run, then read as spans and switches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamictp.bench.exchange import Origin, exchange
from dynamictp.bench.record import LayoutSample, Run
from dynamictp.bench.wire import Head, WireError
from dynamictp.clock import Clock

POLL_S = 0.5


class LayoutWatcher:
    """Polls `GET /admin/layout`; owns the samples. Uses the load's own light exchange: a poll costs the event
    loop a fraction of a millisecond. A poll that fails is left out: the server may be busy, and its
    requests will say so.
    """

    def __init__(self, url: str, api_key: str | None, clock: Clock) -> None:
        self.samples: list[LayoutSample] = []
        self._origin = Origin.parse(url)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._payload = self._origin.get("/admin/layout", headers)
        self._clock = clock

    async def watch(self, origin_s: float) -> None:
        """Until cancelled. Times of samples are after `origin_s`."""
        while True:
            asked_s = self._clock.now()
            body = _Body()
            try:
                async with asyncio.timeout(POLL_S):
                    await exchange(self._origin, self._payload, body, self._clock)
                self.samples.append(read_sample(body.data, asked_s - origin_s))
            except (OSError, TimeoutError, WireError, msgspec.MsgspecError, KeyError, TypeError, ValueError):
                pass
            await asyncio.sleep(max(asked_s + POLL_S - self._clock.now(), 0.0))


class _Body:
    """Collects a response's body."""

    def __init__(self) -> None:
        self.data = b""

    def on_head(self, head: Head) -> None:
        pass

    def on_body(self, piece: bytes, at_s: float) -> None:
        self.data += piece


def read_sample(body: bytes, t_s: float) -> LayoutSample:
    """Raises MsgspecError, KeyError, TypeError or ValueError for what isn't the admin interface's answer."""
    state = msgspec.json.decode(body, type=dict[str, Any])
    switch = state.get("switch")
    return LayoutSample(
        t_s=t_s,
        layout=str(state["observed"]),
        running=sum(int(domain.get("running", 0)) for domain in state.get("domains", ())),
        waiting=int(state.get("waiting", 0)),
        switch=f"{switch.get('from')} → {switch.get('to')}" if isinstance(switch, dict) else "",
    )


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which one layout was observed."""

    layout: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """A switch on the run's time. `exact` when this client asked for it; else seen between two polls."""

    before: str
    after: str
    start_s: float
    end_s: float
    exact: bool


def changes_of(run: Run) -> tuple[Change, ...]:
    """Switches this client made, and changes of layout that polling saw outside of them."""
    made = [
        Change(s.before, s.after, s.started_s, s.ended_s, True) for s in run.switches if s.outcome != "noop"
    ]
    seen = []
    for before, after in zip(run.samples, run.samples[1:], strict=False):
        if before.layout == after.layout:
            continue
        known = any(s.start_s <= after.t_s and before.t_s <= s.end_s for s in made)
        if not known:
            seen.append(Change(before.layout, after.layout, before.t_s, after.t_s, False))
    return tuple(sorted((*made, *seen), key=lambda change: change.start_s))


def spans_of(run: Run) -> tuple[Span, ...]:
    """The layout over the run; empty for servers without layouts."""
    changes = changes_of(run)
    first = changes[0].before if changes else _first_layout(run.samples, run.server.layout)
    if not first:
        return ()
    spans, start_s = [], 0.0
    layout = first
    for change in changes:
        # In force from the commit on; between two polls, the middle is the best guess.
        at_s = change.start_s if change.exact else (change.start_s + change.end_s) / 2
        spans.append(Span(layout, start_s, at_s))
        layout, start_s = change.after, at_s
    return (*spans, Span(layout, start_s, max(run.end_s, start_s)))


def _first_layout(samples: Sequence[LayoutSample], layout: Any) -> str:
    if samples:
        return samples[0].layout
    return str(layout["observed"]) if isinstance(layout, dict) and "observed" in layout else ""
