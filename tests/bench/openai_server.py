"""Other people's OpenAI-compatible server, in miniature: chat only, no tokenizer, no admin interface, several
tokens in a chunk, strict about fields it doesn't know. Another HTTP stack than this project's client tests.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Header, HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict

KEY = "sk-test"


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str
    content: str


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Chat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str
    messages: list[Message]
    max_tokens: int
    temperature: float = 1.0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = None


app = FastAPI()


@app.get("/v1/models")
async def models() -> dict[str, object]:
    return {"object": "list", "data": [{"id": "other-model", "object": "model", "owned_by": "someone"}]}


@app.post("/v1/chat/completions")
async def chat(body: Chat, authorization: str = Header("")) -> Response:
    if authorization != f"Bearer {KEY}":
        raise HTTPException(401, "no such key")
    if not body.stream:
        return JSONResponse({"choices": [], "usage": {"prompt_tokens": _prompt_tokens(body)}})
    return StreamingResponse(_events(body), media_type="text/event-stream")


def _prompt_tokens(body: Chat) -> int:
    return 9 + sum(2 * len(message.content.split()) for message in body.messages)


async def _events(body: Chat) -> AsyncIterator[str]:
    yield 'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    for _ in range(body.max_tokens // 2):
        yield 'data: {"choices": [{"delta": {"content": "two words "}, "finish_reason": null}]}\n\n'
        await asyncio.sleep(0.001)
    yield 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
    tokens = body.max_tokens // 2 * 2
    usage = {"prompt_tokens": _prompt_tokens(body), "completion_tokens": tokens}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


@contextmanager
def serving() -> Iterator[str]:
    """The server's address, ending in `/v1` as people copy it."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    started = threading.Event()
    notify = server.startup

    async def startup(*arguments: object, **named: object) -> None:
        await notify(*arguments, **named)  # type: ignore[arg-type]
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(20)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()
