"""Every parameter of the control plane: one frozen value, with range, effect and whether it can be reloaded.

`docs/control-parameters.md` is made from the metadata here. Units are in the names; shares are fractions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamictp.errors import ConfigError

Objective = Literal["efficiency", "latency", "throughput"]
FIXED = {"reload": False}
MIN_TTFT_S = 1e-3
MIN_TPOT_MS = 1e-3
"""Latencies are divided by their targets, so one next to 0 would overflow."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Service level objective of a request."""

    ttft_p99_s: Annotated[
        float, Meta(ge=MIN_TTFT_S, le=3600, description="Target of the time to first token.")
    ] = 2.0
    ttft_per_token_ms: Annotated[
        float, Meta(ge=0, le=1000, description="Added to the TTFT target for every prompt token.")
    ] = 0.0
    tpot_p99_ms: Annotated[
        float,
        Meta(ge=MIN_TPOT_MS, le=60_000, description="Target of a request's mean time per output token."),
    ] = 100.0

    def ttft_target_s(self, prompt_tokens: float) -> float:
        return self.ttft_p99_s + self.ttft_per_token_ms * 1e-3 * prompt_tokens

    @property
    def tpot_target_s(self) -> float:
        return self.tpot_p99_ms * 1e-3


class SloOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Targets that differ for one class or tenant; None: as everyone's."""

    ttft_p99_s: Annotated[float, Meta(ge=MIN_TTFT_S, le=3600)] | None = None
    ttft_per_token_ms: Annotated[float, Meta(ge=0, le=1000)] | None = None
    tpot_p99_ms: Annotated[float, Meta(ge=MIN_TPOT_MS, le=60_000)] | None = None

    def over(self, slo: Slo) -> Slo:
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(slo, **given)


class SloTable(Slo, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everyone's targets, and those of classes and tenants. A tenant's go over a class's."""

    classes: dict[str, SloOverride] = {}
    tenants: dict[str, SloOverride] = {}

    def of(self, request_class: str = "", tenant: str = "") -> Slo:
        """Targets of a request."""
        slo: Slo = self
        for override in (self.classes.get(request_class), self.tenants.get(tenant)):
            if override is not None:
                slo = override.over(slo)
        return slo


class ControlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All parameters of planner, router, ramp and pool. Nothing writes into it: a reload is a new value."""

    slo: SloTable = SloTable()
    objective: Annotated[
        Objective,
        Meta(
            description="`efficiency`: the fewest devices that hold the SLO. `latency`: of all layouts the "
            "one that answers soonest. `throughput`: the one that carries most."
        ),
    ] = "efficiency"
    interval_s: Annotated[
        float, Meta(ge=0.05, le=60, description="Time between two decisions.", extra=FIXED)
    ] = 0.5
    min_devices: Annotated[
        int, Meta(ge=1, le=1024, description="The planner never goes below this number of devices.")
    ] = 1
    max_devices: Annotated[int, Meta(ge=0, le=1024, description="Nor above this one; 0: all there are.")] = 0
    # Prediction (C3)
    ewma_alpha: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Weight of the newest 2 s in the average arrival rate; 0.2 to 0.3 is sensible.",
        ),
    ] = 0.25
    horizon_s: Annotated[
        float,
        Meta(
            ge=1,
            le=600,
            description="How far ahead arrivals are forecast; a backlog should be gone in that time.",
        ),
    ] = 10.0
    target_utilisation: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Load up to which a layout is enough. 0.4 wastes devices, 0.6 reacts late.",
        ),
    ] = 0.5
    burst_sigmas: Annotated[
        float,
        Meta(
            ge=0,
            le=10,
            description="How far the last 2 s must lie above the average to count as a burst, in standard "
            "deviations of the arrivals' usual scatter.",
        ),
    ] = 3.5
    assumed_output_tokens: Annotated[
        float, Meta(ge=1, le=1_000_000, description="Length of outputs until some have finished.")
    ] = 128.0
    assumed_prompt_tokens: Annotated[
        float, Meta(ge=1, le=1_000_000, description="Length of prompts until some have arrived.")
    ] = 256.0
    # Feedback (C4)
    feedback_threshold: Annotated[
        float,
        Meta(gt=0, le=10, description="Measured ÷ target latency above which growth is forced."),
    ] = 0.8
    feedback_min_gain: Annotated[
        float,
        Meta(ge=0, le=1, description="Smallest predicted improvement for which feedback grows."),
    ] = 0.10
    feedback_window_s: Annotated[
        float, Meta(ge=1, le=3600, description="Age up to which latency samples count.")
    ] = 60.0
    feedback_min_samples: Annotated[int, Meta(ge=1, le=100_000, description="Fewer samples say nothing.")] = (
        10
    )
    p99_min_samples: Annotated[
        int, Meta(ge=1, le=1_000_000, description="With fewer samples P90 stands for P99.")
    ] = 100
    # Stability (C5)
    shrink_load: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Load below which devices may be given back, also after the shrink (N/(N−1)).",
        ),
    ] = 0.4
    shrink_after_s: Annotated[
        float, Meta(ge=0, le=86_400, description="How long a shrink must have been possible all the time.")
    ] = 300.0
    slow_window_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="Time constant of the slow arrival rate that shrinks use; a quarter of "
            "`shrink_after_s` where that is shorter.",
        ),
    ] = 60.0
    consecutive: Annotated[
        int, Meta(ge=1, le=1000, description="Decisions in a row that must want a shrink or sideways move.")
    ] = 3
    sideways_gain: Annotated[
        float, Meta(ge=0, le=10, description="Smallest predicted gain of another shape on as many devices.")
    ] = 0.15
    sideways_after_s: Annotated[float, Meta(ge=0, le=86_400, description="How long that gain must last.")] = (
        30.0
    )
    min_interval_s: Annotated[
        float,
        Meta(ge=0, le=86_400, description="Least time between switches. Forced growth ignores it."),
    ] = 10.0
    switches_per_hour: Annotated[
        int, Meta(ge=0, le=3600, description="Most unforced switches in any hour.")
    ] = 10
    shrink_backoff_max: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="Growth within `shrink_after_s` of a shrink doubles the time that the next must be "
            "sustained, at most this often.",
        ),
    ] = 3
    # Calibration
    calibration_clamp: Annotated[
        float,
        Meta(gt=1, le=100, description="Largest correction of the cost model, either way; at it, an alarm."),
    ] = 4.0
    # Router (C6)
    long_prompt_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Prompts from this length on lean to the widest domain, those up to a quarter of "
            "it to a narrow one.",
            extra=FIXED,
        ),
    ] = 1024
    # Ramp (C7, design 9)
    ramp_observe_s: Annotated[float, Meta(ge=0, le=600, description="Time at each step of a ramp.")] = 2.0
    ramp_settle_s: Annotated[
        float, Meta(ge=0, le=600, description="Time at 100 % before the old domains drain.")
    ] = 2.0
    ramp_steps: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=1)], ...],
        Meta(min_length=1, description="Share of new requests for the new side, step by step; ends at 1."),
    ] = (0.1, 0.25, 0.5, 1.0)
    ramp_gate_samples: Annotated[
        int, Meta(ge=1, le=100_000, description="Finished requests a side that the latency gate needs.")
    ] = 20
    ramp_gate_ratio: Annotated[
        float,
        Meta(ge=1, le=100, description="New ÷ old side of measured ÷ predicted P95 that rolls a ramp back."),
    ] = 1.5
    bar_s: Annotated[
        float,
        Meta(ge=0, le=86_400, description="First bar of a target that was rolled back; doubles."),
    ] = 60.0
    drain_deadline_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="How long requests on an old domain may go on there before they are handed over.",
        ),
    ] = 0.0
    # Pool (C8, C9)
    reserve_ahead_s: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="How long devices that the forecast needs are kept from being leased, from the last "
            "decision that said so.",
        ),
    ] = 3.0
    # Journal
    journal_entries: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Decisions kept in memory.", extra=FIXED)
    ] = 7200

    @property
    def slow_s(self) -> float:
        """Time constant of the slow arrival rate."""
        return max(min(self.slow_window_s, self.shrink_after_s / 4), 1.0)


def build_control(values: Mapping[str, Any]) -> ControlConfig:
    """A configuration from plain values (YAML, flags). Raises `ConfigError` that names the key."""
    try:
        config = msgspec.convert(values, ControlConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"control plane: {error}".replace("`$.", "`").replace(" - at `$`", "")) from error
    check_control(config)
    return config


def check_control(config: ControlConfig) -> None:
    """Conditions between parameters. Raises `ConfigError`."""
    if config.max_devices and config.max_devices < config.min_devices:
        raise ConfigError(f"max_devices {config.max_devices} is below min_devices {config.min_devices}")
    if config.shrink_load >= config.target_utilisation:
        raise ConfigError(
            f"shrink_load {config.shrink_load:g} must be below target_utilisation "
            f"{config.target_utilisation:g}, else the layout would swing"
        )
    steps = config.ramp_steps
    if not steps or steps[-1] != 1.0 or list(steps) != sorted(set(steps)):
        raise ConfigError(f"ramp_steps must rise and end at 1, not {steps}")


def check_pool(config: ControlConfig, devices: int) -> None:
    """Parameters against the number of devices of the pool. Raises `ConfigError`."""
    for name, wanted in (("min_devices", config.min_devices), ("max_devices", config.max_devices)):
        if wanted > devices:
            raise ConfigError(f"{name} {wanted} is more than the pool has: {devices}")


def reloaded(old: ControlConfig, new: ControlConfig) -> ControlConfig:
    """`new`, if it differs from `old` only where a running server can follow. Raises `ConfigError`."""
    for field in fixed_fields():
        if getattr(old, field) != getattr(new, field):
            raise ConfigError(f"{field} can't be changed while the server runs; restart it")
    return new


def fixed_fields() -> tuple[str, ...]:
    """Fields that a reload can't change."""
    return tuple(parameter.name for parameter in parameters(ControlConfig) if not parameter.reload)


class Parameter(msgspec.Struct, frozen=True):
    """A field as a reference page shows it."""

    name: str
    default: str
    range: str
    reload: bool
    effect: str


def parameters(kind: type[msgspec.Struct]) -> Iterator[Parameter]:
    """Fields that have a described effect, in order."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        if isinstance(field.type, msgspec.inspect.Metadata) and field.type.extra_json_schema:
            yield Parameter(
                field.name,
                _text(field.default),
                _range(field.type.type),
                (field.type.extra or {}) != FIXED,
                field.type.extra_json_schema["description"],
            )


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _range(kind: msgspec.inspect.Type) -> str:
    if isinstance(kind, msgspec.inspect.LiteralType):
        return ", ".join(map(str, kind.values))
    if isinstance(kind, msgspec.inspect.VarTupleType):
        inner = kind.item_type
        return "each " + _range(inner.type if isinstance(inner, msgspec.inspect.Metadata) else inner)
    low = getattr(kind, "ge", None)
    above, high = getattr(kind, "gt", None), getattr(kind, "le", None)
    start = f"above {above:g}" if above is not None else f"{low:g}"
    return f"{start} to {high:g}"
