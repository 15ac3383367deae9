"""Requests → jobs: template, tokens, length checks, seeds, sampling parameters."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from dynamictp.messages import SamplingParams, pack_tokens
from dynamictp.server.choice import TextRules
from dynamictp.server.generation import SEEDS, Job, PromptTokens
from dynamictp.server.messages_field import ChatPrompt
from dynamictp.server.requests import ChatRequest, Common, CompletionRequest
from dynamictp.server.sender import Sender
from dynamictp.server.service import Service
from dynamictp.server.stop import StopSet

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class _Recipe:
    """What all prompts of a request share. `default` None: the output may take the rest of the context.
    `echo`: the text of prompts given as ids is wanted.
    """

    common: Common
    stops: StopSet
    default: int | None
    logprobs: int | None
    prompt_logprobs: int | None = None
    echo: bool = False


async def completion_job(service: Service, request: CompletionRequest, sender: Sender) -> Job:
    """Raises `BadRequest`, `CapacityError`."""
    common = request.common
    scored = request.logprobs if request.echo else None
    recipe = _Recipe(
        common, StopSet(common.stop), DEFAULT_COMPLETION_TOKENS, request.logprobs, scored, request.echo
    )
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    encoded = iter(await _encode(service, texts, request.add_special_tokens))
    prompts = tuple(
        _prompt_tokens(service, recipe, prompt, next(encoded))
        if isinstance(prompt, str)
        else _prompt_tokens(service, recipe, None, prompt)
        for prompt in request.prompts
    )
    return _job(service, "cmpl", common, prompts, sender)


async def chat_job(service: Service, request: ChatRequest, sender: Sender) -> Job:
    """Raises `BadRequest`, `CapacityError`."""
    text, ids = await chat_tokens(service, request.prompt)
    recipe = _Recipe(request.common, StopSet(request.common.stop), None, request.logprobs)
    prompt = _prompt_tokens(service, recipe, text, ids)
    return _job(service, "chatcmpl", request.common, (prompt,), sender)


async def chat_tokens(service: Service, prompt: ChatPrompt) -> tuple[str, tuple[int, ...]]:
    """The prompt text that the template makes of the messages, and its tokens. Raises `BadRequest`."""

    def render() -> tuple[str, tuple[int, ...]]:
        text = service.template.render(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            **prompt.template_kwargs,
        )
        return text, tuple(service.tokenizer.encode(text, prompt.add_special_tokens))

    return await service.texts.run(sum(len(message["content"]) for message in prompt.messages), render)


async def text_tokens(service: Service, text: str, add_special_tokens: bool) -> tuple[int, ...]:
    """Token ids of a text. Raises `BadRequest`."""
    (ids,) = await _encode(service, [text], add_special_tokens)
    return ids


async def _encode(service: Service, texts: list[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
    def encode() -> list[tuple[int, ...]]:
        return [tuple(service.tokenizer.encode(text, add_special_tokens)) for text in texts]

    return await service.texts.run(sum(map(len, texts)), encode)


def _prompt_tokens(service: Service, recipe: _Recipe, text: str | None, ids: tuple[int, ...]) -> PromptTokens:
    """`text` None: the prompt came as ids."""
    common = recipe.common
    max_tokens = service.max_tokens(common.max_tokens, recipe.default, len(ids), common.max_tokens_field)
    if not recipe.echo:
        text = ""
    elif text is None:
        # Not before the length is known to fit.
        text = service.tokenizer.decode(ids, common.skip_special_tokens)
    eos = () if common.ignore_eos else service.tokenizer.eos_ids
    stop_ids = tuple(sorted({*common.stop_token_ids, *eos}))
    min_tokens = min(common.min_tokens, max_tokens)
    sampling = SamplingParams(
        seed=0,
        max_tokens=max(1, max_tokens),
        temperature=common.temperature,
        top_p=common.top_p,
        top_k=common.top_k,
        min_p=common.min_p,
        presence_penalty=common.presence_penalty,
        frequency_penalty=common.frequency_penalty,
        repetition_penalty=common.repetition_penalty,
        min_tokens=min_tokens,
        stop_ids=stop_ids,
        logprobs=recipe.logprobs,
        prompt_logprobs=recipe.prompt_logprobs,
        logit_bias=common.logit_bias,
    )
    rules = TextRules(
        stops=recipe.stops,
        stop_ids=frozenset(stop_ids),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        include_stop=common.include_stop,
        skip_special_tokens=common.skip_special_tokens,
    )
    seed = secrets.randbelow(SEEDS) if common.seed is None else common.seed % SEEDS
    return PromptTokens(text, pack_tokens(ids), seed, sampling, rules)


def _job(
    service: Service, kind: str, common: Common, prompts: tuple[PromptTokens, ...], sender: Sender
) -> Job:
    return Job(
        id=f"{kind}-{secrets.token_hex(12)}",
        prompts=prompts,
        n=common.n,
        stream=common.stream,
        sender=sender,
    )
