"""The HTTP answer of a generation: a stream of events or one body, ended early when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from msgspec import UNSET
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dynamictp.errors import DynamicTPError
from dynamictp.server.answers import envelope, error_response
from dynamictp.server.generation import Generation, GenerationFailed
from dynamictp.server.render import Renderer
from dynamictp.server.schema import DONE, to_event

log = logging.getLogger(__name__)


class GenerationResponse(Response):
    """Submits the generation's choices and answers. The headers leave with the first token, so what fails
    before it is an HTTP error; what fails later is an error event in the stream.
    """

    def __init__(self, generation: Generation, renderer: Renderer, *, include_usage: bool) -> None:
        super().__init__()
        self._generation = generation
        self._renderer = renderer
        self._include_usage = include_usage
        self._opened: set[int] = set()
        self._closed: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        watcher = asyncio.create_task(self._watch(receive))
        try:
            try:
                generation.start()
                while not generation.abandoned and not self._can_start():
                    await generation.changed()
            except DynamicTPError as error:
                await error_response(error)(scope, receive, send)
                return
            if not generation.abandoned:
                await (self._stream(send) if generation.job.stream else self._whole(send))
        finally:
            generation.cancel()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            generation.trace(
                scope.get("state", {}).get("request_id", ""), scope["path"], Headers(scope=scope)
            )
            self._log(scope)

    def _log(self, scope: Scope) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        choices = self._generation.choices
        log.info(
            "request_id=%s id=%s tp_domain_id=%s tp=%s choices=%d "
            "prompt_tokens=%d completion_tokens=%d end=%s model=%s",
            scope.get("state", {}).get("request_id"),
            self._generation.job.id,
            ",".join(choice.served.domain if choice.served else "-" for choice in choices),
            ",".join(str(choice.served.tp) if choice.served else "-" for choice in choices),
            len(choices),
            self._generation.usage().prompt_tokens,
            self._generation.usage().completion_tokens,
            ",".join(choice.end for choice in choices),
            self._renderer.model,
        )

    def _can_start(self) -> bool:
        return self._generation.started if self._generation.job.stream else self._generation.ended

    async def _watch(self, receive: Receive) -> None:
        """The only reader of the connection while it answers: the next message is the disconnect."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self._generation.abandon()
                return

    async def _whole(self, send: Send) -> None:
        body = self._renderer.body(self._generation)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._generation.headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        generation = self._generation
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *generation.headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while not generation.abandoned:
                events = b"".join(self._events())
                ended = generation.ended
                if ended:
                    events += self._tail()
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": not ended})
                if ended:
                    return
                await generation.changed()
        except GenerationFailed as failure:
            # A server that stops, a deadline, a client that does not read: nothing to warn of.
            level = logging.INFO if failure.status in (400, 408, 503, 504) else logging.WARNING
            log.log(level, "%s: failed in mid-stream: %s", generation.job.id, failure.message)
            event = to_event(envelope(failure.message, "server_error", code=failure.code))
            await send({"type": "http.response.body", "body": event + DONE})

    def _events(self) -> Iterator[bytes]:
        """What became ready, one event per choice (and its opening and closing ones)."""
        for index, choice in enumerate(self._generation.choices):
            if index in self._closed:
                continue
            delta = choice.take()
            if index not in self._opened and choice.started:
                self._opened.add(index)
                yield self._renderer.opening(index, choice)
            if delta is not None:
                yield self._renderer.delta(index, delta)
            if choice.finish_reason is not None:
                self._closed.add(index)
                last = len(self._closed) == len(self._generation.choices) and not self._include_usage
                served = self._generation.served() if last else UNSET
                yield self._renderer.closing(index, choice.finish_reason, served)

    def _tail(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self._renderer.usage(self._generation.usage(), self._generation.served()) + DONE
