"""How many tokens a prompt has: asked of the server, read from a tokenizer file, or guessed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import httpx
from tokenizers import Tokenizer

from dynamictp.bench.schedule import Message
from dynamictp.errors import ConfigError, FatalError

Prompt = str | Sequence[Message]
Exactness = Literal["server", "file", "approximate"]

TOKENS_PER_WORD = 1.3
"""English prose under byte-pair vocabularies of 30 to 150 thousand entries: 1.2 to 1.4."""


class TokenCounter(Protocol):
    """Counts a prompt's tokens as the server will see them, so far as `exactness` goes."""

    @property
    def exactness(self) -> Exactness: ...

    async def count(self, prompt: Prompt, *, special: bool = True) -> int:
        """`special`: with the tokens a server adds around the prompt. FatalError when it can't be told."""
        ...


class ServerCounter:
    """Asks `/tokenize` (DynamicTP, vLLM): exact, chat template included. Borrows the HTTP client."""

    exactness: Exactness = "server"

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http, self._model = http, model

    async def count(self, prompt: Prompt, *, special: bool = True) -> int:
        body: dict[str, object] = {"model": self._model}
        if isinstance(prompt, str):
            body |= {"prompt": prompt, "add_special_tokens": special}
        else:
            body["messages"] = [{"role": m.role, "content": m.content} for m in prompt]
        try:
            response = await self._http.post("/tokenize", json=body)
            response.raise_for_status()
            return int(response.json()["count"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise FatalError(f"/tokenize gave no count: {error}") from error


class FileCounter:
    """Counts with a `tokenizer.json`; the server's chat template comes on top of what it says."""

    exactness: Exactness = "file"

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when `path` is no tokenizer."""
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is no tokenizer.json: {error}") from error

    async def count(self, prompt: Prompt, *, special: bool = True) -> int:
        texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        return sum(len(self._tokenizer.encode(text, add_special_tokens=special).ids) for text in texts)


class ApproximateCounter:
    """Words times a ratio: for servers that don't tell, whose usage then says the truth."""

    exactness: Exactness = "approximate"

    def __init__(self, tokens_per_word: float = TOKENS_PER_WORD, overhead_tokens: float = 0.0) -> None:
        """`overhead_tokens` stand around the text of every prompt (chat template, special tokens)."""
        self._tokens_per_word, self._overhead_tokens = tokens_per_word, overhead_tokens

    async def count(self, prompt: Prompt, *, special: bool = True) -> int:
        texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        words = sum(len(text.split()) for text in texts)
        return round(words * self._tokens_per_word + (self._overhead_tokens if special else 0.0))


async def calibrated(
    http: httpx.AsyncClient, model: str, endpoint: str, texts: tuple[str, str]
) -> ApproximateCounter:
    """Ratio and overhead from the usage of two requests of one output token, a short text and a long one.

    The usual ratio where the server answers otherwise than expected: the load will tell why.
    """
    try:
        seen = [(len(text.split()), await _usage(http, model, endpoint, text)) for text in texts]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ApproximateCounter()
    (words, tokens), (more_words, more_tokens) = seen
    ratio = (more_tokens - tokens) / (more_words - words)
    return ApproximateCounter(ratio, tokens - ratio * words) if ratio > 0 else ApproximateCounter()


async def _usage(http: httpx.AsyncClient, model: str, endpoint: str, text: str) -> int:
    body: dict[str, object] = {"model": model, "max_tokens": 1, "temperature": 0}
    if endpoint == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": text}]
    else:
        path = "/v1/completions"
        body["prompt"] = text
    response = await http.post(path, json=body)
    response.raise_for_status()
    return int(response.json()["usage"]["prompt_tokens"])
