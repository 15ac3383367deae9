"""A live request as the server keeps it, how it ends, and who gets its output."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dynamictp.control.windows import Stream, Who
from dynamictp.errors import DynamicTPError
from dynamictp.messages import PromptLogprobs, SamplingParams, ServedBy, TokenEvent
from dynamictp.observe.requests import Finished
from dynamictp.server.admission import Waiting, class_of
from dynamictp.server.sender import Sender

TOKEN_BYTES = 4


@dataclass(frozen=True)
class Ended:
    """Why a request will get no more tokens. `status` is an HTTP status, for reason `error`."""

    reason: Literal["stop", "length", "error"]
    cached_tokens: int = 0
    message: str = ""
    status: int = 500


class SinkFull(DynamicTPError):
    """A sink can't keep more: its request is to end. `status` is the HTTP status if the answer has not begun:
    408 when nobody takes what it keeps, 400 when more was asked for than it may keep.
    """

    def __init__(self, message: str, status: int = 408) -> None:
        super().__init__(message)
        self.status = status


class Sink(Protocol):
    """Receives one request's output, in order, in the event loop's thread. Must not block, nor raise anything
    but `SinkFull`."""

    def on_token(self, event: TokenEvent) -> bool:
        """True when the request needs no further token: it is then cancelled in the engine."""
        ...

    def on_prompt_logprobs(self, part: PromptLogprobs) -> None: ...

    def on_end(self, end: Ended) -> None: ...


@dataclass(slots=True)
class LiveRequest:
    """A request in the engine. `emitted` holds every output token the sink was given."""

    request_id: str
    prompt: bytes
    """Token ids as 32-bit integers."""
    sampling: SamplingParams
    sender: Sender
    group: str
    sink: Sink
    waiting: Waiting | None
    """Its entry in the backlog, until its first token."""
    attempt: int = 1
    emitted: array[int] = field(default_factory=lambda: array("I"))
    past: ServedBy | None = None
    """What earlier attempts went through."""
    served: ServedBy | None = None
    queued_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def who(self) -> Who:
        """What its targets depend on."""
        tokens = self.prompt_len
        return Who(self.sender.arrival_s, tokens, class_of(tokens), self.sender.tenant)

    @property
    def stream(self) -> Stream:
        """Its tokens so far; it has one at least."""
        return Stream(self.who, len(self.emitted), self.first_token_s, self.last_token_s)


def finished(live: LiveRequest, ended: Ended, now: float) -> Finished:
    """What metrics are told of a request that ended well at `now`."""
    served = merge_served(live.past, live.served)
    return Finished(
        reason=ended.reason,
        arrival_s=live.sender.arrival_s,
        tenant=live.sender.tenant,
        first_token_s=live.first_token_s,
        last_token_s=live.last_token_s,
        end_s=now,
        prompt_tokens=live.prompt_len,
        output_tokens=len(live.emitted),
        tp=served.tp if served is not None else 0,
        cached_tokens=ended.cached_tokens,
        handovers=served.handovers if served is not None else 0,
        recomputes=served.recomputes if served is not None else 0,
    )


def merge_served(past: ServedBy | None, served: ServedBy | None) -> ServedBy | None:
    """What a request went through over two attempts; the place is that of the later one."""
    if past is None or served is None:
        return served if past is None else past
    return ServedBy(
        domain=served.domain,
        tp=served.tp,
        tp_min=min(past.tp_min, served.tp_min),
        tp_max=max(past.tp_max, served.tp_max),
        handovers=past.handovers + served.handovers,
        recomputes=past.recomputes + served.recomputes,
    )
