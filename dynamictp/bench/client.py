"""Asynchronous load client for any OpenAI-compatible server.

A request's life: due (`intended_s`) → `Client.send` stamps `sent_s`, connects, posts → each body
piece is stamped on arrival (`exchange`), cut into events (`wire`), read here → `Result`.
A request that goes wrong is a Result with a `failure`, never an exception: a schedule goes on.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import msgspec

from dynamictp.bench.exchange import Origin, exchange
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.wire import EventParser, Head, WireError
from dynamictp.clock import Clock, SystemClock

T = TypeVar("T")

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Sender(Protocol):
    """Plays one request; `intended_s` is when it was due on the schedule's clock."""

    async def send(self, request: Request, intended_s: float) -> Result: ...


class Reader:
    """Turns one response into the fields of a Result; owns them until `result()`."""

    def __init__(self, request: Request, intended_s: float, sent_s: float) -> None:
        self.failure: Failure | None = None
        self._request = request
        self._intended_s = intended_s
        self._sent_s = sent_s
        self._events = EventParser()
        self._head: Head | None = None
        self._error_body = b""
        self._chunk_s: list[float] = []
        self._chunk_tokens: list[int] = []
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._usage: Mapping[str, Any] = {}
        self._finish_reason: str | None = None
        self._report: Mapping[str, object] | None = None

    def on_head(self, head: Head) -> None:
        self._head = head

    def on_body(self, piece: bytes, at_s: float) -> None:
        if self._head is not None and self._head.status >= 400:
            self._error_body += piece
            return
        for data in self._events.feed(piece):
            self._on_event(data, at_s)

    def _on_event(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
            if "error" in event:
                self._fail(FailureKind.STREAM, _error_message(event["error"]))
                return
            self._on_chunk(event, at_s)
        except (msgspec.DecodeError, AttributeError, TypeError, KeyError, ValueError) as error:
            self._fail(FailureKind.PROTOCOL, f"unreadable event {data[:200]!r}: {error}")

    def _on_chunk(self, event: Mapping[str, Any], at_s: float) -> None:
        counted = self._usage.get("completion_tokens", 0)
        self._usage = event.get("usage") or self._usage
        self._report = event.get("dynamictp", self._report)
        for choice in event.get("choices", ()):
            text = choice.get("text") or _delta_text(choice.get("delta") or {})
            ids = choice.get("token_ids") or ()
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if not text and not ids:
                continue  # a role or finish chunk
            # Without token ids a running usage tells the count; without that, a chunk is a token.
            tokens = len(ids) or max(self._usage.get("completion_tokens", 0) - counted, 1)
            self._chunk_s.append(at_s)
            self._chunk_tokens.append(tokens)
            self._text.append(text)
            self._token_ids.extend(ids)

    def _fail(self, kind: FailureKind, message: str, status: int | None = None) -> None:
        if self.failure is None:
            self.failure = Failure(kind, message, status)

    def on_end(self) -> None:
        """The response is complete: decides whether it was a whole answer."""
        assert self._head is not None
        if self._head.status >= 400:
            self._fail(FailureKind.REFUSED, _error_text(self._error_body), self._head.status)
        elif self._finish_reason is None:
            # [DONE] isn't asked for: some servers never send it, and the finish reason says all it says.
            self._fail(FailureKind.TRUNCATED, "the stream ended without a finish reason")
        elif not self._token_ids:
            self._spread_tokens()
        elif self._finish_reason == "length":
            used = self._usage.get("completion_tokens", len(self._token_ids))
            if used != len(self._token_ids):
                message = f"{len(self._token_ids)} token ids streamed, usage says {used}"
                self._fail(FailureKind.PROTOCOL, message)

    def _spread_tokens(self) -> None:
        """Where only the usage knows how many tokens came, its surplus over one a chunk goes to the longest
        texts. One token more may be the end of the sequence, which has no text.
        """
        surplus = self._usage.get("completion_tokens", 0) - sum(self._chunk_tokens)
        if surplus > 1 and all(tokens == 1 for tokens in self._chunk_tokens):
            self._chunk_tokens = apportion(self._usage["completion_tokens"], [len(t) for t in self._text])

    def on_broken(self, kind: FailureKind, message: str) -> None:
        """The exchange ended early."""
        self._fail(kind, message)

    def result(self, end_s: float) -> Result:
        headers = self._head.headers if self._head else {}
        tp = headers.get("x-dynamictp-tp", "")
        return Result(
            request=self._request,
            intended_s=self._intended_s,
            sent_s=self._sent_s,
            end_s=end_s,
            chunk_s=tuple(self._chunk_s),
            chunk_tokens=tuple(self._chunk_tokens),
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=self._usage.get("completion_tokens"),
            finish_reason=self._finish_reason,
            failure=self.failure,
            request_id=headers.get("x-request-id"),
            domain=headers.get("x-dynamictp-domain"),
            tp=int(tp) if tp.isdigit() else None,
            report=self._report,
        )


class Client:
    """Sends requests to one server. Holds no connection and no state between requests.

    Every request has its own connection, so its connect time (and TLS handshake) is in its latencies.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        clock: Clock | None = None,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        tenant_keys: Mapping[str, str] | None = None,
        cut_s: float | None = None,
        return_token_ids: bool = False,
    ) -> None:
        """`timeout_s` bounds one request from sent to end. At `cut_s` of the clock the run is over and what
        still runs is cut. A tenant's requests carry its key of `tenant_keys`, else `api_key`.

        Raises ValueError for a bad `url`.
        """
        self._origin = Origin.parse(url)
        self._model = model
        self._clock = clock or SystemClock()
        self._headers = _headers(api_key)
        self._tenant_headers = {name: _headers(key) for name, key in (tenant_keys or {}).items()}
        self._timeout_s = timeout_s
        self._cut_s = cut_s
        self._return_token_ids = return_token_ids

    async def send(self, request: Request, intended_s: float) -> Result:
        """Streams one request to its end; failures and time-outs are in the result."""
        body = msgspec.json.encode(request.body(self._model, return_token_ids=self._return_token_ids))
        headers = self._tenant_headers.get(request.tenant, self._headers)
        payload = self._origin.post(_PATHS[request.endpoint], headers, body)
        sent_s = self._clock.now()
        reader = Reader(request, intended_s, sent_s)
        left_s = math.inf if self._cut_s is None else self._cut_s - sent_s
        try:
            if left_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(min(self._timeout_s, left_s)):
                await exchange(self._origin, payload, reader, self._clock)
            reader.on_end()
        except TimeoutError:
            if left_s < self._timeout_s:
                reader.on_broken(FailureKind.CUT, "still running at the end of the run")
            else:
                reader.on_broken(FailureKind.TIMEOUT, f"not finished within {self._timeout_s:g} s")
        except WireError as error:
            reader.on_broken(FailureKind.TRUNCATED, str(error))
        except OSError as error:
            reader.on_broken(FailureKind.CONNECTION, f"{type(error).__name__}: {error}")
        return reader.result(self._clock.now())


def run_lowered(
    main: Callable[[], Coroutine[Any, Any, T]],
    niceness: int = 10,
    *,
    meanwhile: Callable[[], None] = lambda: None,
    every_s: float = 0.5,
) -> T:
    """Runs `main()` on an event loop of a thread of lower priority, and returns its result.

    The caller's thread calls `meanwhile` about every `every_s` until then (to paint, say).

    On Linux niceness belongs to the thread: the caller keeps its own, so that processes it starts
    later (servers, memory probes) don't inherit the client's. Interrupting the caller cancels `main`.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def wrapped() -> None:
        task = asyncio.ensure_future(main())
        running.append((asyncio.get_running_loop(), task))
        outcome.append(await task)

    def body() -> None:
        os.nice(niceness)
        try:
            asyncio.run(wrapped())
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread
            errors.append(error)

    thread = threading.Thread(target=body, name="load-client", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(every_s)
            meanwhile()
    except KeyboardInterrupt:
        for loop, task in running:
            loop.call_soon_threadsafe(task.cancel)
        thread.join(timeout=5.0)
        raise
    if errors:
        raise errors[0]
    return outcome[0]


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` tokens over chunks, at least one each, the rest by weight (largest remainders first)."""
    weights = weights if any(weights) else [1] * len(weights)
    rest, weight = total - len(weights), sum(weights)
    shares = [rest * w / weight for w in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: rest - sum(counts)]:
        counts[i] += 1
    return [1 + count for count in counts]


def _headers(api_key: str | None) -> dict[str, str]:
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"accept": "text/event-stream", **key}


def _delta_text(delta: Mapping[str, Any]) -> str:
    """Text of a chat chunk; servers of reasoning models stream the thoughts under names of their own."""
    return (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")


def _error_message(error: object) -> str:
    if isinstance(error, dict):
        return str(cast("Mapping[str, object]", error).get("message", error))
    return str(error)


def _error_text(body: bytes) -> str:
    """The message of an error response, else the start of its body."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode("utf-8", "replace")
    return _error_message(decoded.get("error", decoded)) if isinstance(decoded, dict) else str(decoded)
