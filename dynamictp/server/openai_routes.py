"""The OpenAI-compatible endpoints, and tokenizing by HTTP."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamictp.server.access import identity_of
from dynamictp.server.answers import json_response
from dynamictp.server.fields import parse_object
from dynamictp.server.generation import Generation
from dynamictp.server.prompts import chat_job, chat_tokens, completion_job, text_tokens
from dynamictp.server.render import ChatRenderer, CompletionRenderer
from dynamictp.server.requests import (
    TIMEOUT_HEADER,
    header_timeout_s,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from dynamictp.server.responses import GenerationResponse
from dynamictp.server.roster import Roster
from dynamictp.server.sender import Sender
from dynamictp.server.service import Service


class OpenAIRoutes:
    """Endpoints over the models of one server."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [_card(s) for s in self._roster.services]})

    async def model(self, request: Request) -> Response:
        return json_response(_card(self._roster.pick(request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        sender = self._sender(request)
        async with self._roster.bodies.reading(request) as body:
            given = parse_object(body)
            service = self._roster.of_body(given)
            parsed = parse_completion(given, service.facts.vocab, service.defaults)
            service.check_model(parsed.common.model)
            sender = sender.asking(parsed.common.priority, parsed.common.timeout_s)
            _check_room(service, sender)
            job = await completion_job(service, parsed, sender)
        generation = Generation(service.client, service.tokenizer, job)
        renderer = CompletionRenderer(
            generation,
            service.tokenizer,
            model=service.model,
            created=int(time.time()),
            echo=parsed.echo,
            logprobs=parsed.logprobs is not None,
            return_token_ids=parsed.common.return_token_ids,
            include_usage=parsed.common.include_usage,
        )
        return GenerationResponse(generation, renderer, include_usage=parsed.common.include_usage)

    async def chat(self, request: Request) -> Response:
        sender = self._sender(request)
        async with self._roster.bodies.reading(request) as body:
            given = parse_object(body)
            service = self._roster.of_body(given)
            parsed = parse_chat(given, service.facts.vocab, service.defaults)
            service.check_model(parsed.common.model)
            sender = sender.asking(parsed.common.priority, parsed.common.timeout_s)
            _check_room(service, sender)
            job = await chat_job(service, parsed, sender)
        generation = Generation(service.client, service.tokenizer, job)
        renderer = ChatRenderer(
            generation,
            service.tokenizer,
            model=service.model,
            created=int(time.time()),
            logprobs=parsed.logprobs is not None,
            return_token_ids=parsed.common.return_token_ids,
            include_usage=parsed.common.include_usage,
        )
        return GenerationResponse(generation, renderer, include_usage=parsed.common.include_usage)

    async def tokenize(self, request: Request) -> Response:
        async with self._roster.bodies.reading(request) as body:
            given = parse_object(body)
            service = self._roster.of_body(given)
            parsed = parse_tokenize(given)
            service.check_model(parsed.model)
            if isinstance(parsed.prompt, str):
                tokens = await text_tokens(service, parsed.prompt, parsed.add_special_tokens)
            else:
                _, tokens = await chat_tokens(service, parsed.prompt)
        context = service.client.max_model_len or service.facts.max_context
        return json_response({"count": len(tokens), "max_model_len": context, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        async with self._roster.bodies.reading(request) as body:
            given = parse_object(body)
            service = self._roster.of_body(given)
            tokens, skip = parse_detokenize(given, service.facts.vocab)
            text = await service.texts.run(len(tokens), lambda: service.tokenizer.decode(tokens, skip))
        return json_response({"prompt": text})

    def _sender(self, request: Request) -> Sender:
        """Raises `BadRequest` for a header that is no time."""
        service, identity = self._roster.first, identity_of(request.scope)
        sender = Sender(service.clock.now(), identity.tenant, identity.priority)
        if service.request_timeout_s:
            sender = replace(sender, deadline_s=sender.arrival_s + service.request_timeout_s)
        return sender.asking(None, header_timeout_s(request.headers.get(TIMEOUT_HEADER)))


def _check_room(service: Service, sender: Sender) -> None:
    """Refuse what would have to wait too long, however short it is, before its prompt costs anything.

    Before the engine is ready, a wrong prompt is told what is wrong.
    """
    if service.client.engine is not None:
        service.client.check_room(sender, (1,))


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "dynamictp",
        "max_model_len": service.client.max_model_len or service.facts.max_context,
    }
