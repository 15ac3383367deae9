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
from dynamictp.server.sender import Sender
from dynamictp.server.service import Service


class OpenAIRoutes:
    """Endpoints over one `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service

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
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["name"])
        return json_response(self._card())

    async def completions(self, request: Request) -> Response:
        service, sender = self._service, self._sender(request)
        async with service.bodies.reading(request) as body:
            parsed = parse_completion(parse_object(body), service.facts.vocab, service.defaults)
            service.check_model(parsed.common.model)
            sender = sender.asking(parsed.common.priority, parsed.common.timeout_s)
            self._check_room(sender)
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
        service, sender = self._service, self._sender(request)
        async with service.bodies.reading(request) as body:
            parsed = parse_chat(parse_object(body), service.facts.vocab, service.defaults)
            service.check_model(parsed.common.model)
            sender = sender.asking(parsed.common.priority, parsed.common.timeout_s)
            self._check_room(sender)
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
        async with self._service.bodies.reading(request) as body:
            parsed = parse_tokenize(parse_object(body))
            self._service.check_model(parsed.model)
            if isinstance(parsed.prompt, str):
                tokens = await text_tokens(self._service, parsed.prompt, parsed.add_special_tokens)
            else:
                _, tokens = await chat_tokens(self._service, parsed.prompt)
        context = self._service.client.max_model_len or self._service.facts.max_context
        return json_response({"count": len(tokens), "max_model_len": context, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        async with self._service.bodies.reading(request) as body:
            tokens, skip = parse_detokenize(parse_object(body), self._service.facts.vocab)
            tokenizer = self._service.tokenizer
            text = await self._service.texts.run(len(tokens), lambda: tokenizer.decode(tokens, skip))
        return json_response({"prompt": text})

    def _check_room(self, sender: Sender) -> None:
        """Refuse what would have to wait too long, however short it is, before its prompt costs anything.

        Before the engine is ready, a wrong prompt is told what is wrong.
        """
        client = self._service.client
        if client.engine is not None:
            client.check_room(sender, (1,))

    def _sender(self, request: Request) -> Sender:
        """Raises `BadRequest` for a header that is no time."""
        service, identity = self._service, identity_of(request.scope)
        sender = Sender(service.clock.now(), identity.tenant, identity.priority)
        if service.request_timeout_s:
            sender = replace(sender, deadline_s=sender.arrival_s + service.request_timeout_s)
        return sender.asking(None, header_timeout_s(request.headers.get(TIMEOUT_HEADER)))

    def _card(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "dynamictp",
            "max_model_len": service.client.max_model_len or service.facts.max_context,
        }
