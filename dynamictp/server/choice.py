"""One choice of a request: tokens in, text out, with stop strings, finish reason and log-probabilities.

A choice is the engine client's `Sink`. It turns tokens into text as they arrive, whether or not the HTTP
client reads, so that a stop string ends the request in the engine at once. What is ready waits for `take`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from dynamictp.messages import PromptLogprobs, ServedBy, TokenEvent, TokenLogprobs
from dynamictp.model.tokenizer import IncrementalDecoder, Tokenizer
from dynamictp.server.live_request import Ended, SinkFull, merge_served
from dynamictp.server.stop import StopScanner, StopSet

MAX_KEPT = 1 << 19
"""Tokens and entries of log-probabilities of an answer that is not streamed, all choices together: some
60 MB, and half a second of the event loop to write it down."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TextRules:
    """How the tokens of a request become text. Shared by its choices."""

    stops: StopSet
    stop_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    """0: the prompt is only scored; the one token that the engine must produce is left out."""
    include_stop: bool
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class PlacedLogprobs:
    """Log-probabilities of a token, and where its text begins (characters from the start of the output)."""

    entry: TokenLogprobs
    offset: int


@dataclass(slots=True)
class Delta:
    """What became ready since the last `take`."""

    text: str
    token_ids: list[int]
    logprobs: list[PlacedLogprobs]


class Kept:
    """Owner of the count of what the choices of one request keep until it is answered: tokens, and entries of
    log-probabilities, each about 100 bytes.
    """

    def __init__(self, limit: int) -> None:
        self._left = limit

    def add(self, count: int) -> None:
        """Raises `SinkFull`."""
        self._left -= count
        if self._left < 0:
            raise SinkFull(
                "the answer is too large to be kept until it is whole: use `stream`, or ask for fewer "
                "choices, tokens or log-probabilities",
                400,
            )


def _size(entry: TokenLogprobs | None) -> int:
    return 0 if entry is None else 1 + len(entry.top)


class Choice:
    """Owner of one choice's text. `wake` is called whenever there may be something to take."""

    def __init__(
        self,
        request_id: str,
        tokenizer: Tokenizer,
        rules: TextRules,
        *,
        wake: Callable[[], None],
        wake_on_token: bool,
        max_unread: int | None = None,
        kept: Kept | None = None,
    ) -> None:
        """`max_unread`: so many tokens may wait for `take`; None for an answer that is given as a whole.
        `kept` counts what is kept to the end.
        """
        self._kept = kept or Kept(MAX_KEPT)
        self.request_id = request_id
        self._rules = rules
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=rules.skip_special_tokens)
        self._scanner = StopScanner(rules.stops, include=rules.include_stop)
        self._wake = wake
        self._wake_on_token = wake_on_token
        self._max_unread = max_unread
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PlacedLogprobs] = []
        self._offset = 0
        self._past: ServedBy | None = None
        self._attempt = 1
        self._served: ServedBy | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        """By index in the prompt, from 1."""
        self.finish_reason: FinishReason | None = None
        self.failure: Ended | None = None

    # ------------------------------------------------------------ Sink

    def on_token(self, event: TokenEvent) -> bool:
        self._note_served(event)
        if self._max_unread is not None and len(self._token_ids) >= self._max_unread:
            raise SinkFull(f"the client has not read the last {len(self._token_ids)} tokens")
        if self._rules.max_tokens == 0:
            return False
        if self._max_unread is None:
            self._kept.add(1 + _size(event.logprobs))
        self.completion_tokens += 1
        self._token_ids.append(event.token)
        if event.logprobs is not None:
            self._logprobs.append(PlacedLogprobs(event.logprobs, self._offset))
        early = self.completion_tokens <= self._rules.min_tokens
        ends = not early and event.token in self._rules.stop_ids
        piece = self._decoder.push(event.token) if not ends or self._rules.include_stop else ""
        self._offset += len(piece)
        # Text of the first `min_tokens` tokens neither ends the request nor begins a stop string.
        self._emit(piece if early else self._scanner.push(piece))
        if self._scanner.matched:
            self._finish("stop")
        elif self._wake_on_token:
            self._wake()
        return self._scanner.matched

    def on_prompt_logprobs(self, part: PromptLogprobs) -> None:
        # A restarted engine computes the prompt anew, and what is known is kept already.
        known = self.prompt_logprobs
        new = {index: entry for index, entry in enumerate(part.entries, part.start) if index not in known}
        self._kept.add(sum(map(_size, new.values())))
        known.update(new)

    def on_end(self, end: Ended) -> None:
        self.cached_tokens = end.cached_tokens
        if end.reason == "error":
            self.failure = end
            self._wake()
            return
        self._emit(self._scanner.push(self._decoder.flush()))
        self._emit(self._scanner.flush())
        self._finish("length" if self._rules.max_tokens == 0 else end.reason)

    # ------------------------------------------------------------ for the response

    @property
    def end(self) -> str:
        """How it ended, for logs and traces."""
        if self.failure is not None:
            return "error"
        return self.finish_reason or "cancelled"

    @property
    def served(self) -> ServedBy | None:
        """Where the request runs and what it went through; None before its first token."""
        return merge_served(self._past, self._served)

    @property
    def started(self) -> bool:
        """A first token is there, or it ended without one."""
        return self._served is not None or self.ended

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def take(self) -> Delta | None:
        """What became ready since the last call; None when nothing did."""
        if not (self._text or self._token_ids or self._logprobs):
            return None
        delta = Delta("".join(self._text), self._token_ids, self._logprobs)
        self._text, self._token_ids, self._logprobs = [], [], []
        return delta

    def _emit(self, text: str) -> None:
        if text:
            self._text.append(text)

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._wake()

    def _note_served(self, event: TokenEvent) -> None:
        if event.attempt != self._attempt:
            # The engine restarted: it counts from zero, and computed the tokens so far once more.
            past = self.served
            if past is not None:  # the engine restarted, and computed it again
                past = msgspec.structs.replace(past, recomputes=past.recomputes + 1)
            self._past, self._attempt = past, event.attempt
        self._served = event.served
