"""Requests of the API as values: what a client may ask for, checked field by field.

Parsing is pure. Lengths that depend on the model's tokenizer are checked where the prompt is tokenized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from dynamictp.errors import BadRequest
from dynamictp.server.fields import Fields, as_fields, show
from dynamictp.server.messages_field import ChatPrompt, parse_chat_prompt

_T = TypeVar("_T")

MAX_CHOICES = 128
MAX_REQUEST_CHOICES = 1024
"""Prompts times `n` of one HTTP request."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_TOKENS = 1 << 31
MAX_TIMEOUT_S = 86_400.0
TIMEOUT_HEADER = "x-request-timeout"
"""Seconds, as the body's `timeout`: for proxies, which do not write into bodies."""

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that never change what is generated."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for fields that a request leaves out; `--generation-config auto` takes the model's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Common:
    """What completions and chat share. `max_tokens` is None when the client gave none."""

    model: str | None
    n: int
    max_tokens: int | None
    max_tokens_field: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    priority: int | None
    timeout_s: float | None
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class CompletionRequest:
    """`/v1/completions`. A prompt is text or token ids."""

    common: Common
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    logprobs: int | None
    add_special_tokens: bool


@dataclass(frozen=True)
class ChatRequest:
    """`/v1/chat/completions`."""

    common: Common
    prompt: ChatPrompt
    logprobs: int | None


@dataclass(frozen=True)
class TokenizeRequest:
    model: str | None
    prompt: str | ChatPrompt
    add_special_tokens: bool


def parse_completion(
    body: dict[str, Any] | Fields, vocab: int, defaults: SamplingDefaults
) -> CompletionRequest:
    """Raises `BadRequest`. `vocab` bounds token ids."""
    fields = as_fields(body)
    common = _parse_common(fields, vocab, defaults, least_tokens=0)
    prompts = _parse_prompts(fields, vocab)
    if len(prompts) * common.n > MAX_REQUEST_CHOICES:
        raise BadRequest(
            f"{len(prompts)} prompts with n {common.n}: at most {MAX_REQUEST_CHOICES} choices a request",
            param="n",
        )
    request = CompletionRequest(
        common=common,
        prompts=prompts,
        echo=fields.flag("echo"),
        logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS),
        add_special_tokens=fields.flag("add_special_tokens", True),
    )
    fields.neutral("suffix", "")
    _finish(fields)
    return request


def parse_chat(body: dict[str, Any] | Fields, vocab: int, defaults: SamplingDefaults) -> ChatRequest:
    """Raises `BadRequest`. `vocab` bounds token ids."""
    fields = as_fields(body)
    common = _parse_common(fields, vocab, defaults, least_tokens=1)
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    prompt = parse_chat_prompt(fields)
    fields.neutral("tools", [])
    fields.neutral("tool_choice", "none", "auto")
    fields.neutral("parallel_tool_calls", True, False)
    fields.neutral("functions", [])
    fields.neutral("function_call", "none", "auto")
    fields.neutral("modalities", ["text"])
    fields.neutral("reasoning_effort", "none")
    fields.neutral("echo", False)
    _finish(fields)
    return ChatRequest(common, prompt, (top or 0) if wanted else None)


def header_timeout_s(value: str | None) -> float | None:
    """The time-out that a header gives, in seconds. Raises `BadRequest`."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise BadRequest(
            f"header {TIMEOUT_HEADER}: expected seconds above 0 and up to {MAX_TIMEOUT_S:g}, got "
            f"{show(value)}",
            param=TIMEOUT_HEADER,
        )
    return seconds


def parse_sampling_defaults(values: dict[str, Any]) -> SamplingDefaults:
    """A model's recommended values, held to what a request may ask for. Raises `BadRequest`."""
    fields = Fields(values)
    defaults = _parse_sampling(fields, SamplingDefaults())
    fields.finish()
    return defaults


def parse_tokenize(body: dict[str, Any] | Fields) -> TokenizeRequest:
    fields = as_fields(body)
    model = fields.text("model", 1024)
    chat = fields.take("messages") is not None
    if chat == (fields.take("prompt") is not None):
        raise BadRequest("give either prompt or messages", param="prompt")
    prompt: str | ChatPrompt
    if chat:
        prompt = parse_chat_prompt(fields)
        special = prompt.add_special_tokens
    else:
        text = fields.text("prompt")
        assert text is not None
        prompt, special = text, fields.flag("add_special_tokens", True)
    fields.finish()
    return TokenizeRequest(model, prompt, special)


def parse_detokenize(body: dict[str, Any] | Fields, vocab: int) -> tuple[list[int], bool]:
    """Token ids, and whether special tokens are left out of the text."""
    fields = as_fields(body)
    fields.ignore("model")
    fields.require("tokens", "an array of token ids")
    tokens = fields.array("tokens", 1 << 20, _ids_text(vocab), lambda t: _is_token(t, vocab))
    skip = fields.flag("skip_special_tokens")
    fields.finish()
    return tokens, skip


def _parse_common(fields: Fields, vocab: int, defaults: SamplingDefaults, *, least_tokens: int) -> Common:
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    name, max_tokens = _parse_max_tokens(fields, least_tokens)
    min_tokens = fields.integer("min_tokens", 0, MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens {min_tokens} is above {name} {max_tokens}", param="min_tokens")
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != n:
        raise BadRequest(f"best_of other than n ({n}) is not supported", param="best_of")
    stream = fields.flag("stream")
    sampling = _parse_sampling(fields, defaults)
    return Common(
        model=fields.text("model", 1024),
        n=n,
        max_tokens=max_tokens,
        max_tokens_field=name,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=_parse_logit_bias(fields, vocab),
        seed=fields.integer("seed", -(1 << 63), (1 << 64) - 1),
        min_tokens=min_tokens,
        ignore_eos=fields.flag("ignore_eos"),
        stop=_parse_stop(fields),
        stop_token_ids=tuple(
            fields.array("stop_token_ids", MAX_STOP_IDS, _ids_text(vocab), lambda t: _is_token(t, vocab))
        ),
        include_stop=fields.flag("include_stop_str_in_output"),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        return_token_ids=fields.flag("return_token_ids"),
        priority=fields.integer("priority", -(1 << 31), (1 << 31) - 1),
        timeout_s=fields.number("timeout", 0, MAX_TIMEOUT_S, above=True),
        stream=stream,
        include_usage=_parse_stream_options(fields, stream),
    )


def _parse_sampling(fields: Fields, defaults: SamplingDefaults) -> SamplingDefaults:
    """The fields that a model may have defaults for."""
    return SamplingDefaults(
        temperature=_or(fields.number("temperature", 0, 2), defaults.temperature),
        top_p=_or(fields.number("top_p", 0, 1, above=True), defaults.top_p),
        top_k=max(0, _or(fields.integer("top_k", -1, MAX_TOKENS), defaults.top_k)),
        min_p=_or(fields.number("min_p", 0, 1), defaults.min_p),
        repetition_penalty=_or(
            fields.number("repetition_penalty", 0, 10, above=True), defaults.repetition_penalty
        ),
    )


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _parse_max_tokens(fields: Fields, least: int) -> tuple[str, int | None]:
    """`max_completion_tokens` is the newer name of `max_tokens`."""
    old = fields.integer("max_tokens", least, MAX_TOKENS)
    new = fields.integer("max_completion_tokens", least, MAX_TOKENS)
    if old is not None and new is not None and old != new:
        raise BadRequest(
            f"max_tokens {old} and max_completion_tokens {new} differ; give one of them", param="max_tokens"
        )
    if new is not None:
        return "max_completion_tokens", new
    return "max_tokens", old


def _parse_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    expected = f"a string or up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise fields.refuse("stop", expected, value)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise fields.refuse("stop", expected, stop)
    return tuple(stops)


def _parse_logit_bias(fields: Fields, vocab: int) -> tuple[tuple[int, float], ...]:
    biases = fields.mapping("logit_bias") or {}
    if len(biases) > MAX_BIASES:
        raise fields.refuse("logit_bias", f"at most {MAX_BIASES} tokens", len(biases))
    parsed = []
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab):
            raise fields.refuse("logit_bias", f"token ids from 0 to {vocab - 1} as keys", key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not -100 <= value <= 100:
            raise fields.refuse("logit_bias", "numbers from -100 to 100", value)
        parsed.append((int(key), float(value)))
    return tuple(sorted(parsed))


def _parse_stream_options(fields: Fields, stream: bool) -> bool:
    options = fields.mapping("stream_options")
    if options is None:
        return False
    if not stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    inner = fields.child(options, "stream_options.")
    include = inner.flag("include_usage")
    inner.neutral("continuous_usage_stats", False)
    inner.ignore("include_obfuscation")
    inner.finish()
    return include


def _parse_prompts(fields: Fields, vocab: int) -> tuple[str | tuple[int, ...], ...]:
    expected = "a string, an array of strings, an array of token ids, or an array of such arrays"
    prompt = fields.require("prompt", expected)
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise fields.refuse("prompt", expected, prompt)
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    lists = [prompt] if _all_integers(prompt) else prompt
    for ids in lists:
        if not isinstance(ids, list) or not _all_integers(ids):
            raise fields.refuse("prompt", expected, ids)
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            wrong = next(token for token in ids if not 0 <= token < vocab)
            raise fields.refuse("prompt", _ids_text(vocab), wrong)
    return tuple(tuple(ids) for ids in lists)


def _all_integers(items: list[Any]) -> bool:
    """Without a loop in Python: a body holds millions, and the event loop waits."""
    return set(map(type, items)) <= {int}


def _finish(fields: Fields) -> None:
    """Fields of the wider API that are not supported, at their neutral values; then no others."""
    fields.ignore(*IGNORED)
    fields.neutral("response_format", {"type": "text"})
    fields.neutral("use_beam_search", False)
    fields.neutral("length_penalty", 1.0, 1)
    fields.neutral("prompt_logprobs")
    fields.neutral("truncate_prompt_tokens")
    for name in ("audio", "prediction", "verbosity", "web_search_options", "structured_outputs"):
        fields.neutral(name)
    fields.finish()


def _is_token(value: object, vocab: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab


def _ids_text(vocab: int) -> str:
    return f"token ids from 0 to {vocab - 1}"
