"""All choices of one HTTP request: submitted together, awaited together, cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dynamictp.errors import DynamicTPError
from dynamictp.messages import SamplingParams, unpack_tokens
from dynamictp.model.tokenizer import Tokenizer
from dynamictp.observe.tracing import ChoiceTrace, RequestTrace
from dynamictp.server.choice import MAX_KEPT, Choice, Kept, TextRules
from dynamictp.server.engine_client import EngineClient
from dynamictp.server.live_request import TOKEN_BYTES, LiveRequest
from dynamictp.server.schema import PromptTokensDetails, Served, ServedChoice, Usage
from dynamictp.server.sender import Sender

SEEDS = 1 << 63
MAX_UNREAD = 2048
"""Tokens of a stream that may wait for its client. The kernel's buffers hold several times as many."""
LEAST_UNREAD = 256
"""More than what can come before a healthy stream gets its turn in the event loop."""


_CODES = {400: "answer_too_large", 504: "deadline_exceeded"}


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as text (empty unless it is echoed) and token ids. `seed` is that of the prompt's first
    choice; others count on. `packed` holds the ids as 32-bit integers: thousands of long prompts may wait.
    """

    text: str
    packed: bytes
    seed: int
    sampling: SamplingParams
    rules: TextRules

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(unpack_tokens(self.packed))

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.packed) // TOKEN_BYTES


@dataclass(frozen=True)
class Job:
    """What to generate. Choice `p·n + i` is the i-th of prompt p."""

    id: str
    prompts: tuple[PromptTokens, ...]
    n: int
    stream: bool
    sender: Sender


class GenerationFailed(DynamicTPError):
    """A request was given up. `status` is the HTTP status if the answer has not begun yet: 504 when its
    deadline has passed, 400 when the answer gets too large.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = _CODES.get(status, "generation_failed")


class Generation:
    """Owner of a job's choices. Used by one task; `wake` may come from anywhere in the event loop."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, job: Job) -> None:
        self._client = client
        self.job = job
        self._changed = asyncio.Event()
        self._abandoned = False
        self._live: list[LiveRequest] = []
        kept = Kept(MAX_KEPT)
        self.choices: tuple[Choice, ...] = tuple(
            Choice(
                f"{job.id}-{p * job.n + i}",
                tokenizer,
                prompt.rules,
                wake=self._changed.set,
                wake_on_token=job.stream,
                max_unread=_max_unread(job, prompt) if job.stream else None,
                kept=kept,
            )
            for p, prompt in enumerate(job.prompts)
            for i in range(job.n)
        )

    def prompt_of(self, index: int) -> PromptTokens:
        """The prompt of choice `index`."""
        return self.job.prompts[index // self.job.n]

    def start(self) -> None:
        """Submit every choice. Raises `CapacityError`, then none was."""
        lengths = [len(prompt) for prompt in self.job.prompts for _ in range(self.job.n)]
        predicted_s = self._client.check_room(self.job.sender, lengths)
        for index, choice in enumerate(self.choices):
            prompt = self.prompt_of(index)
            seed = (prompt.seed + index % self.job.n) % SEEDS
            live = self._client.submit(
                choice.request_id,
                prompt.packed,
                msgspec.structs.replace(prompt.sampling, seed=seed),
                choice,
                sender=self.job.sender,
                group=self.job.id,
                # Later prompts of a list wait for their turn: that says nothing about the speed.
                predicted_s=None if index else predicted_s,
            )
            self._live.append(live)

    def abandon(self) -> None:
        """The HTTP client has gone: wakes the waiting task."""
        self._abandoned = True
        self._changed.set()

    @property
    def abandoned(self) -> bool:
        return self._abandoned

    def cancel(self) -> None:
        """End what still runs. May be called at any time, also twice."""
        for choice in self.choices:
            if not choice.ended:
                self._client.cancel(choice.request_id)

    async def changed(self) -> None:
        """Returns when a choice may have something new, or the client has gone. Raises `GenerationFailed`."""
        await self._changed.wait()
        self._changed.clear()
        for choice in self.choices:
            if choice.failure is not None:
                raise GenerationFailed(choice.failure.message, choice.failure.status)

    @property
    def started(self) -> bool:
        """Some choice has its first token."""
        return any(choice.started for choice in self.choices)

    @property
    def ended(self) -> bool:
        return all(choice.ended for choice in self.choices)

    def trace(self, request_id: str, path: str, headers: Mapping[str, str]) -> None:
        """Tell the tracer, if there is one, what became of it."""
        tracer = self._client.tracer
        if tracer is None:
            return
        job = self.job
        choices = [
            _choice_trace(choice, live) for choice, live in zip(self.choices, self._live, strict=False)
        ]
        tracer.request(RequestTrace(request_id, path, job.sender.arrival_s, job.stream, choices, headers))

    def usage(self) -> Usage:
        """Token counts; a prompt counts once, however many choices it has."""
        prompt = sum(map(len, self.job.prompts))
        completion = sum(choice.completion_tokens for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[:: self.job.n])
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def served(self) -> Served:
        return Served([served_choice(choice) for choice in self.choices])

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Where the first choice that started runs."""
        for choice in self.choices:
            if choice.served is not None:
                return [
                    (b"x-dynamictp-domain", choice.served.domain.encode()),
                    (b"x-dynamictp-tp", str(choice.served.tp).encode()),
                ]
        return []


def _choice_trace(choice: Choice, live: LiveRequest) -> ChoiceTrace:
    return ChoiceTrace(
        id=choice.request_id,
        arrival_s=live.sender.arrival_s,
        queued_s=live.queued_s,
        first_token_s=live.first_token_s,
        last_token_s=live.last_token_s,
        prompt_tokens=live.prompt_len,
        output_tokens=len(live.emitted),
        end=choice.end,
        served=choice.served,
    )


def _max_unread(job: Job, prompt: PromptTokens) -> int:
    """Tokens of one choice that may wait for a client that does not read; less when each of them is large."""
    size = 1 + (prompt.sampling.logprobs or 0)
    return max(LEAST_UNREAD, MAX_UNREAD // (size * len(job.prompts) * job.n))


def served_choice(choice: Choice) -> ServedChoice | None:
    served = choice.served
    if served is None:
        return None
    return ServedChoice(
        served.domain, served.tp, served.tp_min, served.tp_max, served.handovers, served.recomputes
    )
