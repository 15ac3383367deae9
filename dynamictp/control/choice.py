"""Which layout is right: growth, shrink, another shape. Pure; no timers here, `planner` adds them.

Two stages: how many devices the demand needs, then which of the shapes on as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from dynamictp.control.capacity import Entry, Predicted, Table
from dynamictp.control.config import ControlConfig
from dynamictp.control.traffic import Demand
from dynamictp.control.values import Digest, PoolSnapshot, Reason
from dynamictp.layout import LayoutSpec

_NEARLY = 0.9
"""When nothing is enough, the fewest devices that reach this part of the most that can be had."""
_BETTER = 0.01
_REVIVE_SLACK = 0.85
"""A layout that draining domains can give back at once may carry this much less than the best."""


class Wish(msgspec.Struct, frozen=True):
    """What the policy wants, before timers and budgets. `target` equals the observed layout to stay."""

    target: str
    reason: Reason
    forced: bool = False
    gain: float = 0.0
    """Predicted improvement of what the wish is about, as a fraction."""


class Scene(msgspec.Struct, frozen=True):
    """All that the choice looks at. `candidates` are allowed now: legal, with devices, not barred."""

    snapshot: PoolSnapshot
    table: Table
    demand: Demand
    config: ControlConfig
    candidates: tuple[Entry, ...]
    least: int
    """Fewest devices of a candidate."""
    most: int
    """Most devices of a candidate."""
    wider: bool
    """More devices exist than candidates may use."""
    barred: tuple[Entry, ...] = ()
    """Would be candidates but for a bar."""

    @property
    def observed(self) -> Entry:
        return self.table.entries[self.snapshot.layout]

    def score(self, layout: str) -> float:
        """What the objective wants small, at the present demand."""
        if self.config.objective == "throughput":
            capacity = self.table.capacity(layout)
            return 1 / capacity if capacity > 0 else float("inf")
        return self.table.predict(layout, self.demand.growth).e2e_s


def scene(snapshot: PoolSnapshot, table: Table, demand: Demand, config: ControlConfig) -> Scene:
    """Raises KeyError when the observed layout is not among the legal ones."""
    most = config.max_devices or snapshot.devices_total
    usable = min(snapshot.devices_available, most)
    bars = {bar.layout for bar in snapshot.barred if bar.until_s > snapshot.time_s}
    least = min(config.min_devices, usable)
    fitting = [e for e in table.entries.values() if least <= e.devices <= usable]
    return Scene(
        snapshot,
        table,
        demand,
        config,
        candidates=tuple(entry for entry in fitting if entry.layout not in bars),
        least=least,
        most=usable,
        wider=usable < min(snapshot.devices_total, most),
        barred=tuple(e for e in fitting if e.layout in bars and e.layout != snapshot.layout),
    )


def fewest(s: Scene, rate: float, utilisation: float) -> Entry | None:
    """The fewest devices that carry `rate` at that utilisation, in their best shape; None: none does."""
    enough = [e for e in s.candidates if s.table.load(e.layout, rate) <= utilisation]
    if not enough:
        return None
    devices = min(entry.devices for entry in enough)
    return _best(s, [entry for entry in enough if entry.devices == devices])


def must_leave(s: Scene) -> Wish | None:
    """The observed layout takes more devices than there are (then a bar is no reason to stay), or more or
    fewer of them than the parameters allow."""
    if s.least <= s.observed.devices <= s.most:
        return None
    lost = s.observed.devices > s.snapshot.devices_available
    if lost and not s.candidates:
        s = msgspec.structs.replace(s, candidates=s.barred)
    if not s.candidates:
        return None
    best = fewest(s, s.demand.growth, s.config.target_utilisation) or most_capable(s)
    return Wish(best.layout, Reason.DEVICES_LOST if lost else Reason.BOUNDS, forced=True)


def only_wider(s: Scene) -> Wish | None:
    """A waiting request fits none of the serving domains, even when empty."""
    needs = s.snapshot.waiting.needs_devices
    if not needs or max(s.observed.shapes) >= needs:
        return None
    fitting = [e for e in s.candidates if max(e.shapes) >= needs]
    if not fitting:
        return Wish(s.snapshot.layout, _why_not(s))
    least = max(min(e.devices for e in fitting), s.observed.devices)
    same = [e for e in fitting if e.devices == least] or fitting
    return Wish(_best(s, same).layout, Reason.GROW_ONLY_WIDER, forced=True)


def predicted_growth(s: Scene) -> Wish | None:
    """Demand is above the target utilisation of the observed layout."""
    layout, table = s.snapshot.layout, s.table
    load = table.load(layout, s.demand.growth)
    if load <= s.config.target_utilisation:
        return None
    forced = load >= 1
    best = fewest(s, s.demand.growth, s.config.target_utilisation)
    if best is None:
        if not s.candidates:
            return Wish(layout, Reason.NO_DEVICES if s.wider else Reason.BARRED)
        best = most_capable(s)
    revived = _revivable(s, best)
    if revived is not None:
        best = revived
    gain = _capacity_gain(s, best)
    if best.layout == layout or gain < s.config.feedback_min_gain:
        return Wish(layout, _why_not(s), gain=gain)
    if best.devices == s.observed.devices:
        return Wish(best.layout, Reason.SIDEWAYS, gain=gain)
    return Wish(best.layout, Reason.REVIVE if revived else Reason.GROW_PREDICTED, forced, gain)


def misses(s: Scene, limit: float | None = None) -> bool:
    """A measured latency is above `limit` times its target; None: the threshold of feedback."""
    limit = s.config.feedback_threshold if limit is None else limit
    return max(ttft_ratio(s.snapshot, s.config), tpot_ratio(s.snapshot, s.config)) > limit


def feedback_growth(s: Scene) -> Wish | None:
    """A measured latency is above its threshold: the fewest devices that are predicted to mend it.

    More devices come first: they are there at once, another shape only when its gain has lasted.
    """
    ttft, tpot = ttft_ratio(s.snapshot, s.config), tpot_ratio(s.snapshot, s.config)
    limit = s.config.feedback_threshold
    if ttft <= limit and tpot <= limit:
        return None
    before = s.table.predict(s.snapshot.layout, s.demand.growth)
    options: list[tuple[Entry, float, bool]] = []
    for entry in s.candidates:
        if entry.devices < s.observed.devices or entry.layout == s.snapshot.layout:
            continue
        after = s.table.predict(entry.layout, s.demand.growth)
        gains = [_gain(old, new) for old, new, ratio in _measures(before, after, ttft, tpot) if ratio > limit]
        mends = all(
            ratio * (1 - _gain(old, new)) <= limit for old, new, ratio in _measures(before, after, ttft, tpot)
        )
        if min(gains) >= s.config.feedback_min_gain:
            options.append((entry, min(gains), mends))
    if not options:
        return Wish(s.snapshot.layout, _why_not(s, Reason.SLO_INFEASIBLE))
    options = [option for option in options if option[0].devices > s.observed.devices] or options
    mending = [option for option in options if option[2]]
    if mending:
        entry, gain, _ = min(mending, key=lambda option: (option[0].devices, -option[1]))
    else:
        entry, gain, _ = max(options, key=lambda option: (round(option[1], 2), -option[0].devices))
    if entry.devices == s.observed.devices:
        return Wish(entry.layout, Reason.SIDEWAYS, gain=gain)
    revives = _can_revive(s.snapshot, entry)
    return Wish(entry.layout, Reason.REVIVE if revives else Reason.GROW_FEEDBACK, forced=True, gain=gain)


def shrink_allowed(s: Scene) -> bool:
    """Load is low and latencies are good: a smaller layout may do. To be sustained."""
    if s.config.objective != "efficiency" or s.snapshot.waiting.needs_devices or misses(s):
        return False
    if s.table.load(s.snapshot.layout, s.demand.slow) >= s.config.shrink_load:
        return False
    return any(_smaller(s, s.demand.growth))


def smaller(s: Scene, peak: float) -> Entry | None:
    """The fewest devices, below those in use, that would carry the slow demand under `shrink_load`, N/(N−1)
    included, would not have had to grow at `peak`, and hold what runs: streams outlive their arrivals."""
    enough = list(_smaller(s, peak))
    devices = min((entry.devices for entry in enough), default=0)
    return _best(s, [entry for entry in enough if entry.devices == devices]) if enough else None


def _smaller(s: Scene, peak: float) -> Iterator[Entry]:
    observed, config, table = s.observed, s.config, s.table
    load = table.load(observed.layout, s.demand.slow)
    for entry in s.candidates:
        if (
            entry.devices < observed.devices
            and load * observed.devices / entry.devices <= config.shrink_load
            and table.load(entry.layout, s.demand.slow) <= config.shrink_load
            and table.load(entry.layout, peak) <= config.target_utilisation
            and table.holds(entry.layout, s.snapshot.running)
        ):
            yield entry


def better_shape(s: Scene) -> Wish | None:
    """Another layout with a clear gain: on as many devices, or on any number of them when the objective is
    not to save devices. To be sustained."""
    observed = s.observed
    spare = s.config.objective == "efficiency"
    limit = max(s.config.target_utilisation, s.table.load(observed.layout, s.demand.growth))
    options = [
        entry
        for entry in s.candidates
        if (entry.devices == observed.devices or not spare)
        and entry.layout != observed.layout
        and s.table.load(entry.layout, s.demand.growth) <= limit
    ]
    if not options:
        return None
    best = _best(s, options)
    gain = _gain(s.score(observed.layout), s.score(best.layout))
    if gain < s.config.sideways_gain:
        return None
    if best.devices == observed.devices:
        return Wish(best.layout, Reason.SIDEWAYS, gain=gain)
    grows = best.devices > observed.devices
    return Wish(best.layout, Reason.GROW_PREDICTED if grows else Reason.SHRINK, gain=gain)


def ttft_ratio(snapshot: PoolSnapshot, config: ControlConfig) -> float:
    """TTFT ÷ target: the measured quantile, or what those without a first token have waited already. While a
    switch is under way or domains drain only the latter counts: old and new share devices, and that will
    end."""
    worst = snapshot.waiting.worst_ttft_ratio
    return worst if _unsettled(snapshot) else max(_quantile(snapshot.ttft, config), worst)


def tpot_ratio(snapshot: PoolSnapshot, config: ControlConfig) -> float:
    """TPOT ÷ target; not while a switch is under way or domains drain."""
    return 0.0 if _unsettled(snapshot) else _quantile(snapshot.tpot, config)


def _unsettled(snapshot: PoolSnapshot) -> bool:
    return bool(snapshot.draining) or snapshot.switch is not None


def _quantile(digest: Digest, config: ControlConfig) -> float:
    if digest.count < config.feedback_min_samples:
        return 0.0
    return digest.p99 if digest.count >= config.p99_min_samples else digest.p90


def _measures(
    before: Predicted, after: Predicted, ttft: float, tpot: float
) -> tuple[tuple[float, float, float], ...]:
    return (before.ttft_s, after.ttft_s, ttft), (before.tpot_high_s, after.tpot_high_s, tpot)


def _gain(before: float, after: float) -> float:
    """Part of `before` that is saved; 1 where before is beyond all measure and after is not."""
    if before == after:
        return 0.0
    return 1 - after / before if before < float("inf") else 1.0


def _capacity_gain(s: Scene, entry: Entry) -> float:
    """How much more it carries; the reciprocal of what is then saved in load."""
    before, after = s.table.capacity(s.snapshot.layout), s.table.capacity(entry.layout)
    if before <= 0:
        return 10.0 if after > 0 else 0.0
    return after / before - 1


def _why_not(s: Scene, otherwise: Reason = Reason.NO_GAIN) -> Reason:
    """Why nothing better can be had: devices are away, or what they could do is barred, or would not help."""
    if s.wider:
        return Reason.NO_DEVICES
    return Reason.BARRED if s.barred else otherwise


def most_capable(s: Scene) -> Entry:
    """The fewest devices with nearly the most capacity."""
    most = max(s.table.capacity(entry.layout) for entry in s.candidates)
    near = [entry for entry in s.candidates if s.table.capacity(entry.layout) >= _NEARLY * most]
    devices = min(entry.devices for entry in near)
    return _best(s, [entry for entry in near if entry.devices == devices])


def _best(s: Scene, entries: Sequence[Entry]) -> Entry:
    """The best score; the observed layout and fewer domains win ties."""
    scores = {entry.layout: s.score(entry.layout) for entry in entries}
    least = min(scores.values())
    ties = [entry for entry in entries if scores[entry.layout] <= least * (1 + _BETTER)]
    return min(ties, key=lambda e: (e.layout != s.snapshot.layout, e.devices, len(e.shapes), e.layout))


def _revivable(s: Scene, best: Entry) -> Entry | None:
    """A larger layout that draining domains give back at once, if it is about as good as `best`."""
    if not s.snapshot.draining:
        return None
    least = _REVIVE_SLACK * min(s.table.capacity(best.layout), s.demand.growth / s.config.target_utilisation)
    options = [
        entry
        for entry in s.candidates
        if entry.devices > s.observed.devices
        and s.table.capacity(entry.layout) >= least
        and _can_revive(s.snapshot, entry)
    ]
    return _best(s, options) if options else None


def _can_revive(snapshot: PoolSnapshot, entry: Entry) -> bool:
    """Its domains serve or drain now, at least one of them draining."""
    have = Counter(str(shape) for shape in LayoutSpec.parse(snapshot.layout).shapes)
    wanted = Counter(f"tp{tp}" for tp in entry.shapes)
    missing = wanted - have
    return bool(missing) and not missing - Counter(snapshot.draining)
