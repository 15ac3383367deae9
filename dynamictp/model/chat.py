"""Chat messages → prompt text, by the model's own Jinja template.

Templates come with downloaded models, so they run sandboxed, see plain values only, and have limits
(`template_limits`). Otherwise the environment matches the one that Hugging Face renders templates in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser

from dynamictp.errors import BadRequest, ConfigError, ModelRefused
from dynamictp.model.config_json import read_json
from dynamictp.model.template_limits import LimitedEnvironment
from dynamictp.model.tokenizer import special_tokens_from_folder

# Marks where the final message ends; templates may trim the space behind it.
_CONTINUE_MARK = "\N{OBJECT REPLACEMENT CHARACTER}continue\N{OBJECT REPLACEMENT CHARACTER} "
MAX_TEMPLATE_CHARS = 1 << 18
"""The longest published template has a tenth of it; compiling takes 20 µs a character."""
_MAX_REASON_CHARS = 300
_RESERVED = ("messages", "add_generation_prompt", "raise_exception", "strftime_now")


class ChatTemplate:
    """A compiled template with the model's special tokens. Immutable; rendering is thread-safe."""

    def __init__(
        self,
        source: str | None,
        *,
        special_tokens: Mapping[str, str],
        variants: Mapping[str, str] | None = None,
    ) -> None:
        """`source` is None for a model without a template: `render` then refuses.

        `variants` are named alternatives (`tool_use`, `rag`) that some models ship.
        Raises `ModelRefused` for a template beyond `MAX_TEMPLATE_CHARS`.
        """
        longest = max(len(text or "") for text in (source, *(variants or {}).values()))
        if longest > MAX_TEMPLATE_CHARS:
            raise ModelRefused(
                f"a chat template of {longest} characters; at most {MAX_TEMPLATE_CHARS} are read"
            )
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._variants = {"default": source, **(variants or {})}
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the name the template knows them under, such as `bos_token`."""
        return dict(self._special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Prompt text of a conversation; `kwargs` (tools, documents, …) are passed to the template.

        `continue_final_message` ends the prompt inside the last message, for the model to go on with.
        Raises `BadRequest` when the model has no template, the template refuses, or the two flags conflict.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        for name in kwargs:
            if name in _RESERVED:
                raise BadRequest(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")
        # Explicit nulls come from clients that echo our own answers; templates expect the key to be absent.
        chat: list[dict[str, Any]] = [
            {key: value for key, value in message.items() if value is not None} for message in messages
        ]
        final = _mark_final(chat) if continue_final_message else ""
        values = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        text = self._render(messages=chat, add_generation_prompt=add_generation_prompt, **values)
        return _cut_at_mark(text, final) if continue_final_message else text

    def _render(self, **values: Any) -> str:
        name = "tool_use" if values.get("tools") and "tool_use" in self._variants else "default"
        try:
            return self._environment.render(self._template(name), values)
        except jinja2.TemplateError as error:
            raise BadRequest(f"the chat template refused: {_reason(error)}", param="messages") from error
        except _TEMPLATE_FAILURES as error:
            raise BadRequest(
                f"the chat template failed on these messages: {_reason(error)}", param="messages"
            ) from error

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            source = self._variants[name]
            if source is None:
                raise BadRequest(
                    "this model has no chat template; use /v1/completions or give the server --chat-template",
                    param="messages",
                )
            self._compiled[name] = self._environment.from_string(source)
        return self._compiled[name]


_TEMPLATE_FAILURES = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    SyntaxError,
)
"""What a template's own code can raise, and Python's compiler for what Jinja makes of it."""


def _reason(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + " …"


def template_from_folder(folder: Path) -> ChatTemplate:
    """The template of a Hugging Face folder: `chat_template.jinja` before `tokenizer_config.json`."""
    special_tokens = special_tokens_from_folder(folder)
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelRefused(f"{file}: not readable as text: {error}") from error
        return ChatTemplate(source, special_tokens=special_tokens)
    config_file = folder / "tokenizer_config.json"
    entry = (read_json(config_file) if config_file.exists() else {}).get("chat_template")
    if isinstance(entry, list):
        named = {str(item.get("name")): str(item.get("template")) for item in entry if isinstance(item, dict)}
        return ChatTemplate(named.pop("default", None), special_tokens=special_tokens, variants=named)
    return ChatTemplate(entry if isinstance(entry, str) else None, special_tokens=special_tokens)


def template_from_file(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The template in a file the operator names. Raises `ConfigError` when it can't be read or compiled."""
    try:
        template = ChatTemplate(path.read_text(encoding="utf-8"), special_tokens=special_tokens)
        template._template("default")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: cannot be read: {error}") from error
    except (jinja2.TemplateError, ModelRefused, *_TEMPLATE_FAILURES) as error:
        raise ConfigError(f"--chat-template {path}: not a valid template: {_reason(error)}") from error
    return template


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text; return that text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    if isinstance(content, list):
        parts = [dict(part) for part in content]
        for part in reversed(parts):
            if isinstance(part.get("text"), str):
                text = part["text"]
                part["text"] = text + _CONTINUE_MARK
                chat[-1]["content"] = parts
                return str(text)
    raise BadRequest(
        "continue_final_message needs a last message with text content", param="continue_final_message"
    )


def _cut_at_mark(text: str, final: str) -> str:
    mark = _CONTINUE_MARK.strip()
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        raise BadRequest(
            "the chat template drops the end of the final message, so it can't be continued",
            param="continue_final_message",
        )
    # A template that trims the message took the mark's space along, and means to trim the text's as well.
    return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        filters={"tojson": _to_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
