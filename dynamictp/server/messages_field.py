"""Chat messages of a request, and the fields that steer the template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dynamictp.errors import BadRequest
from dynamictp.server.fields import Fields, kind


@dataclass(frozen=True)
class ChatPrompt:
    """Messages and how the template turns them into text."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def parse_chat_prompt(fields: Fields) -> ChatPrompt:
    """`messages` and the fields that steer the template."""
    messages = fields.require("messages", "an array of messages")
    if not isinstance(messages, list) or not messages:
        raise fields.refuse("messages", "a non-empty array of messages", messages)
    continued = fields.flag("continue_final_message")
    opened = fields.flag("add_generation_prompt", not continued)
    if continued and opened:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    kwargs = fields.mapping("chat_template_kwargs") or {}
    taken = {"messages", "add_generation_prompt", "continue_final_message", "tools"} & kwargs.keys()
    if taken:
        raise BadRequest(
            f"chat_template_kwargs: {min(taken)} is a field of the request itself",
            param="chat_template_kwargs",
        )
    return ChatPrompt(
        messages=tuple(_parse_message(fields, message, i) for i, message in enumerate(messages)),
        add_generation_prompt=opened,
        continue_final_message=continued,
        add_special_tokens=fields.flag("add_special_tokens"),
        template_kwargs=kwargs,
    )


def _parse_message(parent: Fields, message: object, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise BadRequest(f"{where}: expected an object, got {kind(message)}", param=where)
    fields = parent.child(message, where + ".")
    fields.require("role", "a role")
    role = fields.choice("role", ("system", "developer", "user", "assistant"), "")
    content = _parse_content(fields, where, optional=role == "assistant")
    name = fields.text("name", 256)
    fields.neutral("tool_calls", [])
    fields.neutral("function_call")
    fields.neutral("refusal")
    fields.neutral("audio")
    fields.neutral("annotations", [])
    fields.finish()
    # Templates of open models know `system`; `developer` is its newer name.
    parsed = {"role": "system" if role == "developer" else role, "content": content}
    return parsed if name is None else {**parsed, "name": name}


def _parse_content(fields: Fields, where: str, *, optional: bool) -> str:
    content = fields.take("content")
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        raise fields.refuse("content", "a string or an array of text parts", content)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise fields.refuse(f"content[{i}]", "a text part", part)
        inner = fields.child(part, f"{where}.content[{i}].")
        inner.require("type", "text")
        inner.choice("type", ("text",), "")
        inner.require("text", "a string")
        texts.append(inner.text("text") or "")
        inner.finish()
    return "\n".join(texts)
