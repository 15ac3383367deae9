"""`serve_forever`: puts source, plan, supervisor, engine client and HTTP application together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import click

from dynamictp.clock import SystemClock
from dynamictp.config import ServeConfig
from dynamictp.errors import INTERRUPTED
from dynamictp.observe.machine import MachineMetrics, MachineSources, Placed
from dynamictp.process import settle_heap
from dynamictp.server.engine_client import EngineClient
from dynamictp.server.keys import KeyRings
from dynamictp.server.machine import usable_cores
from dynamictp.server.ports import Ports, url_of
from dynamictp.server.roster import Roster
from dynamictp.server.served_model import AllPowers, OpenedModel, ServedModel, open_models, plan_all
from dynamictp.server.shares import DeviceShares

log = logging.getLogger(__name__)

SERVING_NICE = 5
"""Niceness of the serving threads: in lock-step TP a busy neighbour costs more than a late token."""

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
        stop = StopSignals()
        models = self._build(open_models(self._config, say))
        roster = self._roster(models)
        ports = Ports(self._config, roster, self._keys)
        try:
            port = await ports.start()
            started = await _first(
                _all(model.start(_said_by(model, models)) for model in models),
                stop.end,
                *(model.failed for model in models),
            )
            if started is None:
                _raise_failure(models, stop.end)
            else:
                await self._serve(models, stop, port)
        finally:
            for model in models:
                model.service.client.fail_all("the server is shutting down")
            await ports.stop()
            await asyncio.gather(*(model.stop() for model in models))
        return stop.end.result()

    def _build(self, opened: Sequence[OpenedModel]) -> list[ServedModel]:
        """Plan the node and make the models. Raises `ConfigError`, `ResourceError`."""
        plans = plan_all(opened)
        plan, config = plans[0], self._config
        if plan.oversubscribed:
            say(
                f"{plan.devices} device(s) of {config.cores_per_device} core(s) share {len(usable_cores())}: "
                "slower than one core each"
            )
        if len(opened) == 1:
            return [ServedModel(opened[0], plan, self._keys)]
        shares = DeviceShares(plan.devices, SystemClock(), revocable=config.mode == "dynamic")
        models = [ServedModel(one, own, self._keys, shares) for one, own in zip(opened, plans, strict=True)]
        shares.begin()
        return models

    def _roster(self, models: Sequence[ServedModel]) -> Roster:
        roster = Roster(model.service for model in models)
        roster.shares.desk.power = AllPowers([model.supervisor for model in models])
        cores = models[0].plan.cores
        # Each model counts the crashes of its own processes.
        roster.machine = MachineMetrics(
            crashes=Counter(),
            sources=MachineSources(
                processes=lambda: {"server": os.getpid()},
                devices=lambda: {device: Placed(None, own) for device, own in enumerate(cores)},
            ),
        )
        return roster

    async def _serve(self, models: Sequence[ServedModel], stop: StopSignals, port: int) -> None:
        """From the attached engines to the end; raises `FatalError` when a child ends for good."""
        ready = await _first(
            _all(model.wait_ready() for model in models), stop.end, *(model.failed for model in models)
        )
        if ready is not None:
            # This thread only: the supervisors', which start the next children, keep their priority.
            os.setpriority(os.PRIO_PROCESS, 0, SERVING_NICE)
            seconds = time.monotonic() - self._started
            for model, engine in zip(models, ready, strict=True):
                say(model.told(engine, seconds))
            for line in self._config_lines(models[0].plan.devices):
                say(line)
            settle_heap()
            click.echo(f"DynamicTP ready: {url_of(self._config.host, port)}")
            await self._keep_alive(models, stop)
        _raise_failure(models, stop.end)

    async def _keep_alive(self, models: Sequence[ServedModel], stop: StopSignals) -> None:
        """Serve, then drain: returns when the server is to end, or when no model lives any more."""
        for model in models:
            model.keep_alive()
        drain, living = stop.drain_first(), list(models)
        try:
            while living and not drain.done() and not stop.end.done():
                failures = {model.failed: model for model in living}
                either: tuple[asyncio.Future[Any], ...] = (drain, stop.end, *failures)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                for model in [model for failed, model in failures.items() if failed.done()]:
                    living.remove(model)
                    if living:
                        log.error("model %s has failed: %s", model.name, model.failed.result())
                        await model.give_up(str(model.failed.result()))
            if drain.done() and not stop.end.done():
                await self._drain(living, stop)
        finally:
            await asyncio.gather(*(model.rest() for model in models))
            await models[0].service.desk.close()

    async def _drain(self, models: Sequence[ServedModel], stop: StopSignals) -> None:
        clients = [model.service.client for model in models]
        if live := sum(client.live for client in clients):
            say(f"draining: {live} request(s) may take {self._config.drain_s:g} s more")
        for client in clients:
            client.close_admission("the server is shutting down")
        await _first(self._drained(clients), stop.end, *(model.failed for model in models))
        stop.finish(0)

    def _config_lines(self, devices: int) -> list[str]:
        """Who changes the layout, where it can change; and where the admin interface is, unless it is where
        everybody looks for it."""
        config, lines = self._config, []
        if config.mode == "dynamic" and devices > 1:
            lines.append("mode dynamic: the layout follows the traffic; --mode static keeps it")
        if config.admin_address is not None:
            lines.append(f"admin interface: {url_of(*config.admin_address)}")
        elif not config.admin_on_main:
            lines.append("no admin interface: the API's port is public, and there is no --admin-port")
        return lines

    async def _drained(self, clients: Sequence[EngineClient]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                await _all(client.wait_idle() for client in clients)


def _said_by(model: ServedModel, models: Sequence[ServedModel]) -> Callable[[str], None]:
    """`say`, with the model's name where there are several."""
    return say if len(models) == 1 else lambda text: say(f"{model.name}: {text}")


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, or the first error; nothing of the rest goes on then."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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


def _raise_failure(models: Sequence[ServedModel], interrupted: asyncio.Future[int]) -> None:
    """A child that ends after a signal is no failure; nor is a model's end while another one serves."""
    failed = next((model.failed for model in models if model.failed.done()), None)
    if failed is not None and not interrupted.done():
        raise failed.result()
