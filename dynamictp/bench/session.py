"""A benchmark of one server: look at it, make the text, warm it up, play, keep what was seen."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from dynamictp.bench.admin import Admin, Switch, base_url
from dynamictp.bench.client import Client
from dynamictp.bench.live import Counters
from dynamictp.bench.machine import describe_machine
from dynamictp.bench.player import quiet_collector, run_closed, run_schedule
from dynamictp.bench.probe import http_client, probe, scrape
from dynamictp.bench.record import ClientFacts, Run, ServerFacts, relative
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request, schedule_digest
from dynamictp.bench.watcher import LayoutWatcher
from dynamictp.bench.workload.classes import Workload
from dynamictp.bench.workload.plan import Plan, make_plan
from dynamictp.bench.workload.text import TextMaker, WordStream
from dynamictp.bench.workload.tokens import (
    Exactness,
    FileCounter,
    ServerCounter,
    TokenCounter,
    calibrated,
)
from dynamictp.clock import SystemClock
from dynamictp.errors import FatalError

# Between the last preparation and the first request.
_HEAD_START_S = 0.2
_WARMUP_USERS = 2
_CALIBRATION_WORDS = (20, 220)


@dataclass(frozen=True, slots=True)
class Options:
    """How to play. `drain_s`: how long after the load running requests may finish before they are cut.

    `ignore_eos` None: where the server is known to take it (then outputs have the planned length).
    `changes`: (seconds, layout) to set during the run. `admin_url`, `admin_key`: of the admin interface,
    where they are not those of the API. Keys are never kept in a record.
    """

    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    admin_url: str | None = None
    admin_key: str | None = field(default=None, repr=False)
    tenant_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 120.0
    drain_s: float = 30.0
    warmup: int = 4
    ignore_eos: bool | None = None
    tokenizer: Path | None = None
    changes: tuple[tuple[float, str], ...] = ()

    def admin_of(self, url: str) -> tuple[str, str | None]:
        """Address and key of the admin interface of the server at `url`, and of its metrics."""
        return base_url(self.admin_url or url), self.admin_key or self.api_key


@dataclass(frozen=True, slots=True)
class Prepared:
    """A workload with its text: what every server of a comparison gets, byte for byte.

    `lengthened` prompts were planned shorter than what comes before and around their first word.
    """

    workload: Workload
    plan: Plan
    schedule: tuple[Request, ...]
    warmup: tuple[Request, ...]
    digest: str
    exactness: Exactness
    lengthened: int = 0


async def look(url: str, options: Options) -> ServerFacts:
    """Facts of the server. Raises FatalError when there is none."""
    async with http_client(url, options.api_key) as http, http_client(*options.admin_of(url)) as admin:
        return await probe(http, options.model, admin)


async def prepare(
    workload: Workload,
    facts: ServerFacts,
    options: Options,
    on_progress: Callable[[int], None] | None = None,
) -> Prepared:
    """Makes plan and text for the server's tokenizer and context. `on_progress` gets requests made."""
    if facts.max_model_len is not None and not workload.longest_tokens:
        workload = replace(workload, longest_tokens=facts.max_model_len)
    plan = make_plan(workload)
    extra: dict[str, object] = {}
    if options.ignore_eos or (options.ignore_eos is None and facts.owned_by in ("dynamictp", "vllm")):
        extra["ignore_eos"] = True
    async with http_client(facts.url, options.api_key) as http:
        counter = await _counter(http, facts, options, workload)
        maker = TextMaker(counter, workload.seed)
        schedule = await maker.schedule(plan, workload.endpoint, extra, on_progress)
        warmup = await TextMaker(counter, workload.seed + 1).schedule(
            _warmup_plan(workload, options.warmup), workload.endpoint, extra
        )
    return Prepared(
        workload=workload,
        plan=plan,
        schedule=tuple(schedule),
        warmup=tuple(warmup),
        digest=schedule_digest(schedule),
        exactness=counter.exactness,
        lengthened=sum(
            (made.prompt_tokens or 0) > planned.prompt_tokens
            for made, planned in zip(schedule, plan.requests, strict=True)
        ),
    )


async def _counter(
    http: httpx.AsyncClient, facts: ServerFacts, options: Options, workload: Workload
) -> TokenCounter:
    if options.tokenizer is not None:
        return FileCounter(options.tokenizer)
    if facts.tokenizes:
        return ServerCounter(http, facts.model)
    sample = WordStream("calibration", workload.seed)
    texts = sample.text(_CALIBRATION_WORDS[0]), sample.text(_CALIBRATION_WORDS[1])
    return await calibrated(http, facts.model, workload.endpoint, texts)


def _warmup_plan(workload: Workload, count: int) -> Plan:
    """`count` requests of the same classes with texts of their own, so that they warm no prefix cache."""
    if not count:
        return Plan(())
    arrivals = f"closed:users={_WARMUP_USERS},requests={count}"
    single = replace(workload, arrivals=arrivals, seed=workload.seed + 1, tenants=(), prefixes=None)
    plan = make_plan(single)
    openings = tuple(replace(r, name=f"warmup-{r.name}") for r in plan.requests if not r.follows)
    return replace(plan, requests=openings)


async def play(
    label: str, facts: ServerFacts, prepared: Prepared, options: Options, counters: Counters
) -> Run:
    """Warms up, plays the schedule and the changes of layout.

    Raises FatalError when the warm-up gets no answer, or the server refuses a change.
    """
    return await _Play(facts, prepared, options, counters).run(label)


class _Play:
    """One run against one server. Owns the run's clock and the switches it made."""

    def __init__(self, facts: ServerFacts, prepared: Prepared, options: Options, counters: Counters) -> None:
        self._facts, self._prepared, self._options = facts, prepared, options
        self._counters = counters
        self._clock = SystemClock()
        self._switches: list[Switch] = []
        self._load_s = prepared.workload.duration_s

    async def run(self, label: str) -> Run:
        await self._warm_up()
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        clock = self._clock
        url, key = self._options.admin_of(self._facts.url)
        watcher = LayoutWatcher(url, key, clock)
        async with http_client(url, key) as http, Admin(url, clock=clock, key=key) as admin:
            before = await scrape(http)
            with quiet_collector():
                origin_s = clock.now() + _HEAD_START_S
                client = self._client(cut_s=origin_s + self._load_s + self._options.drain_s)
                self._counters.start(client, len(self._prepared.schedule), origin_s, self._load_s)
                # Of the whole process: the live view's work is the client's too.
                cpu_s, wall_s = time.process_time(), clock.now()
                results = await self._load(origin_s, admin, watcher)
                cpu_share = (time.process_time() - cpu_s) / (clock.now() - wall_s)
            facts = replace(self._facts, metrics_before=before, metrics_after=await scrape(http))
        return Run(
            label=label,
            started_at=started_at,
            server=facts,
            client=ClientFacts(cpu_share, str(describe_machine()), platform.python_version()),
            load_s=self._load_s,
            end_s=max(self._load_s, *(r.end_s - origin_s for r in results)),
            results=relative(results, origin_s),
            unsent=len(self._prepared.schedule) - len(results),
            users=self._prepared.plan.users,
            samples=tuple(watcher.samples),
            switches=tuple(_shifted(switch, origin_s) for switch in self._switches),
            origin_s=origin_s,
        )

    async def _load(self, origin_s: float, admin: Admin, watcher: LayoutWatcher) -> list[Result]:
        """The schedule, with the polling and the changes of layout beside it."""
        playing = asyncio.create_task(self._play(origin_s))
        changing = asyncio.create_task(self._change_layouts(origin_s, admin))
        helpers: list[asyncio.Task[Any]] = [playing, changing]
        if self._facts.layout is not None:
            helpers.append(asyncio.create_task(watcher.watch(origin_s)))
        try:
            # The first exception ends both: what a refused change leaves is not the run that was asked for.
            results, _ = await asyncio.gather(playing, changing)
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        return results

    async def _play(self, origin_s: float) -> list[Result]:
        schedule, plan, clock = self._prepared.schedule, self._prepared.plan, self._clock
        stop_s = origin_s + self._load_s
        if plan.users:
            await asyncio.sleep(max(origin_s - clock.now(), 0.0))
            return await run_closed(
                schedule, self._counters, clock, users=plan.users, think_s=plan.think_s, stop_s=stop_s
            )
        return await run_schedule(schedule, self._counters, clock, origin_s=origin_s, stop_s=stop_s)

    async def _change_layouts(self, origin_s: float, admin: Admin) -> None:
        for at_s, layout in self._options.changes:
            await asyncio.sleep(max(origin_s + at_s - self._clock.now(), 0.0))
            self._switches.append(await admin.set_layout(layout))

    async def _warm_up(self) -> None:
        if not self._prepared.warmup:
            return
        client = self._client(cut_s=None)
        results = await run_closed(
            self._prepared.warmup, client, self._clock, users=_WARMUP_USERS, think_s=0.0
        )
        failures = [result.failure for result in results if result.failure is not None]
        if len(failures) == len(results):
            raise FatalError(
                f"every warm-up request failed; the first: {failures[0].kind}: {failures[0].message}"
            )

    def _client(self, cut_s: float | None) -> Client:
        return Client(
            self._facts.url,
            self._facts.model,
            clock=self._clock,
            api_key=self._options.api_key,
            timeout_s=self._options.timeout_s,
            tenant_keys=self._options.tenant_keys,
            cut_s=cut_s,
            return_token_ids=self._facts.is_dynamictp,
        )


def _shifted(switch: Switch, origin_s: float) -> Switch:
    return replace(switch, started_s=switch.started_s - origin_s, ended_s=switch.ended_s - origin_s)
