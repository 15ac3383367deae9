"""Traces of requests and switches (OpenTelemetry), made when they end from the times that were noted anyway.

So tracing costs nothing while a request runs, and nothing at all when it is off: `opentelemetry` is only
imported where it is on. A trace of a request:

```
POST /v1/completions                     request_id; the client's own trace is its parent (`traceparent`)
└ generate                               one per choice: id, tp_domain_id, degrees, handovers, tokens
  ├ queue    arrival → a domain took it
  ├ prefill  → first token
  └ decode   → last token
```
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamictp.clock import Clock
from dynamictp.errors import ConfigError
from dynamictp.extras import install_hint
from dynamictp.messages import ServedBy, SwitchStatus

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_ENDED = ("closed", "noop", "failed", "cancelled", "rolled_back")
MOST_SWITCHES = 256

Values = dict[str, str | int | float]


@dataclass(frozen=True)
class ChoiceTrace:
    """One generated answer. Times are seconds of the server's clock; 0 for what did not happen."""

    id: str
    arrival_s: float
    queued_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int
    end: str
    served: ServedBy | None = None


@dataclass(frozen=True)
class RequestTrace:
    """One HTTP request that generated something, at its end."""

    request_id: str
    path: str
    arrival_s: float
    stream: bool
    choices: Sequence[ChoiceTrace]
    headers: Mapping[str, str] = field(default_factory=dict)
    """For the trace that the client is in."""


class Tracer:
    """Owner of the connection to where the spans go, and of when each running switch began."""

    def __init__(self, provider: TracerProvider, clock: Clock) -> None:
        from opentelemetry import trace  # noqa: PLC0415  (an extra, not there everywhere)
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        self._api = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = provider
        self._tracer = provider.get_tracer("dynamictp")
        self._clock = clock
        self._began: dict[str, float] = {}

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    # ------------------------------------------------------------ requests

    def request(self, request: RequestTrace) -> None:
        """A request has ended."""
        values: Values = {
            "request_id": request.request_id,
            "http.route": request.path,
            "gen_ai.request.stream": request.stream,
            "gen_ai.usage.input_tokens": sum(choice.prompt_tokens for choice in request.choices),
            "gen_ai.usage.output_tokens": sum(choice.output_tokens for choice in request.choices),
        }
        parent = self._propagator.extract(dict(request.headers))
        failed = any(choice.end == "error" for choice in request.choices)
        inside = self._span(
            f"POST {request.path}", request.arrival_s, self._clock.now(), values, parent, failed=failed
        )
        for choice in request.choices:
            self._choice(request.request_id, choice, inside)

    def _choice(self, request_id: str, choice: ChoiceTrace, parent: Context) -> None:
        end_s = choice.last_token_s or self._clock.now()
        values: Values = {
            "request_id": request_id,
            "dynamictp.id": choice.id,
            "gen_ai.usage.input_tokens": choice.prompt_tokens,
            "gen_ai.usage.output_tokens": choice.output_tokens,
            "finish_reason": choice.end,
        }
        where: Values = {"request_id": request_id}
        served = choice.served
        if served is not None:
            where |= {"tp_domain_id": served.domain, "tp": served.tp}
            values |= where | {
                "tp_min": served.tp_min,
                "tp_max": served.tp_max,
                "handovers": served.handovers,
                "recomputes": served.recomputes,
            }
        failed = choice.end == "error"
        inside = self._span("generate", choice.arrival_s, end_s, values, parent, failed=failed)
        first_s = choice.first_token_s or end_s
        admitted_s = min(choice.arrival_s + choice.queued_s, first_s) if choice.first_token_s else end_s
        self._span("queue", choice.arrival_s, admitted_s, {"request_id": request_id}, inside)
        if choice.first_token_s:
            self._span("prefill", admitted_s, first_s, where, inside)
            self._span("decode", first_s, end_s, where, inside)

    # ------------------------------------------------------------ switches

    def switch(self, status: SwitchStatus) -> None:
        """Progress of a switch; its spans are made at its end. Its phases follow one another."""
        began_s = self._began.setdefault(status.switch_id, self._clock.now())
        if status.outcome not in _ENDED:
            while len(self._began) > MOST_SWITCHES:
                self._began.pop(next(iter(self._began)))
            return
        del self._began[status.switch_id]
        values: Values = {
            "switch_id": status.switch_id,
            "from": status.from_layout,
            "to": status.to_layout,
            "reason": status.reason,
            "outcome": status.outcome,
            "handovers": status.handovers,
            "recomputes": status.recomputes,
        }
        if status.error:
            values["error"] = status.error
        end_s = max(self._clock.now(), began_s + sum(status.phases_ms.values()) / 1e3)
        failed = status.outcome in ("failed", "rolled_back")
        inside = self._span("switch", began_s, end_s, values, None, failed=failed)
        for phase, milliseconds in status.phases_ms.items():
            phase_end_s = began_s + milliseconds / 1e3
            self._span(phase, began_s, phase_end_s, {"switch_id": status.switch_id}, inside)
            began_s = phase_end_s

    # ------------------------------------------------------------ spans

    def _span(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        values: Values,
        parent: Context | None,
        *,
        failed: bool = False,
    ) -> Context:
        """A span that is over; the context for its children."""
        span: Span = self._tracer.start_span(
            name, context=parent, start_time=self._unix_ns(begin_s), attributes=values
        )
        if failed:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR))
        span.end(end_time=self._unix_ns(max(begin_s, end_s)))
        return self._api.set_span_in_context(span)

    def _unix_ns(self, at_s: float) -> int:
        """Unix time of a moment of the server's clock."""
        return time.time_ns() - round((self._clock.now() - at_s) * 1e9)


def open_tracer(endpoint: str, clock: Clock, model: str) -> Tracer:
    """Spans go to an OTLP/HTTP collector, such as `http://127.0.0.1:4318/v1/traces`, from another thread.

    Raises `ConfigError` where the packages are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): {install_hint('tracing')}"
        ) from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": "dynamictp", "gen_ai.request.model": model})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider, clock)
