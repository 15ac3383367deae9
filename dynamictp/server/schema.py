"""Bodies of the API's answers, in the form and field order that OpenAI's clients know."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

_encoder = msgspec.json.Encoder()


def to_json(value: object) -> bytes:
    return _encoder.encode(value)


def to_event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _encoder.encode(value)


DONE = b"data: [DONE]\n\n"


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ServedChoice(msgspec.Struct):
    """Where a choice ran, and the degrees it saw."""

    domain: str
    tp: int
    tp_min: int
    tp_max: int
    handovers: int
    recomputes: int


class Served(msgspec.Struct):
    choices: list[ServedChoice | None]


# ---------------------------------------------------------------- completions


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """A whole answer, or one chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    dynamictp: Served | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


# ---------------------------------------------------------------- chat


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Chat(msgspec.Struct):
    """A whole answer (`chat.completion`), or one chunk of a stream (`chat.completion.chunk`)."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice]
    object: str
    usage: Usage | UnsetType | None = UNSET
    dynamictp: Served | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
