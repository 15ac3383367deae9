"""What the HTTP application works with: model, tokenizer, template, engine client, switches, metrics."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from dynamictp.clock import Clock, SystemClock
from dynamictp.errors import BadRequest, CapacityError, NotFound
from dynamictp.facts import ModelFacts
from dynamictp.messages import WorkerLost
from dynamictp.model.chat import ChatTemplate
from dynamictp.model.tokenizer import Tokenizer
from dynamictp.server.admission import AdmissionControl, QueueLimits
from dynamictp.server.bodies import Bodies
from dynamictp.server.engine_client import EngineClient
from dynamictp.server.metrics import Metrics
from dynamictp.server.requests import SamplingDefaults
from dynamictp.server.switches import SwitchBoard

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
    legal_degrees: tuple[int, ...]
    clock: Clock
    mode: Literal["static", "dynamic", "dry-run"] = "static"
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    device_info: Callable[[], Mapping[int, DeviceInfo]] = dict
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time at which the model was loaded, in seconds."""
    bodies: Bodies = field(default_factory=Bodies)
    request_timeout_s: float = 0.0
    """After so long a request is given up; 0: never. Clients may ask for less."""
    switch_wait_s: float = SWITCH_WAIT_S

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
    ) -> Self:
        """Wire client, switches and metrics together. `client.attach(link)` connects the engine."""
        clock = clock or SystemClock()
        limits = limits or QueueLimits()
        admission = AdmissionControl(clock, limits, tenants)
        metrics, switches = Metrics(admission=admission), SwitchBoard(secrets.token_hex(3))
        client = EngineClient(
            clock,
            metrics,
            admission=admission,
            on_switch=switches.on_status,
            on_worker_lost=on_worker_lost,
        )
        return cls(
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
        )

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
