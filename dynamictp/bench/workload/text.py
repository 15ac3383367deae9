"""Planned requests to real English text of the planned number of tokens.

Sentences of the corpus follow each other in an order that the request's name and the seed decide. A
search over how many words to keep brings the counted length to the target; a short word repeated at the
end fills what no whole word fills.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from dynamictp.bench.prompts import PASSAGE, QUESTIONS
from dynamictp.bench.schedule import Message, Request
from dynamictp.bench.workload.plan import Block, Plan, PlannedRequest
from dynamictp.bench.workload.tokens import TOKENS_PER_WORD, Prompt, TokenCounter

CORPUS = Path(__file__).parents[1] / "data" / "corpus.txt"

# One token with its space in every common vocabulary.
_FILLER = " and"
_MAX_PROBES = 24


@cache
def sentences() -> tuple[str, ...]:
    """Sentences of the package's texts."""
    text = f"{CORPUS.read_text(encoding='utf-8')}\n{PASSAGE}\n" + "\n".join(QUESTIONS)
    parts = re.split(r"(?<=[.?!])\s+", text)
    return tuple(part.replace("\n", " ") for part in parts if part)


@dataclass(frozen=True, slots=True)
class FittedText:
    """Text and the tokens counted for the whole prompt around it."""

    text: str
    tokens: int


class WordStream:
    """An endless text as words; the same key and seed give the same words. Owns the words drawn so far."""

    def __init__(self, key: str, seed: int) -> None:
        self._rng = np.random.default_rng((seed, *key.encode()))
        # A beginning of its own, so that no prefix cache takes one text for another.
        self._words = [f"Note {int(self._rng.integers(10**6))}:"]

    def text(self, words: int) -> str:
        """The first `words` words."""
        corpus = sentences()
        while len(self._words) < words:
            self._words += corpus[int(self._rng.integers(len(corpus)))].split(" ")
        return " ".join(self._words[:words])


class TextMaker:
    """Makes a plan's text with one counter. Owns the texts that requests share."""

    def __init__(self, counter: TokenCounter, seed: int, *, parallel: int = 8) -> None:
        """`parallel`: how many prompts are made at a time (a counter may be a server)."""
        self._counter = counter
        self._seed = seed
        self._parallel = asyncio.Semaphore(parallel)
        self._blocks: dict[tuple[str, int], asyncio.Task[str]] = {}

    async def schedule(
        self,
        plan: Plan,
        endpoint: str,
        extra: Mapping[str, object],
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Request]:
        """Requests in the plan's order; `extra` goes into every body. `on_progress` gets the number done."""
        conversations: list[list[PlannedRequest]] = []
        for request in plan.requests:
            if not request.follows:
                conversations.append([])
            conversations[-1].append(request)
        made: list[Request] = []

        async def make(turns: list[PlannedRequest]) -> list[Request]:
            async with self._parallel:
                requests = await self._conversation(turns, endpoint, extra)
            made.extend(requests)
            if on_progress is not None:
                on_progress(len(made))
            return requests

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(make(turns)) for turns in conversations]
        return [request for task in tasks for request in task.result()]

    async def _conversation(
        self, turns: Sequence[PlannedRequest], endpoint: str, extra: Mapping[str, object]
    ) -> list[Request]:
        requests: list[Request] = []
        history: tuple[Message, ...] = ()
        for number, planned in enumerate(turns, 1):
            if not history and planned.system is not None:
                history = (Message("system", await self.block(planned.system)),)
            opening = "".join([await self.block(block) + " " for block in planned.blocks])
            if endpoint == "chat":
                fitted = await self.fit(planned.name, planned.prompt_tokens, _chat(history, opening))
                prompt, sent = opening + fitted.text, history
            else:
                system = f"{history[0].content} " if history else ""
                fitted = await self.fit(planned.name, planned.prompt_tokens, _plain(system + opening))
                prompt, sent = system + opening + fitted.text, ()
            # What the template alone takes can be more than was planned; then this is the length it has.
            tokens = max(fitted.tokens, planned.prompt_tokens)
            requests.append(_request(replace(planned, prompt_tokens=tokens), endpoint, prompt, sent, extra))
            if number == len(turns):
                break
            # The history's answer is this text, not the server's: the next prompt is the same everywhere.
            answer = await self.block(Block(f"answer-{planned.name}", planned.output_tokens))
            history = (*history, Message("user", prompt), Message("assistant", answer))
        return requests

    async def block(self, block: Block) -> str:
        """The text of a shared piece, made once."""
        key = (block.key, block.tokens)
        if key not in self._blocks:
            fit = self.fit(block.key, block.tokens, lambda text: text, special=False)
            self._blocks[key] = asyncio.create_task(_text_of(fit))
        return await self._blocks[key]

    async def fit(
        self, key: str, tokens: int, wrap: Callable[[str], Prompt], *, special: bool = True
    ) -> FittedText:
        """The longest beginning of the key's text for which `wrap` of it counts at most `tokens`, filled up.

        Never empty, so that a target below the wrapping's own tokens gives one word and a count above it.
        """
        stream = WordStream(key, self._seed)

        async def probe(text: str) -> FittedText:
            return FittedText(text, await self._counter.count(wrap(text), special=special))

        low, best = 1, await probe(stream.text(1))
        high, over = 0, best  # 0: not known yet
        for _ in range(_MAX_PROBES):
            if best.tokens >= tokens or high == low + 1:
                break
            missing = tokens - best.tokens
            if high:
                words = low + missing * (high - low) // (over.tokens - best.tokens)
                words = min(max(words, low + 1), high - 1)
            else:
                words = low + max(round(missing / TOKENS_PER_WORD), 1)
            seen = await probe(stream.text(words))
            if seen.tokens <= tokens:
                low, best = words, seen
            else:
                high, over = words, seen
        if best.tokens < tokens and self._counter.exactness != "approximate":
            filled = await probe(best.text + _FILLER * (tokens - best.tokens))
            best = filled if filled.tokens <= tokens else best
        return best


def _request(
    planned: PlannedRequest,
    endpoint: str,
    prompt: str,
    history: tuple[Message, ...],
    extra: Mapping[str, object],
) -> Request:
    fields = dict(extra)
    if planned.priority:
        fields["priority"] = planned.priority
    return Request(
        intended_s=planned.intended_s,
        prompt=prompt,
        max_tokens=planned.output_tokens,
        endpoint="chat" if endpoint == "chat" else "completions",
        name=planned.name,
        extra=fields,
        traffic_class=planned.traffic_class,
        tenant=planned.tenant,
        history=history,
        follows=planned.follows,
        think_s=planned.think_s,
        prompt_tokens=planned.prompt_tokens,
    )


def _chat(history: tuple[Message, ...], opening: str) -> Callable[[str], Prompt]:
    return lambda text: (*history, Message("user", opening + text))


def _plain(opening: str) -> Callable[[str], Prompt]:
    return lambda text: opening + text


async def _text_of(fit: Awaitable[FittedText]) -> str:
    return (await fit).text
