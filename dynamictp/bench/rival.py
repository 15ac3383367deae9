"""Another OpenAI-compatible server under the same loads, taking turns with ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamictp.bench.admin import base_url
from dynamictp.bench.client import Client, run_lowered
from dynamictp.bench.player import run_schedule
from dynamictp.bench.probe import http_client, probe
from dynamictp.bench.record import ServerFacts
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import together
from dynamictp.clock import SystemClock
from dynamictp.errors import FatalError

Prompt = tuple[int, ...]

_TRIAL_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Form:
    """How a server wants its requests: prompts as token ids or as text, and fields beyond the standard."""

    ids: bool
    extra: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        ends = "of the full length" if self.extra else "that may end early (it does not take ignore_eos)"
        return f"prompts as {'token ids' if self.ids else 'text'}, outputs {ends}"


# From the most exact to the most common.
FORMS = (
    Form(ids=True, extra={"ignore_eos": True}),
    Form(ids=False, extra={"ignore_eos": True}),
    Form(ids=True),
    Form(ids=False),
)


@dataclass(frozen=True, slots=True)
class RivalFacts:
    """What the other server is, and how it was asked. `short`: some output was shorter than asked for."""

    url: str
    model: str
    version: str
    form: str
    short: bool = False


class Rival:
    """Plays loads on the other server, on a thread of lower priority, as `Session` does on ours.

    `as_text` turns token ids of our tokenizer into text, for servers that want that. Raises FatalError when
    the server has no such model, refuses every form of request, or fails one later.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        as_text: Callable[[Sequence[Prompt]], list[str]],
        *,
        trial: Prompt,
        api_key: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._as_text = as_text
        self._short = False
        self._clock = SystemClock()
        self._facts = run_lowered(lambda: _look(url, model, api_key))
        self._client = Client(base_url(url), self._facts.model, api_key=api_key, timeout_s=timeout_s)
        self._form = self._find_form(trial)

    @property
    def facts(self) -> RivalFacts:
        known = self._facts
        return RivalFacts(known.url, known.model, known.version, str(self._form), self._short)

    def play(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Result]:
        """All prompts at once. Raises FatalError when one fails."""
        results = self._send(self._form, prompts, max_tokens)
        for result in results:
            if result.failure is not None:
                raise FatalError(f"a request to {self._facts.url} failed: {result.failure}")
            self._short |= result.output_tokens < max_tokens
        return results

    def _send(self, form: Form, prompts: Sequence[Prompt], max_tokens: int) -> list[Result]:
        given: Sequence[Prompt | str] = prompts if form.ids else self._as_text(prompts)
        schedule = together(given, max_tokens, form.extra)
        return run_lowered(lambda: run_schedule(schedule, self._client, self._clock))

    def _find_form(self, trial: Prompt) -> Form:
        refusals: list[str] = []
        for form in FORMS:
            (result,) = self._send(form, [trial], _TRIAL_TOKENS)
            if result.failure is None:
                return form
            refusals.append(f"{form}: {result.failure}")
        raise FatalError(f"{self._facts.url} takes no completion request\n" + "\n".join(refusals))


async def _look(url: str, model: str | None, api_key: str | None) -> ServerFacts:
    async with http_client(url, api_key) as http:
        return await probe(http, model)
