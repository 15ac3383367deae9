"""What to send and when, decided before the first byte leaves: an open-loop schedule.

Arrival times never depend on how the server answers, so a stall is measured, not omitted.
All times are seconds after the schedule's origin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `role` system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a schedule.

    `prompt` is text or token ids; chat sends it as the last user message, after `history`. `extra` holds
    further fields of the request's JSON body (`ignore_eos`, `priority`, …). With `follows`, the request is
    due `think_s` after the one of that name has ended. `prompt_tokens` is the length it was made for.
    """

    intended_s: float
    prompt: str | tuple[int, ...]
    max_tokens: int
    endpoint: Endpoint = "completions"
    name: str = ""
    temperature: float = 0.0
    seed: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    traffic_class: str = ""
    tenant: str = ""
    history: tuple[Message, ...] = ()
    follows: str = ""
    think_s: float = 0.0
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.intended_s < 0:
            raise ValueError(f"intended_s is {self.intended_s}; a request can't be due before the origin")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; expected at least 1")
        if self.endpoint == "chat" and not isinstance(self.prompt, str):
            raise ValueError("a chat request needs text; send token ids to completions")
        if self.history and self.endpoint != "chat":
            raise ValueError("only a chat request can have earlier messages")

    def body(self, model: str, *, return_token_ids: bool) -> dict[str, object]:
        """The JSON body of the streamed request."""
        body: dict[str, object] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            messages = (*self.history, Message("user", str(self.prompt)))
            body["messages"] = [{"role": m.role, "content": m.content} for m in messages]
        else:
            body["prompt"] = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        if self.seed is not None:
            body["seed"] = self.seed
        if return_token_ids:
            body["return_token_ids"] = True
        body.update(self.extra)
        return body


def together(
    prompts: Sequence[str | tuple[int, ...]], max_tokens: int, extra: Mapping[str, object] | None = None
) -> list[Request]:
    """All prompts at the origin at once: `len(prompts)` parallel streams."""
    return [
        Request(0.0, prompt, max_tokens, name=f"stream-{i}", extra=extra or {})
        for i, prompt in enumerate(prompts)
    ]


def schedule_digest(schedule: Iterable[Request]) -> str:
    """SHA-256 over everything that is sent and when; a body's model name and the server's answers aside."""
    sha = hashlib.sha256()
    for request in schedule:
        sha.update(msgspec.json.encode(request, order="deterministic"))
    return sha.hexdigest()
