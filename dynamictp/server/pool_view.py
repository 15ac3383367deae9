"""What the planner sees: engine snapshots, live requests and switches as one `PoolSnapshot`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dynamictp.control.values import (
    Bar,
    Mode,
    PoolSnapshot,
    Running,
    StepSample,
    SwitchView,
    Waiting,
)
from dynamictp.control.windows import PrefixWindow, TrafficWindows
from dynamictp.layout import Shape
from dynamictp.messages import Snapshot, StepMeasure, SwitchStatus
from dynamictp.server.live_request import LiveRequest

MOST_SAMPLES = 64


@dataclass
class PoolView:
    """Owner of what accumulates between two looks: measured steps, and totals for shares."""

    legal: tuple[str, ...]
    """What the planner chooses from; on a large pool a layout set by hand may be none of it."""
    devices: int
    mode: Mode
    traffic: TrafficWindows
    _measures: list[StepMeasure] = field(default_factory=list)
    _busy: tuple[float, float] = (0.0, 0.0)
    """Time and busy device seconds at the last look."""
    _prefix: PrefixWindow = field(default_factory=PrefixWindow)
    _in_flight: tuple[str, float] = ("", 0.0)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Keep what a snapshot says only once."""
        self._measures.extend(snapshot.measures)
        del self._measures[:-MOST_SAMPLES]

    def look(
        self,
        snapshot: Snapshot,
        live: Collection[LiveRequest],
        *,
        now: float,
        available: int,
        pinned: bool,
        switch: SwitchStatus | None,
        barred: tuple[Bar, ...],
    ) -> PoolSnapshot:
        """The pool at `now`. `snapshot` is the engine's latest."""
        started = [request for request in live if request.emitted]
        seen = self.traffic.view(
            now,
            (request.who for request in live if not request.emitted),
            (request.stream for request in started),
        )
        measures, self._measures = self._measures, []
        return PoolSnapshot(
            time_s=now,
            layout=snapshot.layout,
            devices_total=self.devices,
            devices_available=available,
            legal=self.legal if snapshot.layout in self.legal else (snapshot.layout, *self.legal),
            mode=self.mode,
            pinned=pinned,
            switch=self._switch(switch, now),
            draining=tuple(str(Shape(d.tp, d.pp)) for d in snapshot.domains if d.state == "draining"),
            barred=barred,
            last_commit_s=self.traffic.last_commit_s,
            arrivals_2s=seen.arrivals_2s,
            arrivals_10s=seen.arrivals_10s,
            outputs=seen.outputs,
            prefix_hit_share=self._prefix.view(snapshot.prefix_hits, snapshot.prefix_queries),
            waiting=Waiting(
                requests=snapshot.waiting,
                prompt_tokens=snapshot.queue.tokens,
                oldest_s=max(0.0, now - snapshot.queue.oldest_s) if snapshot.waiting else 0.0,
                worst_ttft_ratio=seen.worst_ttft_ratio,
                needs_devices=snapshot.queue.needs_devices,
            ),
            running=_running(started),
            ttft=seen.ttft,
            tpot=seen.tpot,
            steps=tuple(StepSample(*_fields(measure)) for measure in measures),
            busy_share=self._busy_share(snapshot),
        )

    def _switch(self, status: SwitchStatus | None, now: float) -> SwitchView | None:
        if status is None:
            return None
        if self._in_flight[0] != status.switch_id:
            self._in_flight = (status.switch_id, now)
        return SwitchView(status.switch_id, status.to_layout, status.phase, self._in_flight[1])

    def _busy_share(self, snapshot: Snapshot) -> float:
        """Since the last look. A restarted engine counts from 0: that look says nothing."""
        busy_s = sum(device.busy_s for device in snapshot.devices)
        serving = sum(device.state == "serving" for device in snapshot.devices)
        seconds, more_s = snapshot.time_s - self._busy[0], busy_s - self._busy[1]
        self._busy = (snapshot.time_s, busy_s)
        if seconds <= 0 or more_s < 0 or not serving:
            return 0.0
        return min(1.0, more_s / (seconds * serving))


def _running(started: Sequence[LiveRequest]) -> Running:
    if not started:
        return Running()
    generated = sum(len(request.emitted) for request in started)
    context = generated + sum(request.prompt_len for request in started)
    return Running(len(started), context / len(started), generated / len(started))


def _fields(measure: StepMeasure) -> tuple[int, float, int, float, int, float, bool, int]:
    """In the order of `StepSample`. The engine only measures steps without neighbours."""
    return (
        measure.tp, measure.seconds, measure.rows, measure.context, measure.prefill_tokens,
        measure.past_tokens, True, measure.active_devices,
    )  # fmt: skip
