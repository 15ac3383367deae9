"""What a benchmark keeps: runs as plain values, written as JSON and read back for another report.

All times of a run are seconds after its schedule's origin. Prompts and answers are not kept: the seed and
the schedule's digest stand for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from dynamictp.bench.admin import Switch
from dynamictp.bench.result import Result
from dynamictp.errors import ConfigError

SCHEMA = "dynamictp-bench/1"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. `layout` is `GET /admin/layout`, None for other servers.

    Metrics are samples of `/metrics` without histogram buckets, before and after the load.
    """

    url: str
    model: str
    owned_by: str = ""
    version: str = ""
    max_model_len: int | None = None
    tokenizes: bool = False
    layout: Mapping[str, Any] | None = None
    command: tuple[str, ...] = ()
    metrics_before: Mapping[str, float] = field(default_factory=dict)
    metrics_after: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_dynamictp(self) -> bool:
        return self.owned_by == "dynamictp"


@dataclass(frozen=True, slots=True)
class LayoutSample:
    """One look at `GET /admin/layout`; `switch` names the one in flight, if any."""

    t_s: float
    layout: str
    running: int
    waiting: int
    switch: str = ""


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """The load generator during the load: its own processor time as a share of one core."""

    cpu_share: float
    machine: str
    python: str


@dataclass(frozen=True, slots=True)
class Run:
    """One play of the schedule against one server.

    `load_s`: the time in which requests were due; `end_s`: when load and last request were over. `unsent`:
    requests that never were due, because the turn before them failed or the load was over. `users` is 0 in
    an open loop.
    """

    label: str
    started_at: str
    server: ServerFacts
    client: ClientFacts
    load_s: float
    end_s: float
    results: tuple[Result, ...]
    unsent: int = 0
    users: int = 0
    samples: tuple[LayoutSample, ...] = ()
    switches: tuple[Switch, ...] = ()
    origin_s: float = 0.0
    """The origin on the machine's monotonic clock, by which other records of that machine can be joined."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds; goodput counts requests that meet both. `overrides` are by class or tenant.

    The TTFT target grows by `ttft_per_token_s` for every token of the prompt.
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.1
    overrides: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ttft_per_token_s: float = 0.0

    def of(self, result: Result) -> tuple[float, float]:
        """(TTFT, TPOT) target of a request; a tenant's override goes before its class's."""
        request = result.request
        own = (self.ttft_s, self.tpot_s)
        return self.overrides.get(request.tenant, self.overrides.get(request.traffic_class, own))

    def met(self, result: Result) -> bool:
        """Whether a finished request met its targets; one token has no TPOT to miss."""
        ttft_s, tpot_s = self.of(result)
        ttft_s += self.ttft_per_token_s * (result.prompt_tokens or result.request.prompt_tokens or 0)
        if result.failure is not None or result.ttft_s is None or result.ttft_s > ttft_s:
            return False
        return result.tpot_s is None or result.tpot_s <= tpot_s


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark: a workload, how its text was counted, and its runs. `workload` are plain values.

    `shortened` requests were cut to the context, `lengthened` prompts are longer than planned because of
    the chat template.
    """

    workload: Mapping[str, Any]
    seed: int
    plan_digest: str
    schedule_digest: str
    exactness: str
    shortened: int
    lengthened: int
    slo: Slo
    runs: tuple[Run, ...]
    version: str
    schema: str = SCHEMA


def relative(results: Sequence[Result], origin_s: float) -> tuple[Result, ...]:
    """Results on the run's time, without texts."""
    return tuple(
        replace(
            result,
            request=replace(result.request, prompt="", history=()),
            intended_s=result.intended_s - origin_s,
            sent_s=result.sent_s - origin_s,
            end_s=result.end_s - origin_s,
            chunk_s=tuple(round(at_s - origin_s, 6) for at_s in result.chunk_s),
            text="",
            token_ids=(),
        )
        for result in results
    )


def write_json(bench: Bench, summary: object, path: Path) -> None:
    """Everything, and a `summary` for readers that want the figures only."""
    plain = {**msgspec.to_builtins(bench), "summary": msgspec.to_builtins(summary)}
    path.write_bytes(msgspec.json.encode(plain) + b"\n")


def read_json(path: Path) -> Bench:
    """Raises ConfigError when `path` isn't a benchmark of this program's."""
    try:
        bench = msgspec.json.decode(path.read_bytes(), type=Bench)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no benchmark result: {error}") from error
    if bench.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {bench.schema}; this program reads {SCHEMA}")
    return bench
