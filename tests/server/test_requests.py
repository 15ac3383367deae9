"""Request fields: every refusal names the field, says what was expected, and neutral values pass."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.errors import BadRequest
from dynamictp.server.fields import parse_object
from dynamictp.server.requests import (
    SamplingDefaults,
    parse_chat,
    parse_completion,
    parse_sampling_defaults,
    parse_tokenize,
)

VOCAB = 100
USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> Any:
    return parse_completion({"prompt": "x", **fields}, VOCAB, SamplingDefaults())


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": USER, **fields}, VOCAB, SamplingDefaults())


REFUSED: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "from 0 to 2"),
    ("temperature", 2.1, "from 0 to 2"),
    ("temperature", "hot", "a number"),
    ("temperature", True, "a number"),
    ("top_p", 0, "above 0 and up to 1"),
    ("top_p", 1.5, "above 0 and up to 1"),
    ("top_k", -2, "an integer from -1"),
    ("min_p", 1.1, "from 0 to 1"),
    ("n", 0, "from 1 to 128"),
    ("n", 129, "from 1 to 128"),
    ("n", 1.5, "an integer"),
    ("n", True, "an integer"),
    ("max_tokens", -1, "from 0"),
    ("max_tokens", "5", "an integer"),
    ("presence_penalty", 3, "from -2 to 2"),
    ("frequency_penalty", -3, "from -2 to 2"),
    ("repetition_penalty", 0, "above 0"),
    ("seed", 1 << 70, "an integer"),
    ("seed", 1.0, "an integer"),
    ("min_tokens", -1, "an integer"),
    ("stop", "", "1 to 256 characters"),
    ("stop", ["a"] * 17, "up to 16"),
    ("stop", ["a" * 257], "1 to 256 characters"),
    ("stop", [1], "strings"),
    ("stop", 5, "strings"),
    ("stop", False, "strings"),
    ("stop_token_ids", [100], "0 to 99"),
    ("stop_token_ids", [-1], "0 to 99"),
    ("stop_token_ids", 3, "an array"),
    ("logprobs", 21, "from 0 to 20"),
    ("logprobs", True, "an integer"),
    ("logit_bias", {"100": 1}, "0 to 99"),
    ("logit_bias", {"x": 1}, "0 to 99"),
    ("logit_bias", {"1": 101}, "-100 to 100"),
    ("logit_bias", {str(i): 0 for i in range(1025)}, "at most 1024"),
    ("logit_bias", [1], "an object"),
    ("stream", "yes", "true or false"),
    ("stream", 1, "true or false"),
    ("echo", "no", "true or false"),
    ("ignore_eos", 0, "true or false"),
    ("priority", 1.5, "an integer"),
    ("model", 5, "a string"),
    ("best_of", 2, "not supported"),
    ("suffix", "end", "not supported"),
    ("response_format", {"type": "json_object"}, "not supported"),
    ("use_beam_search", True, "not supported"),
    ("structured_outputs", {}, "not supported"),
    ("max_tokenz", 5, "unknown field"),
    ("prompt", 5, "a string"),
    ("prompt", [], "an array"),
    ("prompt", ["a", 1], "an array"),
    ("prompt", [1, 100], "0 to 99"),
    ("prompt", [[1], [-1]], "0 to 99"),
    ("prompt", [[1], ["x"]], "an array"),
    ("prompt", None, "required"),
]


@pytest.mark.parametrize(("field", "value", "expected"), REFUSED)
def test_a_refusal_names_the_field_and_the_expectation(field: str, value: Any, expected: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        completion(**{field: value})
    assert refusal.value.param == field
    assert field in refusal.value.message
    assert expected in refusal.value.message


CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSED)
def test_chat_refusals_name_the_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        chat(**fields)
    assert refusal.value.param == param


def test_neutral_and_ignored_fields_pass() -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "functions": None,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "audio": None,
        "temperature": None,
        "max_tokens": None,
        "stop": None,
        "logit_bias": None,
        "seed": None,
        "best_of": 1,
    }
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    request = chat(**neutral, **ignored)
    assert request.common.temperature == 1.0
    assert request.common.max_tokens is None


def test_defaults_of_the_model_hold_where_the_client_is_silent() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20)
    request = parse_completion({"prompt": "x", "top_k": 0}, VOCAB, defaults)
    assert (request.common.temperature, request.common.top_k) == (0.6, 0)


def test_defaults_of_the_model_are_held_to_what_a_request_may_ask_for() -> None:
    assert parse_sampling_defaults({"temperature": 0.6, "top_k": 20}) == SamplingDefaults(0.6, top_k=20)
    for name, value in (("top_k", float("nan")), ("top_k", 2.5), ("temperature", 1e308), ("top_p", 0)):
        with pytest.raises(BadRequest, match=name):
            parse_sampling_defaults({name: value})


def test_prompt_forms() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))


def test_too_many_choices_of_one_request() -> None:
    with pytest.raises(BadRequest, match="at most 1024"):
        completion(prompt=["x"] * 9, n=128)


def test_messages_become_plain_text() -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None},
    ]
    parsed = parse_chat({"messages": messages}, VOCAB, SamplingDefaults()).prompt.messages
    assert parsed == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    )


def test_top_k_minus_one_is_off_and_newer_name_of_max_tokens() -> None:
    request = chat(top_k=-1, max_completion_tokens=7)
    assert (request.common.top_k, request.common.max_tokens) == (0, 7)
    assert request.common.max_tokens_field == "max_completion_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a":' + b"[" * 10_000,
        b'{"a":' + b"9" * 10_000 + b"}",
        b'{"a": 1} x',
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_object(body)


def test_huge_values_in_messages_are_cut() -> None:
    with pytest.raises(BadRequest) as refusal:
        completion(n="x" * 10_000)
    assert len(refusal.value.message) < 200
    with pytest.raises(BadRequest) as refusal:
        parse_completion(
            parse_object(b'{"prompt":"x","seed":' + b"9" * 4000 + b"}"), VOCAB, SamplingDefaults()
        )
    assert len(refusal.value.message) < 200


def test_tokenize_wants_one_of_prompt_and_messages() -> None:
    for body in ({}, {"prompt": "a", "messages": USER}):
        with pytest.raises(BadRequest, match="either"):
            parse_tokenize(body)
    assert parse_tokenize({"prompt": "a"}).add_special_tokens
    assert not parse_tokenize({"messages": USER}).add_special_tokens


FIELDS = [
    *(name for name, _, _ in REFUSED),
    "messages",
    "stream_options",
    "tools",
    "top_logprobs",
    "chat_template_kwargs",
    "max_completion_tokens",
    "x",
]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "0"]), inner)
    ),
    max_leaves=8,
)


@given(body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_any_json_is_either_read_or_refused(body: dict[str, Any]) -> None:
    for parse, base in ((parse_completion, {"prompt": "x"}), (parse_chat, {"messages": USER})):
        with contextlib.suppress(BadRequest):
            parse({**base, **body}, VOCAB, SamplingDefaults())
