"""Choices as answers: the two API styles, as chunks of a stream and as a whole body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from dynamictp.messages import TokenLogprobs
from dynamictp.model.tokenizer import Tokenizer
from dynamictp.server.choice import Choice, Delta, PlacedLogprobs
from dynamictp.server.generation import Generation
from dynamictp.server.schema import (
    Chat,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Served,
    TopLogprob,
    Usage,
    to_event,
    to_json,
)

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; clients of the field's servers know this number."""


class Renderer(Protocol):
    """Writes one generation in the style of its endpoint."""

    @property
    def model(self) -> str:
        """Its name in the answer."""
        ...

    def opening(self, index: int, choice: Choice) -> bytes:
        """Events before a choice's first text."""
        ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def closing(self, index: int, reason: str, served: Served | UnsetType) -> bytes:
        """The event with a choice's finish reason."""
        ...

    def usage(self, usage: Usage, served: Served) -> bytes:
        """The event behind all choices, when the client asked for usage."""
        ...

    def body(self, generation: Generation) -> bytes:
        """The whole answer as JSON."""
        ...


class CompletionRenderer:
    """`/v1/completions`."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        model: str,
        created: int,
        echo: bool,
        logprobs: bool,
        return_token_ids: bool,
        include_usage: bool,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self.model = model
        self._created = created
        self._echo = echo
        self._logprobs = logprobs
        self._return_ids = return_token_ids
        # A stream with usage shows it as null in every chunk but the last.
        self._no_usage: UnsetType | None = None if include_usage else UNSET

    def opening(self, index: int, choice: Choice) -> bytes:
        if not self._echo and not self._return_ids:
            return b""
        prompt = self._generation.prompt_of(index)
        head = CompletionChoice(index, prompt.text if self._echo else "")
        if self._echo and self._logprobs:
            head.logprobs = self._prompt_logprobs(prompt.ids, choice)
        chunk = self._chunk(head)
        if self._return_ids:
            head.prompt_token_ids, head.token_ids = prompt.ids, []
            if len(self._generation.job.prompts) == 1:
                chunk.prompt_token_ids = prompt.ids
        return to_event(chunk)

    def delta(self, index: int, delta: Delta) -> bytes:
        if not (delta.text or self._logprobs or self._return_ids):
            return b""
        choice = CompletionChoice(index, delta.text)
        if self._logprobs:
            choice.logprobs = self._token_logprobs(delta.logprobs, self._echoed(index))
        if self._return_ids:
            choice.token_ids = delta.token_ids
        return to_event(self._chunk(choice))

    def closing(self, index: int, reason: str, served: Served | UnsetType) -> bytes:
        chunk = self._chunk(CompletionChoice(index, "", finish_reason=reason))
        chunk.dynamictp = served
        return to_event(chunk)

    def usage(self, usage: Usage, served: Served) -> bytes:
        chunk = self._chunk()
        chunk.usage, chunk.dynamictp = usage, served
        return to_event(chunk)

    def body(self, generation: Generation) -> bytes:
        choices = [self._whole(index, choice) for index, choice in enumerate(generation.choices)]
        answer = Completion(generation.job.id, self._created, self.model, choices)
        answer.usage, answer.dynamictp = generation.usage(), generation.served()
        if self._return_ids and len(generation.job.prompts) == 1:
            answer.prompt_token_ids = generation.job.prompts[0].ids
        return to_json(answer)

    def _whole(self, index: int, choice: Choice) -> CompletionChoice:
        prompt = self._generation.prompt_of(index)
        delta = choice.take() or Delta("", [], [])
        text = prompt.text + delta.text if self._echo else delta.text
        answer = CompletionChoice(index, text, finish_reason=choice.finish_reason)
        if self._logprobs:
            answer.logprobs = self._token_logprobs(delta.logprobs, self._echoed(index))
            if self._echo:
                answer.logprobs = _join(self._prompt_logprobs(prompt.ids, choice), answer.logprobs)
        if self._return_ids:
            answer.prompt_token_ids, answer.token_ids = prompt.ids, delta.token_ids
        return answer

    def _echoed(self, index: int) -> int:
        return len(self._generation.prompt_of(index).text) if self._echo else 0

    def _chunk(self, *choices: CompletionChoice) -> Completion:
        return Completion(
            self._generation.job.id, self._created, self.model, list(choices), usage=self._no_usage
        )

    def _token_logprobs(self, entries: Sequence[PlacedLogprobs], base: int) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=[base + placed.offset for placed in entries],
            token_logprobs=[_finite(placed.entry.logprob) for placed in entries],
            tokens=[self._tokenizer.token_text(placed.entry.token) for placed in entries],
            top_logprobs=[self._top(placed.entry) for placed in entries],
        )

    def _prompt_logprobs(self, ids: Sequence[int], choice: Choice) -> CompletionLogprobs:
        """Entries for every prompt token; the first has nothing to be conditioned on."""
        answer = CompletionLogprobs([], [], [], [])
        offset = 0
        for index, token in enumerate(ids):
            entry = choice.prompt_logprobs.get(index)
            text = self._tokenizer.token_text(token)
            answer.text_offset.append(offset)
            answer.token_logprobs.append(None if entry is None else _finite(entry.logprob))
            answer.tokens.append(text)
            answer.top_logprobs.append(None if entry is None else self._top(entry))
            offset += len(text)
        return answer

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the chosen one. Of tokens with the same text the likelier counts."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._tokenizer.token_text(token), _finite(logprob))
        return top


class ChatRenderer:
    """`/v1/chat/completions`."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        model: str,
        created: int,
        logprobs: bool,
        return_token_ids: bool,
        include_usage: bool,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self.model = model
        self._created = created
        self._logprobs = logprobs
        self._return_ids = return_token_ids
        self._no_usage: UnsetType | None = None if include_usage else UNSET

    def opening(self, index: int, choice: Choice) -> bytes:
        chunk = self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
        if self._return_ids:
            chunk.prompt_token_ids = self._generation.prompt_of(index).ids
        return to_event(chunk)

    def delta(self, index: int, delta: Delta) -> bytes:
        if not (delta.text or self._logprobs or self._return_ids):
            return b""
        choice = ChatChunkChoice(index, ChatDelta(content=delta.text))
        if self._logprobs:
            choice.logprobs = self._token_logprobs(delta.logprobs)
        if self._return_ids:
            choice.token_ids = delta.token_ids
        return to_event(self._chunk(choice))

    def closing(self, index: int, reason: str, served: Served | UnsetType) -> bytes:
        chunk = self._chunk(ChatChunkChoice(index, ChatDelta(), finish_reason=reason))
        chunk.dynamictp = served
        return to_event(chunk)

    def usage(self, usage: Usage, served: Served) -> bytes:
        chunk = self._chunk()
        chunk.usage, chunk.dynamictp = usage, served
        return to_event(chunk)

    def body(self, generation: Generation) -> bytes:
        choices = [self._whole(index, choice) for index, choice in enumerate(generation.choices)]
        answer = Chat(generation.job.id, self._created, self.model, choices, "chat.completion")
        answer.usage, answer.dynamictp = generation.usage(), generation.served()
        if self._return_ids:
            answer.prompt_token_ids = generation.job.prompts[0].ids
        return to_json(answer)

    def _whole(self, index: int, choice: Choice) -> ChatChoice:
        delta = choice.take() or Delta("", [], [])
        logprobs = self._token_logprobs(delta.logprobs) if self._logprobs else None
        reason = choice.finish_reason or "stop"
        answer = ChatChoice(index, ChatMessage("assistant", delta.text), logprobs, reason)
        if self._return_ids:
            answer.token_ids = delta.token_ids
        return answer

    def _chunk(self, *choices: ChatChunkChoice) -> Chat:
        return Chat(
            self._generation.job.id,
            self._created,
            self.model,
            list(choices),
            "chat.completion.chunk",
            usage=self._no_usage,
        )

    def _token_logprobs(self, entries: Sequence[PlacedLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._logprob(placed.entry) for placed in entries])

    def _logprob(self, entry: TokenLogprobs) -> ChatLogprob:
        text, spelled = self._spell(entry.token)
        top = [TopLogprob(*self._spelled(token, logprob)) for token, logprob in entry.top]
        return ChatLogprob(text, _finite(entry.logprob), spelled, top)

    def _spelled(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        text, spelled = self._spell(token)
        return text, _finite(logprob), spelled

    def _spell(self, token: int) -> tuple[str, list[int]]:
        return self._tokenizer.token_text(token), list(self._tokenizer.token_bytes(token))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )
