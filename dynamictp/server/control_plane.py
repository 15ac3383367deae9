"""The control plane's loop: look, decide, note it down, and lead the layout there (C1, C2)."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from dynamictp.clock import Clock
from dynamictp.control.capacity import CostBook
from dynamictp.control.config import ControlConfig, reloaded
from dynamictp.control.journal import Journal
from dynamictp.control.planner import decide
from dynamictp.control.reconciler import Observed, Reconciler, Target, ramp_settings
from dynamictp.control.state import PlannerState
from dynamictp.control.values import GROWTH, Decision, PoolSnapshot
from dynamictp.messages import CancelSwitch, SetLayout, Snapshot, SwitchStatus
from dynamictp.server.engine_client import EngineClient
from dynamictp.server.metrics import Metrics
from dynamictp.server.pool_view import PoolView
from dynamictp.server.shares import Share
from dynamictp.server.switches import SwitchBoard, Wanted

log = logging.getLogger(__name__)

PINNED_REASON = "pinned"


class ControlPlane:
    """Owner of the planner's state, the target and the journal. Lives in the event loop; decisions are made
    in a thread, so that a slow one delays no token.

    In dry-run mode it does all but act.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        client: EngineClient,
        board: SwitchBoard,
        share: Share,
        view: PoolView,
        cost: CostBook,
        metrics: Metrics,
        journal: Journal,
    ) -> None:
        self._clock = clock
        self._client = client
        self._board = board
        self._share = share
        self._view = view
        self._cost = cost
        self._metrics = metrics
        self._state = PlannerState()
        self._acts = view.mode == "dynamic"
        self.reconciler = Reconciler(clock, self, board.new_id, bar_s=self.config.bar_s)
        self._nudged = asyncio.Event()
        self.journal = journal
        self._journaled = self.config
        """The parameters that the journal's entries are decided with."""

    @property
    def config(self) -> ControlConfig:
        """The parameters in force. They live where the latencies are measured against them."""
        return self._view.traffic.config

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Never returns. A tick that fails is logged, and the next one is made all the same."""
        while True:
            began_s = self._clock.now()
            try:
                await self.tick()
            except Exception:
                log.exception("%sa decision failed", self._board.label)
            spent_s = self._clock.now() - began_s
            self._nudged.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self.config.interval_s - spent_s)):
                    await self._nudged.wait()

    def nudge(self) -> None:
        """Something happened that a decision may wait for: make the next one now."""
        self._nudged.set()

    async def tick(self) -> Decision | None:
        """One decision and what follows from it; None while there is no engine."""
        snapshot, config = self._client.snapshot, self.config
        if snapshot is None or not self._client.is_ready:
            return None
        if config is not self._journaled:
            self._journaled = config
            self.journal.reconfigured(config, self._state)
        seen = self._view.look(
            snapshot,
            self._client.live_requests,
            now=self._clock.now(),
            available=self._share.reach,
            pinned=self._board.pinned,
            switch=self._board.in_flight,
            barred=self.reconciler.bars(),
        )
        decision, self._state = await asyncio.to_thread(decide, seen, self._state, config, self._cost)
        self._note(seen, decision)
        self._act(decision, config)
        return decision

    def reload(self, config: ControlConfig) -> None:
        """Other parameters from now on. Raises `ConfigError` for one that can't change while it runs."""
        before = self.config
        self._view.traffic.config = reloaded(before, config)
        self.reconciler.bar_s = config.bar_s
        for name in config.__struct_fields__:
            old, new = getattr(before, name), getattr(config, name)
            if old != new:
                log.info("%sconfiguration: %s is %s, was %s", self._board.label, name, new, old)

    # ------------------------------------------------------------ events

    def on_status(self, status: SwitchStatus) -> None:
        """Progress of any switch."""
        mine = status.switch_id == self.reconciler.in_flight
        if status.outcome == "committed":
            self._view.traffic.committed(self._clock.now())
        self.reconciler.on_status(status)
        if mine and status.outcome and not self._board.pinned:
            # However it ended: the planner decides anew on what is there now.
            self.reconciler.want(None)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._view.on_snapshot(snapshot)

    def engine_lost(self) -> None:
        """The next engine begins with the last committed layout; a target stays what it is."""
        self.reconciler.engine_lost()

    def unpin(self) -> None:
        """The planner has the layout again."""
        self.reconciler.want(None)

    # ------------------------------------------------------------ within

    def send(self, command: SetLayout | CancelSwitch) -> bool:
        """The reconciler's way to the engine."""
        if isinstance(command, CancelSwitch):
            return self._client.send(command)
        snapshot = self._client.snapshot
        return self._board.command(command, snapshot.layout if snapshot else "", self._client.send)

    def _note(self, seen: PoolSnapshot, decision: Decision) -> None:
        last = next((entry.decision for entry in self.journal.last(1)), None)
        working = self.journal.error is None
        self.journal.add(seen, decision, self._state)
        if working and self.journal.error is not None:
            log.warning("%sthe journal's file is given up: %s", self._board.label, self.journal.error)
        self._metrics.plane.on_decision(decision, self._state.online.ratios)
        if decision.target is not None or last is None or decision.alarms != last.alarms:
            figures = ", ".join(f"{name} {value:g}" for name, value in decision.figures.items())
            log.info(
                "%sdecision: %s -> %s, %s%s (%s)%s",
                self._board.label,
                seen.layout,
                decision.target or "stay",
                decision.reason,
                ", forced" if decision.forced else "",
                figures,
                "".join(f"; alarm {alarm}" for alarm in decision.alarms),
            )

    def _act(self, decision: Decision, config: ControlConfig) -> None:
        """Make the target so. A pinned layout is led to in the same way, whatever the planner thinks."""
        board, snapshot = self._board, self._client.snapshot
        if not self._acts or snapshot is None:
            return
        if board.pinned:
            self.reconciler.want(_pinned(board.wanted or Wanted(snapshot.layout), config))
        else:
            self._share.reserve(decision.reserve, config.reserve_ahead_s, _need(decision))
            self.reconciler.follow(decision, config)
        flight = board.in_flight
        in_flight = (flight.switch_id, flight.to_layout) if flight is not None else None
        self.reconciler.step(Observed(snapshot.placed or snapshot.layout, self._share.available, in_flight))


def _pinned(wanted: Wanted, config: ControlConfig) -> Target:
    """Where an order by hand leads, and how: the same way at every try."""
    return Target(
        wanted.layout,
        PINNED_REASON,
        ramp=wanted.ramp,
        settings=ramp_settings(config) if wanted.ramp else None,
        drain_deadline_s=wanted.drain_deadline_s,
    )


def _need(decision: Decision) -> str:
    """Why devices are called back, in words."""
    if decision.wanted_reason in GROWTH:
        return f"the planner wants {decision.wanted} ({decision.wanted_reason})"
    return f"the planner expects to need {decision.reserve} device(s)"
