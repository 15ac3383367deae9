"""Arrivals to demand: averages, bursts, forecast, and the lengths of requests. Pure."""

from __future__ import annotations

import math

import msgspec

from dynamictp.control.config import ControlConfig
from dynamictp.control.values import Arrivals, PoolSnapshot
from dynamictp.cost.lengths import MAX_P95_OVER_MEAN, Lengths, RequestClass, Workload

_WINDOW_S = 2.0
"""Window whose weight in the average is `ewma_alpha`."""
_HISTORY_S = 10.0
_TREND_SIGMAS = 2.5
_LEVEL_SIGMAS = 3.0
_NOTHING = math.exp(-3)
"""A slow rate of fewer requests in its time constant counts as 0. One request is forgotten after three time
constants, n of them after 3 + ln n. The average itself never reaches 0, and any load at all keeps the planner
from a layout that can't hold the SLO of a single request."""
_DISPERSION_S = 120.0
_MOST_DISPERSION = 4.0
"""A single window counts as at most so much burstier than usual: it may be a step."""
_MOST_TREND = 1.25
"""A trend never forecasts more than this times what is arriving now: a step is no ramp."""
_LENGTH_STEP = 0.2
"""Lengths of a profile are powers of e^0.2."""
_MEAN_STEPS, _P90_STEPS = 1.0, 1.75
"""It is replaced when a length is more than so many steps off: quantiles of few requests scatter more."""
_MANY_OUTPUTS = 50
_LENGTH_WEIGHT = 0.3
"""Weight of new lengths beside that of new arrivals: lengths scatter more than they change."""
_Z90, _Z95 = 1.2816, 1.6449
_MOST_P90_OVER_MEAN = math.exp(_Z90**2 / 2) * 0.999


class Profile(msgspec.Struct, frozen=True):
    """Lengths that capacities are computed for, rounded so that tables last. Tokens."""

    prompt_mean: float
    prompt_p90: float
    output_mean: float
    output_p90: float
    hit_share: float = 0.0
    """Part of the prompts' tokens that need not be computed."""

    def workload(self) -> Workload:
        """As log-normal distributions with these means and quantiles."""
        return Workload(
            "observed",
            (
                RequestClass(
                    "observed",
                    _lengths(self.prompt_mean, self.prompt_p90),
                    _lengths(self.output_mean, self.output_p90),
                ),
            ),
        )

    @property
    def prompt_nodes(self) -> tuple[float, ...]:
        """Lengths of the prompts in the bins of `workload`."""
        return tuple(node.tokens for node in self.workload().prompts)


class LengthAverages(msgspec.Struct, frozen=True):
    """Running averages of what `Profile` rounds. Tokens, zero while unknown."""

    prompt_mean: float = 0.0
    prompt_p90: float = 0.0
    output_mean: float = 0.0
    output_p90: float = 0.0
    hit_share: float = 0.0


class TrafficState(msgspec.Struct, frozen=True):
    """What the planner remembers of arrivals. Requests per second."""

    time_s: float | None = None
    began_s: float = 0.0
    average: float = 0.0
    """EWMA of the rate over 2 s."""
    slow: float = 0.0
    dispersion: float = 1.0
    """Variance ÷ mean of the requests in 2 s, 1 for Poisson arrivals."""
    counts: tuple[tuple[float, int, float], ...] = ()
    """(time, requests, window) of the 10 s window, for the last 10 s."""
    lengths: LengthAverages = LengthAverages()
    profile: Profile | None = None


class Demand(msgspec.Struct, frozen=True):
    """Arriving work as a rate of requests like the profile's. Requests per second."""

    now: float
    """Over the last 2 s."""
    average: float
    forecast: float
    """Expected in `horizon_s`."""
    slow: float
    """By an average over `slow_s`; 0 once nothing has arrived for a few times as long."""
    backlog: float
    """Waiting work ÷ horizon."""
    growth: float
    """What growth is decided on: max(burst, forecast) + backlog."""


def observe(state: TrafficState, snapshot: PoolSnapshot, config: ControlConfig) -> TrafficState:
    """The state after one more snapshot."""
    now, longer = snapshot.time_s, snapshot.arrivals_10s
    began = now if state.time_s is None else state.began_s
    elapsed = _WINDOW_S if state.time_s is None else max(now - state.time_s, 0.0)
    # Where looks are further apart than the short window, it misses what came between.
    recent = snapshot.arrivals_2s if elapsed <= _WINDOW_S + 1e-6 else longer
    rate = _rate(recent)
    # At the beginning these are plain means; later they forget.
    least = elapsed / (now - began + _WINDOW_S)
    weight = max(least, 1 - (1 - config.ewma_alpha) ** (elapsed / _WINDOW_S))
    slow_weight = max(least, 1 - math.exp(-elapsed / config.slow_s))
    usual = state.average * recent.window_s
    spread = state.dispersion
    if usual > 0:
        seen = min((recent.requests - usual) ** 2 / max(usual, 1.0), _MOST_DISPERSION * max(spread, 1.0))
        spread += min(elapsed, _WINDOW_S) / _DISPERSION_S * (seen - spread)
    kept = tuple(entry for entry in state.counts if entry[0] >= now - _HISTORY_S - 1e-6)
    lengths = _averaged(state.lengths, snapshot, max(least, weight * _LENGTH_WEIGHT))
    return TrafficState(
        time_s=now,
        began_s=began,
        average=state.average + weight * (rate - state.average),
        slow=state.slow + slow_weight * (rate - state.slow),
        dispersion=spread,
        counts=(*kept, (now, longer.requests, longer.window_s)),
        lengths=lengths,
        profile=_profile(state.profile, lengths, config),
    )


def demand(state: TrafficState, snapshot: PoolSnapshot, config: ControlConfig, prompt_share: float) -> Demand:
    """What arrives, in requests like the profile's; `prompt_share` of one's work is its prompt."""
    profile = state.profile
    assert profile is not None, "observe() comes first"
    recent = snapshot.arrivals_2s
    heavier = _work(recent.prompt_tokens_mean, recent.requests, profile, prompt_share)
    rate = _rate(recent)
    forecast = _forecast(state, snapshot, config)
    usual = min(state.average, state.slow) * recent.window_s
    burst = _is_burst(recent.requests, usual, state.dispersion, config)
    waiting = snapshot.waiting
    each = waiting.prompt_tokens / waiting.requests if waiting.requests else 0.0
    backlog = waiting.requests * _work(each, waiting.requests, profile, prompt_share) / config.horizon_s
    growth = max(rate * heavier if burst else 0.0, forecast * max(heavier, 1.0) if burst else forecast)
    return Demand(
        now=rate,
        average=state.average,
        forecast=forecast,
        slow=state.slow if state.slow * config.slow_s >= _NOTHING else 0.0,
        backlog=backlog,
        growth=growth + backlog,
    )


def _rate(window: Arrivals) -> float:
    """Requests per second; a window that is not full yet counts as full, so that one request is no burst."""
    return window.requests / max(window.window_s, _WINDOW_S)


def _is_burst(requests: int, usual: float, dispersion: float, config: ControlConfig) -> bool:
    """More than chance explains: 2·√N of a Poisson N has a standard deviation of about 1 (Anscombe 1948),
    √dispersion for burstier arrivals."""
    sigmas = config.burst_sigmas * math.sqrt(max(dispersion, 1.0))
    return 2 * (math.sqrt(requests) - math.sqrt(usual)) > sigmas


def _work(prompt_mean: float, requests: int, profile: Profile, prompt_share: float) -> float:
    """Work of such requests in requests like the profile's: prompts count by length."""
    if not requests or prompt_mean <= 0:
        return 1.0
    return 1 + prompt_share * (prompt_mean / profile.prompt_mean - 1)


def _forecast(state: TrafficState, snapshot: PoolSnapshot, config: ControlConfig) -> float:
    """The present level, and the trend of the last two 10 s windows so far as it is significant.

    Counts differ by chance by √(N₀ + N₁); only what is far beyond that is a trend, and none where the last
    2 s say that it is over.
    """
    level = _level(state, config)
    longer, recent = snapshot.arrivals_10s, snapshot.arrivals_2s
    time_s, before, window = state.counts[0]
    if snapshot.time_s - time_s < 0.9 * _HISTORY_S or min(window, longer.window_s) < 0.9 * _HISTORY_S:
        return level
    change = longer.requests - before
    chance = _TREND_SIGMAS * math.sqrt((longer.requests + before) * max(state.dispersion, 1.0))
    sure = math.copysign(max(abs(change) - chance, 0.0), change)
    if not sure:
        return level
    rate, rate_now = longer.requests / longer.window_s, _rate(recent)
    slope = sure / longer.window_s / (snapshot.time_s - time_s)
    slope_now = (rate_now - rate) / ((longer.window_s - recent.window_s) / 2)
    slope = min(slope, max(slope_now, 0.0)) if slope > 0 else max(slope, min(slope_now, 0.0))
    line = level + slope * (longer.window_s / 2 + config.horizon_s)
    return min(max(line, 0.0), _MOST_TREND * max(rate_now, rate, state.average))


def _level(state: TrafficState, config: ControlConfig) -> float:
    """The average where it is surely above the slow one, else the lower of the two, less what is uncertain.

    An EWMA of weight α over counts of 2 s scatters by √(α/(2−α)) of what one count does; the slow average is
    one over about two time constants.
    """
    alpha, average, slow = config.ewma_alpha, state.average, min(state.average, state.slow)
    assert state.time_s is not None
    age_s = min(state.time_s - state.began_s + _WINDOW_S, 2 * config.slow_s)
    dispersion = max(state.dispersion, 1.0)
    scatter = math.sqrt(alpha / (2 - alpha) * average * dispersion / _WINDOW_S)
    slow_scatter = math.sqrt(slow * dispersion / age_s)
    return max(average - _LEVEL_SIGMAS * scatter, slow - slow_scatter, 0.0)


def _averaged(old: LengthAverages, snapshot: PoolSnapshot, weight: float) -> LengthAverages:
    longer, outputs, running = snapshot.arrivals_10s, snapshot.outputs, snapshot.running
    new = old
    if longer.requests and longer.prompt_tokens_mean > 0:
        # Few requests say little: a window counts in full from ten on.
        share = weight * min(1.0, longer.requests / 10) if old.prompt_mean else 1.0
        new = msgspec.structs.replace(
            new,
            prompt_mean=_towards(old.prompt_mean, longer.prompt_tokens_mean, share),
            prompt_p90=_towards(old.prompt_p90, longer.prompt_tokens_p90, share),
        )
    if outputs.requests:
        share = weight * min(1.0, outputs.requests / 10) if old.output_mean else 1.0
        new = msgspec.structs.replace(
            new,
            output_mean=_towards(old.output_mean, outputs.tokens_mean, share),
            output_p90=_towards(old.output_p90, outputs.tokens_p90, share),
        )
    if outputs.requests < _MANY_OUTPUTS and running.generated_mean > new.output_mean:
        # Nothing finishes, or only short ones have so far: outputs are at least as long as they are already.
        most = 2 * new.output_mean if outputs.requests else running.generated_mean
        longer_mean = min(running.generated_mean, most)
        new = msgspec.structs.replace(new, output_mean=longer_mean)
    return msgspec.structs.replace(new, hit_share=_towards(old.hit_share, snapshot.prefix_hit_share, weight))


def _towards(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)


def _profile(old: Profile | None, lengths: LengthAverages, config: ControlConfig) -> Profile:
    prompt = lengths.prompt_mean or config.assumed_prompt_tokens
    output = lengths.output_mean or config.assumed_output_tokens
    fresh = (
        prompt,
        max(lengths.prompt_p90, prompt),
        max(output, config.assumed_output_tokens) if not lengths.output_mean else output,
        max(lengths.output_p90, output),
    )
    hits = min(max(lengths.hit_share, 0.0), 0.95)
    if old is not None and abs(hits - old.hit_share) < 0.075:
        before = (old.prompt_mean, old.prompt_p90, old.output_mean, old.output_p90)
        bounds = (_MEAN_STEPS, _P90_STEPS, _MEAN_STEPS, _P90_STEPS)
        if all(
            abs(math.log(new / known)) <= steps * _LENGTH_STEP
            for new, known, steps in zip(fresh, before, bounds, strict=True)
        ):
            return old
    prompt, prompt_p90, output, output_p90 = map(_rounded, fresh)
    return Profile(prompt, prompt_p90, output, output_p90, round(20 * hits) / 20)


def _rounded(tokens: float) -> float:
    return max(1.0, math.exp(round(math.log(max(tokens, 1.0)) / _LENGTH_STEP) * _LENGTH_STEP))


def _lengths(mean: float, p90: float) -> Lengths:
    """Log-normal with that mean and P90: ln P90 − ln mean = z·σ − σ²/2, the smaller root."""
    ratio = min(max(p90 / mean, 1.0), _MOST_P90_OVER_MEAN)
    sigma = _Z90 - math.sqrt(max(0.0, _Z90**2 - 2 * math.log(ratio)))
    p95 = mean * min(math.exp(_Z95 * sigma - sigma**2 / 2), MAX_P95_OVER_MEAN * 0.999)
    return Lengths(mean, max(p95, mean))
