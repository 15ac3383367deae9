"""The planner: `decide(snapshot, state, config, cost) -> (decision, state)`. Pure.

It observes (averages, calibration), asks `choice` what would be right, and applies what keeps the layout
calm: sustained conditions, the least interval, the hourly budget, one switch in flight (C5).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from dynamictp.control import choice
from dynamictp.control.calibrate import learn
from dynamictp.control.capacity import CostBook, Table
from dynamictp.control.choice import Scene, Wish
from dynamictp.control.config import ControlConfig
from dynamictp.control.state import PlannerState, Sustained
from dynamictp.control.traffic import Demand, demand, observe
from dynamictp.control.values import Alarm, Decision, PoolSnapshot, Reason, SwitchKind
from dynamictp.cost.switching import break_even_s, switch_price

_HOUR_S = 3600.0
_MISSES = 2
"""A single look at running requests may find one that was just interrupted."""
_HOLDS = frozenset(Reason) - {
    Reason.GROW_PREDICTED,
    Reason.GROW_FEEDBACK,
    Reason.GROW_ONLY_WIDER,
    Reason.REVIVE,
    Reason.SHRINK,
    Reason.SIDEWAYS,
    Reason.DEVICES_LOST,
    Reason.BOUNDS,
}


class _Verdict(NamedTuple):
    """A wish after the gates: where to go (None: stay), why, and whether a switch is to be taken back."""

    target: str | None
    reason: Reason
    cancel: bool = False


def decide(
    snapshot: PoolSnapshot, state: PlannerState, config: ControlConfig, cost: CostBook
) -> tuple[Decision, PlannerState]:
    """What to do now, and the state for the next time. Same arguments, same answer.

    Raises ValueError when the observed layout is not among the legal ones.
    """
    if snapshot.layout not in snapshot.legal:
        raise ValueError(f"the observed layout {snapshot.layout} is not among {', '.join(snapshot.legal)}")
    state, table, found = _observe(snapshot, state, config, cost)
    scene = choice.scene(snapshot, table, found, config)
    wish, state = _wish(scene, state, cost)
    verdict = _gate(scene, wish, state)
    if verdict.target is not None:
        state = _switched(scene, wish, verdict.target, state)
    return _decision(scene, wish, verdict, state), state


def _observe(
    snapshot: PoolSnapshot, state: PlannerState, config: ControlConfig, cost: CostBook
) -> tuple[PlannerState, Table, Demand]:
    traffic = observe(state.traffic, snapshot, config)
    online = state.online
    if snapshot.steps:
        online = learn(online, snapshot.steps, cost.steps, config.calibration_clamp)
    shrink, sideways = state.shrink, state.sideways
    if snapshot.last_commit_s != state.seen_commit_s:
        shrink = sideways = None
    unforced = state.unforced
    if unforced and unforced[0] <= snapshot.time_s - _HOUR_S:
        unforced = tuple(t for t in unforced if t > snapshot.time_s - _HOUR_S)
    state = msgspec.structs.replace(
        state,
        traffic=traffic,
        online=online,
        shrink=shrink,
        sideways=sideways,
        unforced=unforced,
        seen_commit_s=snapshot.last_commit_s,
        decisions=state.decisions + 1,
    )
    assert traffic.profile is not None
    table = cost.table(traffic.profile, online.ratios, config.slo, snapshot.legal)
    return state, table, demand(traffic, snapshot, config, table.prompt_share)


def _wish(s: Scene, state: PlannerState, cost: CostBook) -> tuple[Wish, PlannerState]:
    """The first of: must leave, grow, shrink, another shape. Sustained ones only once they were.

    A move sideways is no growth: whatever asks for it, it has to be sustained.
    """
    held: Wish | None = None
    sideways: Wish | None = None
    state = msgspec.structs.replace(state, missed=state.missed + 1 if choice.misses(s) else 0)
    for look in (choice.must_leave, choice.only_wider, choice.feedback_growth, choice.predicted_growth):
        if look is choice.feedback_growth and 0 < state.missed < _MISSES:
            held = held or Wish(s.snapshot.layout, Reason.SUSTAIN)
            continue
        wish = look(s)
        if wish is not None and wish.reason is Reason.SIDEWAYS:
            sideways = sideways or wish
            continue
        if wish is not None and wish.reason not in _HOLDS:
            return wish, msgspec.structs.replace(state, shrink=None, sideways=None)
        held = held or wish
    wish, state = _sustained_shrink(s, state)
    if wish is None or wish.reason in _HOLDS:
        held = held or wish
        wish, state = _sustained_shape(s, sideways, state, cost)
    if wish is not None and wish.reason not in _HOLDS:
        return wish, state
    held = held or wish
    return held or Wish(s.snapshot.layout, Reason.HOLD), state


def _sustained_shrink(s: Scene, state: PlannerState) -> tuple[Wish | None, PlannerState]:
    if not choice.shrink_allowed(s):
        if state.shrink is not None:
            state = msgspec.structs.replace(state, shrink=None)
        return None, state
    now, before = s.snapshot.time_s, state.shrink
    since = now if before is None else before.since_s
    peak = max(s.demand.growth, 0.0 if before is None else before.peak)
    held = Sustained(since, 1 if before is None else before.decisions + 1, peak=peak)
    state = msgspec.structs.replace(state, shrink=held)
    due = held.decisions >= s.config.consecutive and now - since >= _shrink_after_s(s.config, state)
    target = choice.smaller(s, peak) if due else None
    if target is not None:
        return Wish(target.layout, Reason.SHRINK), state
    if due:
        # The peak rules it out: wait for as long again without one.
        state = msgspec.structs.replace(state, shrink=Sustained(now, 1, peak=s.demand.growth))
    return Wish(s.snapshot.layout, Reason.SUSTAIN), state


def _shrink_after_s(config: ControlConfig, state: PlannerState) -> float:
    """How long a shrink must have been possible: twice as long for each one that was soon regretted."""
    return config.shrink_after_s * 2.0**state.shrink_backoff


def _sustained_shape(
    s: Scene, wish: Wish | None, state: PlannerState, cost: CostBook
) -> tuple[Wish | None, PlannerState]:
    """`wish`: a shape that would mend what growth can't; else the one with the best score is looked for."""
    if wish is None and (s.demand.growth > 0 or s.config.objective != "efficiency"):
        wish = choice.better_shape(s)
    if wish is None or wish.gain < s.config.sideways_gain or not _pays(s, wish, cost):
        if state.sideways is not None:
            state = msgspec.structs.replace(state, sideways=None)
        return None, state
    now, before = s.snapshot.time_s, state.sideways
    if before is None or before.target != wish.target:
        before = Sustained(now, 0, wish.target)
    held = msgspec.structs.replace(before, decisions=before.decisions + 1)
    state = msgspec.structs.replace(state, sideways=held)
    if held.decisions < s.config.consecutive or now - held.since_s < s.config.sideways_after_s:
        return Wish(s.snapshot.layout, Reason.SUSTAIN), state
    return wish, state


def _pays(s: Scene, wish: Wish, cost: CostBook) -> bool:
    """The gain repays the switch within the time that a layout is kept at least."""
    facts, running = cost.facts, s.snapshot.running
    link = facts.link(max(s.table.entries[wish.target].shapes))
    price = switch_price(
        devices=s.observed.devices,
        shared_memory=facts.device.shared_memory,
        missing_weight_bytes=0.0,
        running_kv_bytes=running.requests * facts.shape.kv_bytes(running.context_mean),
        kv_stays=0.0,
        bandwidth=facts.device.bandwidth.value if link is None else link.bandwidth.value,
    )
    return break_even_s(price, wish.gain * s.observed.devices) <= s.config.shrink_after_s


def _gate(s: Scene, wish: Wish, state: PlannerState) -> _Verdict:
    snapshot = s.snapshot
    if wish.target == snapshot.layout or wish.reason in _HOLDS:
        return _back(s, wish)
    if snapshot.pinned or snapshot.mode != "dynamic":
        return _Verdict(None, Reason.PINNED if snapshot.pinned else Reason.DRY_RUN)
    if snapshot.switch is not None:
        under_way = snapshot.switch.to_layout
        if wish.forced and wish.target != under_way and _goes_wrong(s, wish.target, under_way):
            return _Verdict(wish.target, wish.reason, cancel=True)
        return _Verdict(None, Reason.IN_FLIGHT)
    too_soon = None if wish.forced else _too_soon(s, wish, state)
    return _Verdict(wish.target, wish.reason) if too_soon is None else _Verdict(None, too_soon)


def _too_soon(s: Scene, wish: Wish, state: PlannerState) -> Reason | None:
    """What an unforced switch has to wait for. Taking a draining domain back costs nothing, and could hardly
    ever wait for the interval after the switch that made it drain."""
    times = (state.last_switch_s, s.snapshot.last_commit_s)
    last = max((t for t in times if t is not None), default=None)
    if (
        wish.reason is not Reason.REVIVE
        and last is not None
        and s.snapshot.time_s - last < s.config.min_interval_s
    ):
        return Reason.MIN_INTERVAL
    return Reason.BUDGET if len(state.unforced) >= s.config.switches_per_hour else None


def _goes_wrong(s: Scene, wanted: str, under_way: str) -> bool:
    """The switch in flight leads to a layout that carries too little, and the wanted one carries more."""
    if under_way not in s.table.entries:
        return False
    short = s.table.load(under_way, s.demand.growth) > s.config.target_utilisation
    return short and s.table.capacity(wanted) > s.table.capacity(under_way)


def _back(s: Scene, wish: Wish) -> _Verdict:
    """Stay; and take a shrink under way back when the observed layout is needed after all."""
    snapshot = s.snapshot
    if snapshot.switch is None or snapshot.pinned or snapshot.mode != "dynamic":
        return _Verdict(None, wish.reason)
    if _goes_wrong(s, snapshot.layout, snapshot.switch.to_layout):
        return _Verdict(snapshot.layout, Reason.REVIVE, cancel=True)
    return _Verdict(None, Reason.IN_FLIGHT)


def _switched(s: Scene, wish: Wish, target: str, state: PlannerState) -> PlannerState:
    """The state after a switch was decided: its time, the budget, and whether the last shrink was wrong."""
    now, config = s.snapshot.time_s, s.config
    devices = s.table.entries[target].devices - s.observed.devices
    kind: SwitchKind = "grow" if devices > 0 else "shrink" if devices < 0 else "sideways"
    backoff, shrunk = state.shrink_backoff, state.last_shrink_s
    if kind == "grow" and shrunk is not None and state.last_kind == "shrink":
        if now - shrunk < config.shrink_after_s:
            backoff = min(backoff + 1, config.shrink_backoff_max)
        elif now - shrunk > 2 * config.shrink_after_s * 2**backoff:
            backoff = max(backoff - 1, 0)
    if kind == "shrink":
        # Devices that had to be given up are no shrink to regret.
        shrunk = now if wish.reason is Reason.SHRINK else None
    return msgspec.structs.replace(
        state,
        shrink=None,
        sideways=None,
        last_kind=kind,
        last_switch_s=now,
        last_shrink_s=shrunk,
        unforced=state.unforced if wish.forced else (*state.unforced, now),
        shrink_backoff=backoff,
    )


def _decision(s: Scene, wish: Wish, verdict: _Verdict, state: PlannerState) -> Decision:
    snapshot, config = s.snapshot, s.config
    alarms = []
    if (wish.reason is Reason.SLO_INFEASIBLE and choice.misses(s, 1.0)) or not s.table.holds_slo:
        alarms.append(Alarm.SLO_INFEASIBLE)
    if state.online.pegged(s.observed.shapes):
        alarms.append(Alarm.CALIBRATION_PEGGED)
    if verdict.reason is Reason.BUDGET:
        alarms.append(Alarm.FLAPPING)
    target = verdict.target or snapshot.layout
    ahead = choice.fewest(s, s.demand.forecast + s.demand.backlog, config.target_utilisation)
    # Not `s.least`, which is for the devices at hand: those that are leased are called back.
    least = min(config.min_devices, snapshot.devices_total)
    reserve = max(s.table.entries[wish.target].devices, ahead.devices if ahead is not None else 0, least)
    if s.wider and (
        wish.reason is Reason.NO_DEVICES or (ahead is None and wish.reason is not Reason.NO_GAIN)
    ):
        reserve = max(reserve, min(snapshot.devices_available + 1, snapshot.devices_total))
    return Decision(
        time_s=snapshot.time_s,
        target=verdict.target,
        reason=verdict.reason,
        wanted=wish.target,
        wanted_reason=wish.reason,
        devices=s.table.entries[target].devices,
        reserve=reserve,
        forced=wish.forced and (verdict.target is not None or _urgent(s, wish, verdict)),
        cancel=verdict.cancel,
        figures=_figures(s, wish, state),
        alarms=tuple(alarms),
    )


def _urgent(s: Scene, wish: Wish, verdict: _Verdict) -> bool:
    """The switch under way leads to where the demand wants it. A latency missed in mid-ramp is no reason to
    hurry: the new side may be what causes it."""
    switch = s.snapshot.switch
    if wish.reason is Reason.GROW_FEEDBACK:
        return False
    return verdict.reason is Reason.IN_FLIGHT and switch is not None and switch.to_layout == wish.target


def _figures(s: Scene, wish: Wish, state: PlannerState) -> dict[str, float]:
    """Rounded, and finite so that they are JSON."""
    found, table, layout = s.demand, s.table, s.snapshot.layout
    profile = state.traffic.profile
    assert profile is not None
    figures = {
        "rate": found.now,
        "average": found.average,
        "forecast": found.forecast,
        "slow": found.slow,
        "backlog": found.backlog,
        "demand": found.growth,
        "capacity": table.capacity(layout),
        "load": table.load(layout, found.growth),
        "slow_load": table.load(layout, found.slow),
        "ttft_ratio": choice.ttft_ratio(s.snapshot, s.config),
        "tpot_ratio": choice.tpot_ratio(s.snapshot, s.config),
        "prompt_tokens": profile.prompt_mean,
        "output_tokens": profile.output_mean,
        "gain": wish.gain,
    }
    if wish.target != layout:
        figures["wanted_capacity"] = table.capacity(wish.target)
        figures["wanted_load"] = table.load(wish.target, found.growth)
    if state.shrink is not None:
        figures["shrink_for_s"] = s.snapshot.time_s - state.shrink.since_s
        figures["shrink_after_s"] = _shrink_after_s(s.config, state)
    if state.sideways is not None:
        figures["sideways_for_s"] = s.snapshot.time_s - state.sideways.since_s
        figures["sideways_after_s"] = s.config.sideways_after_s
    return {name: round(min(value, 1e9), 4) for name, value in figures.items()}
