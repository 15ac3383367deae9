"""`serve_forever`: puts source, plan, supervisor, engine client and HTTP application together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from dynamictp import native
from dynamictp.config import GIB, ServeConfig
from dynamictp.errors import BadRequest, ConfigError
from dynamictp.kernels.select import choose_kernels
from dynamictp.model.chat import ChatTemplate, template_from_file
from dynamictp.model.load import open_model
from dynamictp.model.source import ModelSource
from dynamictp.model.weights import plan_weights
from dynamictp.observe.machine import MachineMetrics, MachineSources, Placed
from dynamictp.observe.tracing import open_tracer
from dynamictp.process import core_wait_s
from dynamictp.server.admission import QueueLimits
from dynamictp.server.keys import KeyRings
from dynamictp.server.machine import available_memory_bytes, usable_cores
from dynamictp.server.plan import NodePlan, plan_node
from dynamictp.server.pool_facts import pool_facts
from dynamictp.server.ports import Ports, url_of
from dynamictp.server.recovery import Recovery
from dynamictp.server.requests import SamplingDefaults, parse_sampling_defaults
from dynamictp.server.service import DeviceInfo, Service
from dynamictp.server.supervisor import Supervisor

SERVING_NICE = 5
"""Niceness of the serving threads: in lock-step TP a busy neighbour costs more than a late token."""
INTERRUPTED = 130

T = TypeVar("T")


def serve_forever(config: ServeConfig) -> None:
    """Serve until SIGTERM (drains, exit 0) or Ctrl-C (exit 130). Raises `FatalError` with the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Its lines of starting and stopping repeat what `say` tells.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # Texts are tokenized one by one: a pool of threads in the library would idle and be lost in a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    code = asyncio.run(_Launch(config).run())
    if code:
        sys.exit(code)


def say(text: str) -> None:
    """A line for the person who started the server, if there still is one."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


class _Launch:
    """One life of a server. Owns nothing but the order in which the parts start and stop."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._keys = KeyRings.of(config)
        self._started = time.monotonic()

    async def run(self) -> int:
        """Start, serve, stop; the exit code."""
        config = self._config
        stop = StopSignals()
        interrupted = stop.end
        source = open_model(config.model)
        kernels = choose_kernels(
            config.kernels, source.facts, config.page_tokens, native_only=_native_only(config)
        )
        if kernels.reason:
            say(f"torch kernels, several times slower: {kernels.reason}")
        packed = kernels.path == "native"
        index = plan_weights(source.facts, config.dtype, "panels" if packed else "rows", config.weights)
        plan = plan_node(
            config,
            source.facts,
            index.total_bytes,
            cores=usable_cores(),
            available_bytes=available_memory_bytes(),
            communicators=native.load() is not None,
        )
        if plan.oversubscribed:
            say(
                f"{plan.devices} device(s) of {config.cores_per_device} core(s) share {len(usable_cores())}: "
                "slower than one core each"
            )
        supervisor = Supervisor(config, plan, index, kernels.level)
        service = self._service(source, plan, supervisor)
        service.desk.power = supervisor
        supervisor.leased = lambda: tuple(sorted(service.desk.pool.leased))
        if config.mode != "static":
            journal = Path(config.journal) if config.journal else None
            service.plan_with(pool_facts(config, plan), config.control, journal)
        ports = Ports(config, service, self._keys)
        try:
            port = await ports.start()
            link = await _first(supervisor.start(say), interrupted, supervisor.failed)
            if link is None:
                _raise_failure(supervisor, interrupted)
            else:
                service.client.attach(link)
                await self._serve(service, plan, supervisor, stop, port)
        finally:
            service.client.fail_all("the server is shutting down")
            await ports.stop()
            service.client.detach()
            await supervisor.stop()
            if service.client.tracer is not None:
                await asyncio.to_thread(service.client.tracer.close)
        return interrupted.result()

    async def _serve(
        self,
        service: Service,
        plan: NodePlan,
        supervisor: Supervisor,
        stop: StopSignals,
        port: int,
    ) -> None:
        """From the attached engine to the end; raises `FatalError` when a child ends for good."""
        ready = await _first(service.client.wait_ready(), stop.end, supervisor.failed)
        if ready is not None:
            # This thread only: the supervisor's, which starts the next children, keeps its priority.
            os.setpriority(os.PRIO_PROCESS, 0, SERVING_NICE)
            seconds = time.monotonic() - self._started
            say(
                f"{service.model}: layout {ready.layout} on {plan.devices} device(s), context "
                f"{ready.max_model_len} tokens, KV {plan.arena_bytes / GIB:.2f} GiB for {plan.kv_tokens} "
                f"tokens, ready after {seconds:.1f} s"
            )
            for line in self._config_lines():
                say(line)
            click.echo(f"DynamicTP ready: {url_of(self._config.host, port)}")
            await self._keep_alive(service, supervisor, stop)
        _raise_failure(supervisor, stop.end)

    async def _keep_alive(self, service: Service, supervisor: Supervisor, stop: StopSignals) -> None:
        """Serve, then drain: returns when the server is to end."""
        recovery = Recovery(
            service.client,
            service.engine_lost,
            service.clock,
            hang_s=self._config.hang_s,
            core_wait_s=lambda: core_wait_s(supervisor.engine_pid or 0),
        )
        supervisor.keep_alive(recovery)
        drain = stop.drain_first()
        tasks = [asyncio.create_task(recovery.watch(supervisor.kill_engine))]
        if service.plane is not None:
            tasks.append(asyncio.create_task(service.plane.run()))
        try:
            either: tuple[asyncio.Future[Any], ...] = (drain, stop.end, supervisor.failed)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if drain.done() and not stop.end.done():
                if live := service.client.live:
                    say(f"draining: {live} request(s) may take {self._config.drain_s:g} s more")
                service.client.close_admission("the server is shutting down")
                await _first(self._drained(service), stop.end, supervisor.failed)
                stop.finish(0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.desk.close()
            if service.plane is not None:
                service.plane.journal.close()

    def _config_lines(self) -> list[str]:
        """Where the admin interface is, unless it is where everybody looks for it."""
        config = self._config
        if config.admin_address is not None:
            return [f"admin interface: {url_of(*config.admin_address)}"]
        if not config.admin_on_main:
            return ["no admin interface: the API's port is public, and there is no --admin-port"]
        return []

    async def _drained(self, service: Service) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                await service.client.wait_idle()

    def _service(self, source: ModelSource, plan: NodePlan, supervisor: Supervisor) -> Service:
        config = self._config

        def device_info() -> dict[int, DeviceInfo]:
            return {d: DeviceInfo(plan.cores[d], supervisor.pid(d)) for d in range(plan.devices)}

        service = Service.create(
            model=config.model_name,
            tokenizer=source.tokenizer(),
            template=_template(config, source),
            facts=plan.facts,
            devices=plan.devices,
            legal_degrees=plan.degrees,
            mode=config.mode,
            defaults=_defaults(config, source),
            device_info=device_info,
            limits=QueueLimits(
                config.max_waiting,
                config.max_waiting_tokens,
                config.max_wait_s,
                config.request_timeout_s,
            ),
            tenants=lambda: self._keys.tenants,
            on_worker_lost=lambda lost: supervisor.kill_worker(lost.device, lost.incarnation, lost.reason),
        )
        service.metrics.machine = MachineMetrics(
            MachineSources(
                processes=lambda: {"server": os.getpid(), "engine": supervisor.engine_pid},
                devices=lambda: {d: Placed(supervisor.pid(d), plan.cores[d]) for d in range(plan.devices)},
            )
        )
        if config.otlp_traces_endpoint:
            service.trace_with(open_tracer(config.otlp_traces_endpoint, service.clock, service.model))
        if config.metrics_alias:
            service.metrics.alias_model = service.model
        return service


class StopSignals:
    """SIGINT ends the server. So does SIGTERM, except that the first one after `drain_first` only asks for a
    drain."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.end: asyncio.Future[int] = loop.create_future()
        """The exit code, once the server is to end."""
        self._drain: asyncio.Future[None] | None = None
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self.finish, INTERRUPTED)

    def drain_first(self) -> asyncio.Future[None]:
        """Done at the next SIGTERM."""
        self._drain = asyncio.get_running_loop().create_future()
        return self._drain

    def finish(self, code: int) -> None:
        """The first one counts."""
        if not self.end.done():
            say("stopping")
            self.end.set_result(code)

    def _terminate(self) -> None:
        if self._drain is None or self._drain.done():
            self.finish(0)
        else:
            self._drain.set_result(None)


async def _first(work: Coroutine[Any, Any, T], *others: asyncio.Future[Any]) -> T | None:
    """The result of `work`, or None when one of the others is done; `work` is then cancelled."""
    task = asyncio.create_task(work)
    await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
    if not any(other.done() for other in others):
        return await task
    # A signal counts even when the work failed in the same moment: a failure may be its consequence.
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


def _raise_failure(supervisor: Supervisor, interrupted: asyncio.Future[int]) -> None:
    """A child that ends after a signal is no failure."""
    if supervisor.failed.done() and not interrupted.done():
        raise supervisor.failed.result()


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
