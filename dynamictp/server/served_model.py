"""One model of a server: what its files tell, its processes, and its side of the HTTP application."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from dynamictp import native
from dynamictp.config import GIB, ModelEntry, ServeConfig
from dynamictp.errors import BadRequest, ConfigError, FatalError
from dynamictp.kernels.select import choose_kernels
from dynamictp.messages import EngineReady
from dynamictp.model.chat import ChatTemplate, template_from_file
from dynamictp.model.load import open_model
from dynamictp.model.source import ModelSource
from dynamictp.model.weights import WeightIndex, plan_weights
from dynamictp.observe.machine import MachineSources, Placed
from dynamictp.observe.tracing import open_tracer
from dynamictp.process import core_wait_s
from dynamictp.server.admission import QueueLimits
from dynamictp.server.keys import KeyRings
from dynamictp.server.machine import available_memory_bytes, usable_cores
from dynamictp.server.plan import Candidate, NodePlan, plan_models, plan_node
from dynamictp.server.pool_facts import pool_facts
from dynamictp.server.recovery import Recovery
from dynamictp.server.requests import SamplingDefaults, parse_sampling_defaults
from dynamictp.server.service import DeviceInfo, Service
from dynamictp.server.shares import DeviceShares
from dynamictp.server.supervisor import Supervisor
from dynamictp.transport import ZmqLink

Say = Callable[[str], None]


@dataclass(frozen=True)
class OpenedModel:
    """A model's files, and what of the configuration is about it."""

    config: ServeConfig
    source: ModelSource
    index: WeightIndex
    kernel_level: str
    priority: int = 0
    kv_share: float = 1.0
    max_devices: int = 0

    @classmethod
    def open(cls, config: ServeConfig, say: Say) -> OpenedModel:
        """Raises `ModelRefused`, `ConfigError`."""
        source = open_model(config.model)
        kernels = choose_kernels(
            config.kernels, source.facts, config.page_tokens, native_only=_native_only(config)
        )
        if kernels.reason:
            say(f"torch kernels, several times slower: {kernels.reason}")
        packed = kernels.path == "native"
        index = plan_weights(source.facts, config.dtype, "panels" if packed else "rows", config.weights)
        return cls(config, source, index, kernels.level)


def open_models(config: ServeConfig, say: Say) -> list[OpenedModel]:
    """All models of the configuration. Raises `ModelRefused`, `ConfigError`."""
    if not config.models:
        return [OpenedModel.open(config, say)]
    return [_open(config, entry, say) for entry in config.models]


def _open(config: ServeConfig, entry: ModelEntry, say: Say) -> OpenedModel:
    try:
        opened = OpenedModel.open(config.of_model(entry), lambda text: say(f"{entry.name}: {text}"))
    except FatalError as error:
        raise error.of_model(entry.name) from error
    return replace(opened, priority=entry.priority, kv_share=entry.kv_share, max_devices=entry.max_devices)


def plan_all(opened: Sequence[OpenedModel]) -> tuple[NodePlan, ...]:
    """Devices, layouts and memory. Raises `ConfigError`, `ResourceError`."""
    cores, available = usable_cores(), available_memory_bytes()
    communicators = native.load() is not None
    if len(opened) == 1:
        (one,) = opened
        plan = plan_node(
            one.config,
            one.source.facts,
            one.index.total_bytes,
            cores=cores,
            available_bytes=available,
            communicators=communicators,
            most_devices=one.max_devices,
        )
        return (plan,)
    candidates = [
        Candidate(one.config, one.source.facts, one.index.total_bytes, one.kv_share, one.max_devices)
        for one in opened
    ]
    return plan_models(candidates, cores=cores, available_bytes=available, communicators=communicators)


class ServedModel:
    """Owner of a model's supervisor, service and recovery. Lives in the event loop."""

    def __init__(
        self, opened: OpenedModel, plan: NodePlan, keys: KeyRings, shares: DeviceShares | None = None
    ) -> None:
        """`shares`: the division of the devices that it joins; None: it has them to itself."""
        self.config = opened.config
        self.plan = plan
        name = "" if shares is None else opened.config.model_name
        self.supervisor = Supervisor(opened.config, plan, opened.index, opened.kernel_level, name=name)
        self.service = _service(opened, plan, self.supervisor, keys, shares)
        self.supervisor.leased = lambda: self.service.share.excluded
        if self.config.mode != "static":
            journal = Path(self.config.journal) if self.config.journal else None
            self.service.plan_with(pool_facts(self.config, plan), self.config.control, journal)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.service.model

    @property
    def failed(self) -> asyncio.Future[FatalError]:
        """Set when one of its processes has ended for good."""
        return self.supervisor.failed

    async def start(self, say: Say) -> ZmqLink:
        """Start the processes and load the weights; the link to the engine is attached when it returns.
        Raises `ModelRefused`, `ResourceError`."""
        link = await self.supervisor.start(say)
        self.service.client.attach(link)
        return link

    async def wait_ready(self) -> EngineReady:
        return await self.service.client.wait_ready()

    def keep_alive(self) -> None:
        """From now on replace what ends, and let the planner act."""
        service = self.service
        recovery = Recovery(
            service.client,
            service.engine_lost,
            service.clock,
            hang_s=self.config.hang_s,
            core_wait_s=lambda: core_wait_s(self.supervisor.engine_pid or 0),
        )
        self.supervisor.keep_alive(recovery)
        self._tasks.append(asyncio.create_task(recovery.watch(self.supervisor.kill_engine)))
        if service.plane is not None:
            self._tasks.append(asyncio.create_task(service.plane.run()))

    async def rest(self) -> None:
        """Undo `keep_alive`'s tasks. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self.service.plane is not None:
            self.service.plane.journal.close()

    async def give_up(self, reason: str) -> None:
        """It has failed for good: answer so, end its processes, leave its devices to the other models."""
        self.service.client.fail_all(reason)
        await self.rest()
        self.service.client.detach()
        await self.supervisor.stop()
        self.service.share.leave()

    async def stop(self) -> None:
        """End what lives of it. May be called twice."""
        self.service.client.detach()
        await self.supervisor.stop()
        if self.service.client.tracer is not None:
            await asyncio.to_thread(self.service.client.tracer.close)

    def told(self, ready: EngineReady, seconds: float) -> str:
        """What a person wants to know of its start."""
        return (
            f"{self.name}: layout {ready.layout} on {self.plan.devices} device(s), context "
            f"{ready.max_model_len} tokens, KV {self.plan.arena_bytes / GIB:.2f} GiB for "
            f"{self.plan.kv_tokens} tokens, ready after {seconds:.1f} s"
        )


class AllPowers:
    """The workers of all models on a device, as one."""

    def __init__(self, supervisors: Sequence[Supervisor]) -> None:
        self._supervisors = supervisors

    def sleep(self, device: int) -> None:
        for supervisor in self._supervisors:
            supervisor.sleep(device)

    def wake(self, device: int) -> None:
        for supervisor in self._supervisors:
            supervisor.wake(device)

    @property
    def asleep(self) -> Collection[int]:
        return {device for supervisor in self._supervisors for device in supervisor.asleep}


def _service(
    opened: OpenedModel,
    plan: NodePlan,
    supervisor: Supervisor,
    keys: KeyRings,
    shares: DeviceShares | None,
) -> Service:
    config = opened.config

    def device_info() -> dict[int, DeviceInfo]:
        return {d: DeviceInfo(plan.cores[d], supervisor.pid(d)) for d in range(plan.devices)}

    service = Service.create(
        model=config.model_name,
        tokenizer=opened.source.tokenizer(),
        template=_template(config, opened.source),
        facts=plan.facts,
        devices=plan.devices,
        legal_degrees=plan.degrees,
        mode=config.mode,
        defaults=_defaults(config, opened.source),
        device_info=device_info,
        limits=QueueLimits(
            config.max_waiting, config.max_waiting_tokens, config.max_wait_s, config.request_timeout_s
        ),
        tenants=lambda: keys.tenants,
        on_worker_lost=lambda lost: supervisor.kill_worker(lost.device, lost.incarnation, lost.reason),
        start_layout=str(plan.layout),
        shares=shares,
        priority=opened.priority,
        most_devices=plan.most_devices,
    )
    own = {} if shares is not None else {"server": os.getpid()}
    service.metrics.machine.sources = MachineSources(
        processes=lambda: {**own, "engine": supervisor.engine_pid},
        devices=lambda: {d: Placed(supervisor.pid(d), plan.cores[d]) for d in range(plan.devices)},
    )
    supervisor.on_crash = service.metrics.machine.on_crash
    if config.otlp_traces_endpoint:
        service.trace_with(open_tracer(config.otlp_traces_endpoint, service.clock, service.model))
    if config.metrics_alias:
        service.metrics.alias_model = service.model
    return service


def _native_only(config: ServeConfig) -> str:
    """The flag that only the native kernels can follow, if one is given."""
    if config.weights:
        return f"--weights {config.weights}"
    return f"--cores-per-device {config.cores_per_device}" if config.cores_per_device > 1 else ""


def _template(config: ServeConfig, source: ModelSource) -> ChatTemplate:
    template = source.chat_template()
    if config.chat_template:
        return template_from_file(Path(config.chat_template), template.special_tokens)
    return template


def _defaults(config: ServeConfig, source: ModelSource) -> SamplingDefaults:
    if config.generation_config != "auto":
        return SamplingDefaults()
    known = {field.name for field in fields(SamplingDefaults)}
    try:
        return parse_sampling_defaults({k: v for k, v in source.sampling_defaults().items() if k in known})
    except BadRequest as error:
        raise ConfigError(
            f"--generation-config auto: the model's {error.message}; leave that flag out"
        ) from error
