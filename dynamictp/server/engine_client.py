"""The server's side of the engine: live requests, exactly-once tokens, the latest snapshot.

Everything here runs in the event loop's thread. The client owns the prompt and the emitted tokens of every
live request, so that a restarted engine gets them again (`resubmit_all`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import msgspec

from dynamictp.clock import Clock
from dynamictp.control.windows import TrafficWindows
from dynamictp.errors import CapacityError
from dynamictp.messages import (
    Body,
    CancelRequest,
    EngineReady,
    FirstAdmission,
    Outputs,
    PromptLogprobs,
    Queued,
    RequestEnd,
    SamplingParams,
    Snapshot,
    SubmitRequest,
    SwitchStatus,
    TokenEvent,
    WorkerLost,
)
from dynamictp.observe.requests import failure_of
from dynamictp.observe.tracing import Tracer
from dynamictp.server.admission import AdmissionControl, Waiting, class_of
from dynamictp.server.engine_link import EngineLink
from dynamictp.server.live_request import (
    TOKEN_BYTES,
    Ended,
    LiveRequest,
    Sink,
    SinkFull,
    finished,
    merge_served,
)
from dynamictp.server.metrics import Metrics
from dynamictp.server.sender import Sender
from dynamictp.transport import Link

log = logging.getLogger(__name__)

_M = TypeVar("_M")

_EXPIRED = Ended("error", message="the request's deadline has passed", status=504)

CLOSED_RETRY_S = 10
"""When a client may try again that a stopping server refused: its successor may be up by then."""


class EngineClient:
    """Owner of the live requests."""

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics,
        *,
        admission: AdmissionControl | None = None,
        on_switch: Callable[[SwitchStatus], None],
        on_first_admission: Callable[[FirstAdmission], None] = lambda message: None,
        on_worker_lost: Callable[[WorkerLost], None] = lambda message: None,
    ) -> None:
        """`admission` is told what waits and how fast it moves, and asked who is taken."""
        self._clock = clock
        self._metrics = metrics
        self._admission = admission or AdmissionControl(clock)
        self._on_switch = on_switch
        self._on_first_admission = on_first_admission
        self._on_worker_lost = on_worker_lost
        self._live: dict[str, LiveRequest] = {}
        self._link = EngineLink(self._handle, self._on_lost)
        self._ready = asyncio.Event()
        self.engine: EngineReady | None = None
        """What the engine said when it was last ready; None before the first time."""
        self.snapshot: Snapshot | None = None
        self.failure: str | None = None
        """Why the engine will not come back."""
        self.layout = ""
        """The last committed layout, as far as the engine said so; empty before the first time."""
        self.heard_s = 0.0
        """When the engine last said something, or was attached."""
        self._closed: str | None = None
        self._idle = asyncio.Event()
        self.dropped_events = 0
        """Token events that were late, repeated or out of order."""
        self.tracer: Tracer | None = None
        """Told of HTTP requests when they end, if traces are wanted."""
        self.traffic: TrafficWindows | None = None
        """Told what the planner has to know, if there is one."""
        self.on_snapshot: Callable[[], None] = lambda: None
        """Called when `snapshot` is a new one."""
        self.on_link_lost: Callable[[str], None] = lambda reason: None
        """Called when the link broke; the supervisor then restarts the engine and attaches again."""

    def attach(self, link: Link) -> None:
        """Take messages from `link` from now on. Called in the event loop; replaces an earlier link."""
        self.detach()
        self.heard_s = self._clock.now()
        self._link.attach(link)

    def detach(self) -> None:
        """Stop using the link (the caller closes it). Live requests are kept."""
        self._link.detach()
        self._ready.clear()

    def wake(self) -> None:
        """A message has arrived on a link without a socket. Callable from any thread."""
        self._link.wake()

    def send(self, body: Body) -> bool:
        """Hand a message to the engine. False when there is none; live requests then wait for the next."""
        return self._link.send(body)

    def _on_lost(self, reason: str) -> None:
        self._ready.clear()
        self.on_link_lost(reason)

    # ------------------------------------------------------------ engine state

    @property
    def is_ready(self) -> bool:
        """An engine is attached and serves."""
        return self._ready.is_set()

    async def wait_ready(self) -> EngineReady:
        """Returns once the engine serves."""
        await self._ready.wait()
        assert self.engine is not None
        return self.engine

    @property
    def max_model_len(self) -> int:
        """Longest sequence (prompt + output) that is served now, in tokens; 0 before the engine is ready."""
        if self.snapshot is not None and self.snapshot.max_model_len:
            return self.snapshot.max_model_len
        return self.engine.max_model_len if self.engine is not None else 0

    @property
    def live(self) -> int:
        """Requests in the engine."""
        return len(self._live)

    @property
    def live_requests(self) -> Collection[LiveRequest]:
        """They change with every message of the engine: to be read at once."""
        return self._live.values()

    # ------------------------------------------------------------ requests

    def close_admission(self, reason: str) -> None:
        """Take no more requests; those that live go on."""
        self._closed = reason

    @property
    def closed(self) -> str | None:
        """Why no more requests are taken."""
        return self._closed

    async def wait_idle(self) -> None:
        """Returns when no request lives."""
        while self._live:
            self._idle.clear()
            await self._idle.wait()

    def check_open(self) -> None:
        """Raises `CapacityError` when nothing is taken at all."""
        if self.failure is not None:
            raise CapacityError(f"the engine has failed: {self.failure}", retry_after_s=10)
        if self._closed is not None:
            raise CapacityError(self._closed, retry_after_s=CLOSED_RETRY_S)
        if self.engine is None:
            raise CapacityError("the model is still loading; try again when /ready answers 200")

    def check_room(self, sender: Sender, prompts: Sequence[int]) -> float:
        """The predicted time to the first token of an HTTP request with prompts of these lengths. Raises
        `CapacityError` when it can't be taken.
        """
        self.check_open()
        return self._admission.check(sender, prompts, snapshot=self.snapshot, live=len(self._live))

    def submit(
        self,
        request_id: str,
        prompt: bytes,
        sampling: SamplingParams,
        sink: Sink,
        *,
        sender: Sender,
        group: str = "",
        predicted_s: float | None = None,
    ) -> LiveRequest:
        """Start a request of the HTTP request `group`; `prompt` holds 32-bit token ids. While the engine
        restarts it is held and sent by `resubmit_all`.
        """
        waiting = Waiting(sender, len(prompt) // TOKEN_BYTES, group or request_id, predicted_s)
        live = LiveRequest(request_id, prompt, sampling, sender, waiting.group, sink, waiting)
        self._live[request_id] = live
        self._metrics.requests.on_arrival()
        self._admission.backlog.add(waiting)
        if self.traffic is not None:
            self.traffic.arrived(self._clock.now(), live.prompt_len)
        self._send_request(live)
        return live

    def cancel(self, request_id: str) -> None:
        """Forget a request; nothing more reaches its sink. Unknown ids are fine: it had ended."""
        live = self._remove(request_id)
        if live is not None:
            self.send(CancelRequest(request_id, live.attempt))
            self._metrics.requests.on_failure("cancelled")

    def resubmit_all(self) -> None:
        """After an engine restart: send every live request again, with what it emitted, as a new attempt."""
        for live in list(self._live.values()):
            live.attempt += 1
            live.past, live.served = merge_served(live.past, live.served), None
            if live.past is not None:
                live.past = msgspec.structs.replace(live.past, recomputes=live.past.recomputes + 1)
            if len(live.emitted) >= live.sampling.max_tokens:
                self._retire(live, Ended("length"))
            elif live.emitted and live.emitted[-1] in live.sampling.stop_ids:
                self._retire(live, Ended("stop"))
            else:
                self._send_request(live)

    def expire(self) -> None:
        """End the requests whose deadline has passed, which an engine that serves does itself."""
        now = self._clock.now()
        for live in list(self._live.values()):
            if live.sender.deadline_s is not None and live.sender.deadline_s <= now:
                # The next engine may have it already.
                self.send(CancelRequest(live.request_id, live.attempt))
                self._retire(live, _EXPIRED)

    def fail_all(self, message: str) -> None:
        """The engine will not come back: end every live request with a 503."""
        self.failure = message
        self._ready.clear()
        for live in list(self._live.values()):
            self._retire(live, Ended("error", message=message, status=503))

    def _send_request(self, live: LiveRequest) -> None:
        sampling = live.sampling
        if live.emitted:  # the prompt's log-probabilities come before the first token
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self.send(
            SubmitRequest(
                request_id=live.request_id,
                attempt=live.attempt,
                tokens=live.prompt + live.emitted.tobytes(),
                prompt_len=live.prompt_len,
                sampling=sampling,
                arrival_s=live.sender.arrival_s,
                tenant=live.sender.tenant,
                priority=live.sender.priority,
                request_class=class_of(live.prompt_len),
                deadline_s=live.sender.deadline_s,
                salt=live.sender.tenant,
                group=live.group,
            )
        )

    # ------------------------------------------------------------ engine → server

    def _handle(self, body: Body) -> None:
        self.heard_s = self._clock.now()
        match body:
            case Outputs():
                self._on_outputs(body)
            case Snapshot():
                self.snapshot = body
                self.layout = body.layout
                self._metrics.on_snapshot(body)
                self._admission.refusals.say()
                self.on_snapshot()
            case SwitchStatus():
                if body.outcome in ("committed", "noop"):
                    self.layout = body.to_layout
                self._metrics.on_switch(body)
                self._on_switch(body)
            case FirstAdmission():
                self._on_first_admission(body)
            case EngineReady():
                self.engine = body
                self.layout = body.layout
                self.failure = None
                self._ready.set()
            case WorkerLost():
                self._on_worker_lost(body)
            case _:
                log.warning("the engine sent a message that is not for the server: %s", type(body).__name__)

    def _on_outputs(self, outputs: Outputs) -> None:
        now = self._clock.now()
        for part in outputs.prompts:
            live = self._current(part)
            if live is not None:
                self._guarded(live, live.sink.on_prompt_logprobs, part)
        for queued in outputs.queued:
            live = self._current(queued)
            if live is not None and not live.emitted:
                live.queued_s = queued.seconds
                self._metrics.requests.on_queued(queued.seconds)
        for event in outputs.tokens:
            self._on_token(event, now)
        for end in outputs.ends:
            self._on_end(end)

    def _current(self, message: PromptLogprobs | Queued | TokenEvent | RequestEnd) -> LiveRequest | None:
        live = self._live.get(message.request_id)
        return live if live is not None and message.attempt == live.attempt else None

    def _on_token(self, event: TokenEvent, now: float) -> None:
        live = self._current(event)
        if live is None or event.position != len(live.emitted):
            self.dropped_events += 1
            return
        live.emitted.append(event.token)
        live.served = event.served
        since = live.last_token_s if event.position else live.sender.arrival_s
        self._metrics.on_token(event.served.domain, now - since, first=event.position == 0)
        live.last_token_s = now
        if event.position:
            self._admission.pace.next_token(now - since)
        else:
            self._first_token(live, now)
        if self._guarded(live, live.sink.on_token, event):
            self.send(CancelRequest(live.request_id, live.attempt))
            self._forget(live, Ended("stop"))

    def _first_token(self, live: LiveRequest, now: float) -> None:
        live.first_token_s = now
        sender = live.sender
        self._metrics.requests.on_first_token(live.prompt_len, now - sender.arrival_s, sender.tenant)
        if live.waiting is not None:
            self._admission.pace.first_token(live.waiting, self._admission.backlog.tokens)
            self._no_longer_waits(live)
        if self.traffic is not None:
            self.traffic.first_token(now, live.who)

    def _on_end(self, end: RequestEnd) -> None:
        live = self._current(end)
        if live is None:
            return
        match end.reason:
            case "error":
                ended = Ended("error", message=end.error or "the engine failed this request")
            case "deadline":
                ended = _EXPIRED
            case "cancelled":
                ended = Ended("error", message="the server is stopping", status=503)
            case reason if end.tokens > len(live.emitted):
                ended = Ended("error", message=f"tokens were lost before '{reason}'; try again")
            case reason:
                ended = Ended(reason, end.cached_tokens)
        self._retire(live, ended)

    def _retire(self, live: LiveRequest, ended: Ended) -> None:
        self._forget(live, ended)
        self._guarded(live, live.sink.on_end, ended)

    def _forget(self, live: LiveRequest, ended: Ended) -> None:
        if self._remove(live.request_id) is None:
            return
        if ended.reason == "error":
            self._metrics.requests.on_failure(failure_of(ended.status))
            return
        self._metrics.requests.on_finish(finished(live, ended, self._clock.now()))
        self._admission.pace.finished(len(live.emitted))
        if self.traffic is not None:
            self.traffic.finished(self._clock.now(), live.stream)

    def _remove(self, request_id: str) -> LiveRequest | None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._no_longer_waits(live)
        if not self._live:
            self._idle.set()
        return live

    def _no_longer_waits(self, live: LiveRequest) -> None:
        if live.waiting is not None:
            self._admission.backlog.remove(live.waiting)
            live.waiting = None

    def _guarded(self, live: LiveRequest, call: Callable[[_M], bool | None], message: _M) -> bool:
        """One request's failing must not reach the others: it ends alone, with a 500."""
        try:
            return bool(call(message))
        except SinkFull as error:
            self._give_up(live, Ended("error", message=str(error), status=error.status))
        except Exception:
            log.exception("request %s: its output could not be handled", live.request_id)
            self._give_up(live, Ended("error", message="internal error while producing the output"))
        return False

    def _give_up(self, live: LiveRequest, ended: Ended) -> None:
        if self._remove(live.request_id) is not None:
            self.send(CancelRequest(live.request_id, live.attempt))
            self._metrics.requests.on_failure(failure_of(ended.status))
            live.sink.on_end(ended)
