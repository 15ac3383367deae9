"""Chat templates render as transformers renders them, sandboxed, and fail as bad requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from dynamictp.errors import BadRequest, ConfigError
from dynamictp.model.chat import ChatTemplate, template_from_file, template_from_folder
from dynamictp.model.load import open_model
from tests.model.checkpoints import CHAT_TEMPLATE

Maker = Callable[[str], Path]

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße & <b>1</b>"},
    {"role": "assistant", "content": "It is  "},
]

# Constructs of published templates: loop control, namespaces, dict and string methods, macros, tojson.
ELABORATE = """
{%- macro show(tool) %}{{ tool | tojson(indent=2) }}{% endmacro -%}
{{- bos_token }}
{%- set ns = namespace(system="") %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {%- if loop.index0 > 6 %}{% break %}{% endif %}
    {{- '[' + message.role + ']' + message['content'].strip() + eos_token + '\\n' }}
    {% generation %}{{ message.role.upper() }}{% endgeneration %}

{%- endfor %}
{% if tools is not none and tools %}
  {% for tool in tools %}
{{ show(tool) }}
  {% endfor %}
{% endif %}
{%- if add_generation_prompt %}{{ '[assistant]' + ns.system }}{% endif %}
"""
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"<x>": [1, None, True]}}}]


@pytest.fixture(scope="module")
def reference(checkpoint: Maker) -> Any:
    return transformers.AutoTokenizer.from_pretrained(checkpoint("llama"))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, ELABORATE], ids=["chatml", "elaborate"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("mode", ["prompt", "closed", "continue"])
def test_rendering_equals_transformers(
    reference: Any, template: str, tools: list[dict[str, Any]] | None, mode: str
) -> None:
    flags = {"add_generation_prompt": mode == "prompt", "continue_final_message": mode == "continue"}
    expected = reference.apply_chat_template(
        CHAT, chat_template=template, tools=tools, tokenize=False, **flags
    )
    ours = ChatTemplate(template, special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    assert ours.render(CHAT, tools=tools, **flags) == expected


def test_the_demo_template_adds_its_system_prompt() -> None:
    text = open_model("demo").chat_template().render([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_folder_and_gguf_give_the_same_template(checkpoint: Maker, gguf_checkpoint: Maker) -> None:
    folder, file = open_model(str(checkpoint("llama"))), open_model(str(gguf_checkpoint("llama")))
    assert folder.chat_template().render(CHAT) == file.chat_template().render(CHAT)


def test_the_caller_s_messages_are_left_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}], "name": None}]
    before = json.dumps(messages)
    template = ChatTemplate(
        "{{ messages[0].content[0].text }}|{{ messages[0].name is defined }}", special_tokens={}
    )
    assert template.render(messages) == "one|False"
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "one"
    assert json.dumps(messages) == before


def test_a_trimmed_message_is_continued_without_its_trailing_space() -> None:
    template = ChatTemplate("<{{ messages[-1].content | trim }}>", special_tokens={})
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    assert template.render([{"role": "assistant", "content": " so far "}], **flags) == "<so far"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "last message with text"),
        ([{"role": "assistant", "tool_calls": []}], "last message with text"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "last message with text"),
    ],
)
def test_there_must_be_something_to_continue(messages: list[dict[str, Any]], named: str) -> None:
    template = ChatTemplate(CHAT_TEMPLATE, special_tokens={})
    with pytest.raises(BadRequest, match=named):
        template.render(messages, add_generation_prompt=False, continue_final_message=True)


def test_conflicting_flags_are_refused() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, special_tokens={})
    with pytest.raises(BadRequest, match="exclude each other"):
        template.render(CHAT, add_generation_prompt=True, continue_final_message=True)
    for name in ("messages", "raise_exception"):
        with pytest.raises(BadRequest, match=f"may not set {name}"):
            template.render(CHAT, **{name: 1})
    dropping = ChatTemplate("nothing", special_tokens={})
    with pytest.raises(BadRequest, match="drops the end"):
        dropping.render(CHAT, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "no attribute 'nothing'"),
        ("{% for %}", "refused"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content + 1 }}", "failed on these messages"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_template_errors_are_bad_requests(source: str, named: str) -> None:
    with pytest.raises(BadRequest, match=named) as caught:
        ChatTemplate(source, special_tokens={}).render(CHAT)
    assert caught.value.param == "messages"


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BadRequest, match=r"no chat template.*--chat-template"):
        template_from_folder(tmp_path).render(CHAT)


def test_where_templates_come_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = template_from_folder(tmp_path)
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=TOOLS) == "tools"
    (tmp_path / "chat_template.jinja").write_text("from the file {{ bos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert template_from_folder(tmp_path).render(CHAT) == "from the file <s>"


def test_an_operator_s_template_is_checked_at_start(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    with pytest.raises(ConfigError, match="cannot be read"):
        template_from_file(file, {})
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match="not a valid template"):
        template_from_file(file, {})
    file.write_text("{{ bos_token }}{{ strftime_now('%Y') | length }}")
    assert template_from_file(file, {"bos_token": "<s>"}).render(CHAT) == "<s>4"
