"""What the HTTP application works with: model, tokenizer, template, engine client, switches, metrics."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Self

from dynamictp.clock import Clock, SystemClock
from dynamictp.control.capacity import CostBook
from dynamictp.control.config import ControlConfig
from dynamictp.control.facts import PoolFacts
from dynamictp.control.journal import Journal
from dynamictp.control.reconciler import ramp_settings
from dynamictp.control.state import PlannerState
from dynamictp.control.windows import TrafficWindows
from dynamictp.errors import BadRequest, CapacityError, NotFound
from dynamictp.facts import ModelFacts
from dynamictp.layout import Layout, parse_layout, planned_specs
from dynamictp.messages import Body, RampSettings, SwitchStatus, WorkerLost
from dynamictp.model.chat import ChatTemplate
from dynamictp.model.tokenizer import Tokenizer
from dynamictp.observe.machine import ProcessMetrics
from dynamictp.observe.tracing import Tracer
from dynamictp.server.admission import AdmissionControl, QueueLimits
from dynamictp.server.bodies import Bodies
from dynamictp.server.control_plane import ControlPlane
from dynamictp.server.engine_client import EngineClient
from dynamictp.server.leases import LeaseDesk
from dynamictp.server.metrics import Metrics
from dynamictp.server.pool_view import PoolView
from dynamictp.server.requests import SamplingDefaults
from dynamictp.server.shares import DeviceShares, Need, Share
from dynamictp.server.switches import SwitchBoard
from dynamictp.server.texts import TextThreads

SWITCH_WAIT_S = 60.0


@dataclass(frozen=True)
class DeviceInfo:
    """What the supervisor knows of a device and the engine does not."""

    cores: tuple[int, ...] = ()
    pid: int | None = None


@dataclass
class Service:
    """One served model. Built by `create`; the fields are read, never replaced."""

    model: str
    """Name in the API."""
    tokenizer: Tokenizer
    template: ChatTemplate
    client: EngineClient
    switches: SwitchBoard
    metrics: Metrics
    facts: ModelFacts
    devices: int
    """Of the pool. Other models may have some of them."""
    legal_degrees: tuple[int, ...]
    clock: Clock
    mode: Literal["static", "dynamic", "dry-run"] = "static"
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    plane: ControlPlane | None = None
    """Set once by `plan_with`, in the modes that have a planner."""
    device_info: Callable[[], Mapping[int, DeviceInfo]] = dict
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time at which the model was loaded, in seconds."""
    bodies: Bodies = field(default_factory=Bodies)
    texts: TextThreads = field(default_factory=TextThreads)
    request_timeout_s: float = 0.0
    """After so long a request is given up; 0: never. Clients may ask for less."""
    switch_wait_s: float = SWITCH_WAIT_S
    start_layout: str = ""
    """The layout that the first engine begins with."""
    share: Share = field(init=False)
    """Its devices; set by `create`."""
    shares: DeviceShares = field(init=False)
    metrics_kind: ClassVar[type[Metrics]] = Metrics

    @classmethod
    def create(
        cls,
        *,
        model: str,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        facts: ModelFacts,
        devices: int,
        legal_degrees: tuple[int, ...],
        mode: Literal["static", "dynamic", "dry-run"] = "static",
        defaults: SamplingDefaults | None = None,
        device_info: Callable[[], Mapping[int, DeviceInfo]] = dict,
        clock: Clock | None = None,
        limits: QueueLimits | None = None,
        tenants: Callable[[], int] = lambda: 1,
        on_worker_lost: Callable[[WorkerLost], None] = lambda message: None,
        start_layout: str = "",
        shares: DeviceShares | None = None,
        priority: int = 0,
        most_devices: int = 0,
    ) -> Self:
        """Wire client, switches and metrics together. `client.attach(link)` connects the engine.

        Without `shares` the model has the pool to itself; else it joins them with `priority`, for at most
        `most_devices` (0: all), and the caller begins them.
        """
        clock = clock or SystemClock()
        limits = limits or QueueLimits()
        admission = AdmissionControl(clock, limits, tenants)
        incarnation = secrets.token_hex(3)
        metrics = cls.metrics_kind(admission=admission, clock=clock)
        switches = SwitchBoard(incarnation, model if shares is not None else "")
        client = EngineClient(
            clock,
            metrics,
            admission=admission,
            on_switch=switches.on_status,
            on_first_admission=switches.on_first_admission,
            on_worker_lost=on_worker_lost,
        )
        service = cls(
            model=model,
            tokenizer=tokenizer,
            template=template,
            client=client,
            switches=switches,
            metrics=metrics,
            facts=facts,
            devices=devices,
            legal_degrees=legal_degrees,
            clock=clock,
            mode=mode,
            defaults=defaults or SamplingDefaults(),
            device_info=device_info,
            request_timeout_s=limits.request_timeout_s,
            start_layout=start_layout,
        )
        service.shares = shares or DeviceShares(devices, clock, revocable=mode == "dynamic")
        service.share = service.shares.join(model, service, priority=priority, most=most_devices)
        if shares is None:
            service.shares.begin()
            metrics.plane.device_states = service.desk.states
        else:
            # What is the pool's or the machine's is shown once.
            metrics.plane.device_states = None
            metrics.machine = ProcessMetrics()
        client.on_snapshot = service._on_snapshot
        switches.listeners.append(service._on_switch)
        return service

    def plan_with(self, facts: PoolFacts, config: ControlConfig, journal: Path | None = None) -> ControlPlane:
        """Have a planner, which writes its decisions to the file `journal` too. Its loop is the caller's to
        run. Raises `ConfigError` when the file can't be written."""
        traffic = TrafficWindows(self.clock.now(), config)
        legal = tuple(map(str, planned_specs(self.legal_degrees, self.share.most)))
        self.client.traffic = traffic
        self.plane = ControlPlane(
            clock=self.clock,
            client=self.client,
            board=self.switches,
            share=self.share,
            view=PoolView(legal, self.share.most, self.mode, traffic),
            cost=CostBook(facts),
            metrics=self.metrics,
            journal=Journal(facts, config, PlannerState(), journal),
        )
        return self.plane

    @property
    def ramp(self) -> RampSettings | None:
        """What a ramp begun now goes by; None: what the engine was started with, as without a planner."""
        return ramp_settings(self.plane.config) if self.plane is not None else None

    def trace_with(self, tracer: Tracer) -> None:
        """Have traces made of requests and switches from now on."""
        self.client.tracer = tracer
        self.switches.listeners.append(tracer.switch)

    def engine_lost(self) -> None:
        """What was under way in the engine is not any more."""
        self.switches.engine_lost()
        self.share.unsettle()
        if self.plane is not None:
            self.plane.engine_lost()

    def _on_snapshot(self) -> None:
        snapshot = self.client.snapshot
        assert snapshot is not None
        self.share.on_snapshot(snapshot)
        if self.plane is not None:
            self.plane.on_snapshot(snapshot)

    def _on_switch(self, status: SwitchStatus) -> None:
        self.share.unsettle()
        if self.plane is not None:
            self.plane.on_status(status)

    # ------------------------------------------------------------ its devices

    @property
    def desk(self) -> LeaseDesk:
        """The desk of the pool, for all its models."""
        return self.shares.desk

    def need(self) -> Need:
        """As `Holder.need`: of the switch under way, else of the pinned or the observed layout."""
        flight, board = self.switches.in_flight, self.switches
        pinned = board.pinned and self.mode == "dynamic"
        text = flight.to_layout if flight is not None else (board.target or "") if pinned else ""
        layout = parse_layout(text or self.observed or self.start_layout or "tp1")
        if isinstance(layout, Layout):
            return Need(len(layout.devices), layout.devices)
        return Need(layout.devices, flexible=self.mode == "dynamic" and not pinned and flight is None)

    @property
    def changing(self) -> bool:
        return self.switches.in_flight is not None

    def send(self, body: Body) -> bool:
        return self.client.send(body)

    def gained(self) -> None:
        if self.plane is not None:
            self.plane.nudge()

    # ------------------------------------------------------------ what requests ask

    @property
    def observed(self) -> str:
        """The layout in force as the engine reported it; empty before it is ready."""
        client = self.client
        if client.snapshot is not None:
            return client.snapshot.layout
        return client.engine.layout if client.engine is not None else ""

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out. Raises `NotFound` for another one."""
        if name is not None and name != self.model:
            raise NotFound(
                f"the model '{name[:128]}' does not exist here; this server has '{self.model}'",
                param="model",
                code="model_not_found",
            )

    def max_tokens(self, explicit: int | None, default: int | None, prompt_len: int, param: str) -> int:
        """Output tokens of a request within the context. `default` None: the rest of the context.

        Raises `BadRequest` when prompt or output do not fit, `CapacityError` before the engine is ready.
        """
        context = self.client.max_model_len
        if not context:
            raise CapacityError("the model is still loading; try again when /ready answers 200")
        if prompt_len == 0:
            raise BadRequest("the prompt has no tokens; at least one is needed", param="prompt")
        if prompt_len >= context:
            raise BadRequest(
                f"the prompt has {prompt_len} tokens and the context of this model is {context} tokens, "
                "which must hold the output as well; shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        room = context - prompt_len
        if explicit is None:
            return room if default is None else min(default, room)
        if explicit > room:
            raise BadRequest(
                f"{param} {explicit} and the prompt's {prompt_len} tokens are more than the context of this "
                f"model, {context} tokens; at most {room} are left for the output",
                param=param,
                code="context_length_exceeded",
            )
        return explicit
