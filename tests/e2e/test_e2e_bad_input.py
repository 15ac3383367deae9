"""Every bad request gets a clear answer from the real server, and leaves nothing behind."""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest

from tests.e2e.live import Api, until

pytestmark = pytest.mark.e2e

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def refused(api: Api, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused; the next request is served all the same."""
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = api.http.post(path, **content)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert api.http.get("/health").json() == {"status": "ok"}
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt", "required"),
        (COMPLETIONS, {"prompt": 3}, "prompt", "a string"),
        (COMPLETIONS, {"prompt": []}, "prompt", "an array"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "array"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "from 0 to 49151"),
        (COMPLETIONS, {"prompt": [49152]}, "prompt", "from 0 to 49151"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "no tokens"),
        (COMPLETIONS, {"max_tokens": "5"}, "max_tokens", "an integer"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "from 0"),
        (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens", "an integer"),
        (COMPLETIONS, {"max_tokens": 9000}, "max_tokens", "8192"),
        (COMPLETIONS, {"temperature": "hot"}, "temperature", "a number"),
        (COMPLETIONS, {"temperature": 2.5}, "temperature", "from 0 to 2"),
        (COMPLETIONS, {"temperature": True}, "temperature", "a number"),
        (COMPLETIONS, {"top_p": 0}, "top_p", "above 0"),
        (COMPLETIONS, {"top_k": -2}, "top_k", "from -1"),
        (COMPLETIONS, {"n": 0}, "n", "from 1"),
        (COMPLETIONS, {"n": 1000}, "n", "from 1 to 128"),
        (COMPLETIONS, {"seed": "x"}, "seed", "an integer"),
        (COMPLETIONS, {"stream": "yes"}, "stream", "true or false"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "from 0 to 20"),
        (COMPLETIONS, {"stop": [""]}, "stop", "1 to 256"),
        (COMPLETIONS, {"stop": 1}, "stop", "a string"),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (COMPLETIONS, {"min_tokens": 5, "max_tokens": 3}, "min_tokens", "above max_tokens"),
        (COMPLETIONS, {"suffix": "end"}, "suffix", "not supported"),
        (COMPLETIONS, {"best_of": 3}, "best_of", "not supported"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search", "not supported"),
        (COMPLETIONS, {"temprature": 1}, "temprature", "unknown field"),
        (CHAT, {"messages": None}, "messages", "required"),
        (CHAT, {"messages": []}, "messages", "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "one of"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "from 1"),
    ],
)
def test_wrong_fields_are_named(api: Api, path: str, fields: dict[str, Any], param: str, said: str) -> None:
    base = {"prompt": "x", "max_tokens": 1} if path == COMPLETIONS else {"messages": USER}
    error = refused(api, path, {"model": "demo", **base, **fields})
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"]
    assert said in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"prompt": NaN}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_object(api: Api, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        assert refused(api, path, body)["code"] == "invalid_json"


def test_a_prompt_beyond_the_context_is_told_both_lengths(api: Api) -> None:
    for prompt, length in ((list(range(3, 9003)), 9000), ("word " * 9000, None)):
        error = refused(api, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        count = length or len(api.tokenize(str(prompt)))
        assert f"{count} tokens" in error["message"]
        assert "8192 tokens" in error["message"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    long_chat = [{"role": "user", "content": "word " * 9000}]
    error = refused(api, CHAT, {"messages": long_chat})
    assert "8192 tokens" in error["message"]


def test_unknown_models_paths_and_methods(api: Api) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        error = refused(api, path, {"model": "gpt-4", **body}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'demo'" in error["message"]
    assert refused(api, "/v1/embeddings", {}, 404)["code"] == "unknown_path"
    assert api.http.get(COMPLETIONS).status_code == 405


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


def raw(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_clients_that_go_at_any_stage_leave_no_rows_or_pages(api: Api, reset: bool) -> None:
    stream = raw(b'{"prompt": "The sea is", "max_tokens": 4000, "stream": true, "ignore_eos": true, "n": 2}')
    whole = raw(b'{"prompt": "The sea is", "max_tokens": 4000, "ignore_eos": true}')
    long = raw(b'{"prompt": "' + b"word " * 6000 + b'", "stream": true}')
    address = (api.http.base_url.host, api.http.base_url.port or 80)
    for sent, read in [
        (b"", 0),
        (HEAD, 0),
        (stream[:-10], 0),
        (HEAD + b'transfer-encoding: chunked\r\n\r\n20\r\n{"prompt"', 0),
        (stream, 0),
        (stream, 1),
        (stream, 2000),
        (whole, 0),
        (long, 0),
        (stream + whole, 1),
    ]:
        with socket.create_connection(address) as connection:
            connection.sendall(sent)
            while read > 0:
                piece = connection.recv(500)
                assert piece, "the server closed the connection"
                read -= len(piece)
            if sent in (whole, long):
                until(lambda: bool(api.in_use()), "the request runs")
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: not api.in_use(), f"rows and pages free: {api.in_use()}")
    assert api.complete("The sea is", 4)["usage"]["completion_tokens"] == 4


def test_the_description_is_served(api: Api) -> None:
    document = api.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert "/v1/chat/completions" in document["paths"]


def test_a_body_beyond_the_limit(api: Api) -> None:
    error = refused(api, COMPLETIONS, {"prompt": "x" * (9 << 20)}, 413)
    assert error["code"] == "body_too_large"


def test_extreme_sampling_never_reaches_the_other_requests(api: Api) -> None:
    domains = [domain["epoch"] for domain in api.layout()["domains"]]
    extremes: list[dict[str, Any]] = [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 10, "frequency_penalty": 2, "presence_penalty": 2},
        {"temperature": 1e-320},
        {"temperature": 2, "top_p": 1e-300, "min_p": 1e-300},
        {"logit_bias": {str(token): -100 for token in range(1000)}, "min_tokens": 4},
        {"stop_token_ids": list(range(256)), "min_tokens": 4},
        {"seed": -(1 << 63), "n": 3},
    ]
    for fields in extremes:
        answer = api.complete("The sea is", 4, **{"temperature": 1, **fields})
        assert answer["usage"]["completion_tokens"] > 0, fields
    assert [domain["epoch"] for domain in api.layout()["domains"]] == domains


def test_bad_requests_beside_a_stream_do_not_touch_it(api: Api) -> None:
    expected = api.complete("The sea is", 16, ignore_eos=True)["choices"][0]["text"]
    with api.stream("The sea is", 16, ignore_eos=True) as (stream, events):
        for _ in events:
            refused(api, COMPLETIONS, {"prompt": "x", "top_p": 2})
            refused(api, COMPLETIONS, b"{")
            assert api.put_layout("tp9").status_code == 422
    assert stream.done
    assert stream.text == expected
