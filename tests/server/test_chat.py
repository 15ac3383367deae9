"""`/v1/chat/completions`, `/tokenize`, `/detokenize` without streaming."""

from __future__ import annotations

from dynamictp.messages import SubmitRequest, unpack_tokens
from tests.server.server_stack import Stack, running_stack, speaking

USER = [{"role": "user", "content": "hi"}]


async def test_messages_go_through_the_template() -> None:
    async with running_stack(speaking("hello")) as stack:
        response = await stack.post("/v1/chat/completions", messages=USER, model="tiny")
        answer = response.json()
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        request = stack.engine.received[0]
        assert isinstance(request, SubmitRequest)
        assert bytes(unpack_tokens(request.tokens)) == b"user:hi\nassistant:"
        assert request.sampling.max_tokens == 256 - len(b"user:hi\nassistant:")


async def test_chat_logprobs_carry_bytes() -> None:
    async with running_stack(speaking("é")) as stack:
        response = await stack.post("/v1/chat/completions", messages=USER, logprobs=True, top_logprobs=1)
        content = response.json()["choices"][0]["logprobs"]["content"]
        assert content[0] == {
            "token": "\ufffd",
            "logprob": -0.5,
            "bytes": [0xC3],
            "top_logprobs": [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}],
        }
        assert bytes(b for entry in content[:2] for b in entry["bytes"]).decode() == "é"


async def test_continue_final_message_opens_no_new_turn(stack: Stack) -> None:
    messages = [*USER, {"role": "assistant", "content": "I am"}]
    response = await stack.post(
        "/v1/chat/completions",
        messages=messages,
        continue_final_message=True,
        max_tokens=1,
        return_token_ids=True,
    )
    assert bytes(response.json()["prompt_token_ids"]) == b"user:hi\nassistant:I am"


async def test_template_errors_are_the_clients(stack: Stack) -> None:
    error = await stack.refused(
        "/v1/chat/completions", messages=USER, chat_template_kwargs={"add_generation_prompt": False}
    )
    assert error["param"] == "chat_template_kwargs"


async def test_another_model_is_a_404(stack: Stack) -> None:
    response = await stack.post("/v1/chat/completions", messages=USER, model="other")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_tokenize_and_back(stack: Stack) -> None:
    text = "héllo"
    answer = (await stack.post("/tokenize", prompt=text)).json()
    assert answer == {"count": 6, "max_model_len": 256, "tokens": list(text.encode())}
    back = await stack.post("/detokenize", tokens=answer["tokens"])
    assert back.json() == {"prompt": text}
    chat = (await stack.post("/tokenize", messages=USER)).json()
    assert bytes(chat["tokens"]) == b"user:hi\nassistant:"
    long = "x" * 10_000
    assert (await stack.post("/tokenize", prompt=long)).json()["count"] == 10_000
    assert (await stack.refused("/detokenize", tokens=[260]))["param"] == "tokens"


async def test_models(stack: Stack) -> None:
    listed = (await stack.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert (await stack.http.get("/v1/models/tiny")).json() == card
    assert (await stack.http.get("/v1/models/a/b")).status_code == 404
