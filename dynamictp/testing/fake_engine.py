"""An engine without a model: answers the server's messages with tokens from a script.

It runs in the event loop (`start`) over either end of a memory link, or in a thread (`run`) over ZeroMQ.
One turn gives every running request one token, unless the script delays it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dynamictp.layout import Layout, parse_layout, place
from dynamictp.messages import (
    Body,
    CancelRequest,
    CancelSwitch,
    DeviceStatus,
    DomainStatus,
    EngineReady,
    Outputs,
    PromptLogprobs,
    RequestEnd,
    SamplingParams,
    ServedBy,
    SetDevices,
    SetLayout,
    Snapshot,
    SubmitRequest,
    SwitchStatus,
    TokenEvent,
    TokenLogprobs,
    unpack_tokens,
)
from dynamictp.transport import Link

EndReason = Literal["stop", "length", "cancelled", "deadline", "error"]
Outcome = Literal["committed", "closed", "noop", "cancelled"]
Script = Callable[[Sequence[int], SamplingParams, int], int]
"""(prompt, sampling, position) → output token. May raise `ScriptedError`."""


class ScriptedError(Exception):
    """The request ends with reason `error` and this text."""


def counting(vocab: int) -> Script:
    """Tokens that depend on the prompt, the seed and the position, and on nothing else."""

    def script(prompt: Sequence[int], sampling: SamplingParams, position: int) -> int:
        return (sum(prompt) * 31 + sampling.seed * 7 + position * 13) % vocab

    return script


@dataclass
class _Running:
    """A request in the fake engine."""

    submitted: SubmitRequest
    prompt: list[int]
    position: int
    delay_turns: int = 0
    began: bool = False


@dataclass
class FakeEngine:
    """Owner of the fake requests and of the fake layout. `received` keeps every message for tests."""

    link: Link
    script: Script
    devices: int = 2
    degrees: tuple[int, ...] = (1, 2)
    max_model_len: int = 256
    vocab: int = 256
    delay_turns: Callable[[int], int] = lambda position: 0
    """Turns to let pass before the token at a position."""
    hold_tokens: bool = False
    """While set, no request gets a token."""
    hold_switches: bool = False
    """While set, switches stay before their commit; `release_switches` lets them go on."""
    step_s: float = 0.0
    """Time between turns, in seconds."""
    layout: str = "tp1@0"
    """The first one, placed."""
    leased: frozenset[int] = frozenset()
    """Devices that no domain may be on, as the server said last."""
    received: list[Body] = field(default_factory=list)
    running: dict[str, _Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._layout = Layout.parse(self.layout)
        self._epoch = len(self._layout.domains)
        self._held: list[SetLayout] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False

    # ------------------------------------------------------------ drivers

    def start(self) -> None:
        """Run in the current event loop; `arrived` must be called when a message came."""
        self._loop = asyncio.get_running_loop()
        self.announce()
        self.arrived()

    def arrived(self) -> None:
        """Take a turn soon."""
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_later(self.step_s, self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        if self.turn():
            self.arrived()

    def run(self, stop: threading.Event) -> None:
        """Run in this thread until `stop` is set."""
        self.announce()
        while not stop.is_set():
            if not self.turn():
                self.link.wait(0.02)
            elif self.step_s:
                stop.wait(self.step_s)

    def announce(self) -> None:
        self.link.send(EngineReady(str(self._layout.spec), 1024, self.max_model_len, self.degrees))
        self.link.send(self.snapshot())

    # ------------------------------------------------------------ turns

    def turn(self) -> bool:
        """Handle what arrived, then one token for every request. True when there is more to do."""
        while (body := self.link.receive()) is not None:
            self.received.append(body)
            self._handle(body)
        if self.hold_tokens:
            return False
        tokens: list[TokenEvent] = []
        ends: list[RequestEnd] = []
        prompts: list[PromptLogprobs] = []
        for request in list(self.running.values()):
            self._step(request, tokens, ends, prompts)
        if tokens or ends or prompts:
            self.link.send(Outputs(tuple(tokens), tuple(ends), tuple(prompts)))
        return bool(self.running)

    def _handle(self, body: Body) -> None:
        match body:
            case SubmitRequest():
                known = unpack_tokens(body.tokens)
                prompt, position = known[: body.prompt_len], len(known) - body.prompt_len
                self.running[body.request_id] = _Running(body, prompt, position, self.delay_turns(position))
            case CancelRequest():
                request = self.running.get(body.request_id)
                if request is not None and request.submitted.attempt == body.attempt:
                    del self.running[body.request_id]
                    end = RequestEnd(body.request_id, body.attempt, "cancelled", request.position)
                    self.link.send(Outputs(ends=(end,)))
            case SetDevices():
                self.leased = frozenset(body.leased)
            case SetLayout():
                self._held.append(body)
                if not self.hold_switches:
                    self.release_switches()
            case CancelSwitch():
                held = [command for command in self._held if command.switch_id == body.switch_id]
                for command in held:
                    self._held.remove(command)
                    self._report(command, str(self._layout.spec), "decide", "cancelled", {})
                self.link.send(self.snapshot())

    def _step(
        self,
        request: _Running,
        tokens: list[TokenEvent],
        ends: list[RequestEnd],
        prompts: list[PromptLogprobs],
    ) -> None:
        if request.delay_turns:
            request.delay_turns -= 1
            return
        submitted, sampling = request.submitted, request.submitted.sampling
        if not request.began and sampling.prompt_logprobs is not None:
            entries = tuple(self._logprobs(token, sampling.prompt_logprobs) for token in request.prompt[1:])
            prompts.append(PromptLogprobs(submitted.request_id, submitted.attempt, 1, entries))
        request.began = True
        try:
            token = self.script(request.prompt, sampling, request.position)
        except ScriptedError as error:
            self._end(request, ends, "error", str(error))
            return
        logprobs = None if sampling.logprobs is None else self._logprobs(token, sampling.logprobs)
        event = TokenEvent(
            submitted.request_id, submitted.attempt, request.position, token, self._served(), logprobs
        )
        tokens.append(event)
        request.position += 1
        request.delay_turns = self.delay_turns(request.position)
        if token in sampling.stop_ids and request.position > sampling.min_tokens:
            self._end(request, ends, "stop")
        elif request.position >= sampling.max_tokens:
            self._end(request, ends, "length")

    def expire(self, request_id: str) -> None:
        """The deadline of a request passes."""
        ends: list[RequestEnd] = []
        self._end(self.running[request_id], ends, "deadline")
        self.link.send(Outputs(ends=tuple(ends)))

    def _end(
        self, request: _Running, ends: list[RequestEnd], reason: EndReason, error: str | None = None
    ) -> None:
        submitted = request.submitted
        del self.running[submitted.request_id]
        ends.append(
            RequestEnd(submitted.request_id, submitted.attempt, reason, request.position, error=error)
        )

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token and its successors, each half as likely as the one before."""
        top = tuple(((token + rank) % self.vocab, -0.5 * (rank + 1)) for rank in range(count))
        return TokenLogprobs(token, -0.5, top)

    def _served(self) -> ServedBy:
        tp = self._layout.domains[0].shape.tp
        return ServedBy(f"d{self._epoch}", tp, tp, tp)

    # ------------------------------------------------------------ layout

    def release_switches(self) -> None:
        """Commit and close the switches that wait, and those that come."""
        self.hold_switches = False
        while self._held:
            command = self._held.pop(0)
            before, wanted = str(self._layout.spec), parse_layout(command.layout)
            if wanted in (self._layout, self._layout.spec):
                self._report(command, before, "commit", "noop", {})
                self.link.send(self.snapshot())
                continue
            self._layout = (
                wanted if isinstance(wanted, Layout) else place(wanted, self.devices, (), leased=self.leased)
            )
            self._epoch += len(self._layout.domains)
            phases = {"prepare_views": 0.5, "prepare_communicator": 2.0, "proof": 1.0, "commit": 0.25}
            self._report(command, before, "commit", "committed", phases)
            self.link.send(self.snapshot())
            self._report(command, before, "close", "closed", {**phases, "drain": 3.0, "close": 0.5})
            self.link.send(self.snapshot())

    def _report(
        self, command: SetLayout, before: str, phase: str, outcome: Outcome, phases_ms: dict[str, float]
    ) -> None:
        self.link.send(
            SwitchStatus(
                command.switch_id, before, command.layout, phase, outcome, phases_ms, reason=command.reason
            )
        )

    def snapshot(self) -> Snapshot:
        layout: Layout = self._layout
        first = self._epoch - len(layout.domains) + 1
        domains = tuple(
            DomainStatus(f"d{first + i}", first + i, "", d.shape.tp, 1, d.devices, "serving")
            for i, d in enumerate(layout.domains)
        )
        owner = {device: domain.id for domain in domains for device in domain.devices}
        devices = tuple(
            DeviceStatus(i, "serving", (owner[i],) if i in owner else (), 3.0, 512.0)
            for i in range(self.devices)
        )
        count = len(self.running)
        return Snapshot(
            time_s=0.0,
            layout=str(layout.spec),
            waiting=0,
            running=count,
            rows_used=count,
            domains=domains,
            devices=devices,
            pages_free=1000,
            pages_cached=0,
            pages_total=1024,
            max_model_len=self.max_model_len,
        )
