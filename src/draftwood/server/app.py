"""The HTTP routes. Each reads a body, opens its answers and returns them, whole or as a stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from draftwood import __version__
from draftwood.errors import DraftwoodError, RequestError
from draftwood.llm import LLM
from draftwood.server.body import read_json
from draftwood.server.errors import HttpError, as_http, dumps
from draftwood.server.exchange import ClientGone, Exchange
from draftwood.server.middleware import Gate, error_response
from draftwood.server.protocol import (
    Asked,
    Body,
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    TokenizeRequest,
    read,
)
from draftwood.server.runner import READY, Ticket
from draftwood.server.service import Service
from draftwood.server.shapes import ChatShape, Choice, Shape, TextShape
from draftwood.server.stream import EventStream

CLOSED_REQUEST = 499
"""Status in the metrics of a request whose client went away (nginx's number); nobody receives it."""


def create_app(service: Service) -> FastAPI:
    """Return the application. Its lifespan starts the engine; who runs it drains `service.runner` before the end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.runner.start()
        try:
            yield
        finally:
            await service.runner.drain(0)
            service.close()

    app = FastAPI(title="draftwood", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, keys=service.settings.api_keys, count=service.metrics.responded)
    if service.settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(service.settings.origins), allow_methods=["*"], allow_headers=["*"]
        )
    _add_errors(app)
    _add_answers(app, service)
    _add_tokens(app, service)
    _add_facts(app, service)
    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def _body(kind: type[Body]) -> dict[str, Any]:
    """Describe a body that the route reads itself, for /openapi.json."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, part in schema.pop("$defs", {}).items():
        schema = _inlined(schema, f"#/components/schemas/{name}", part)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(value: Any, reference: str, part: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if value.get("$ref") == reference:
            return part
        return {k: _inlined(v, reference, part) for k, v in value.items()}
    return [_inlined(v, reference, part) for v in value] if isinstance(value, list) else value


def _add_errors(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, DraftwoodError)
        return error_response(as_http(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        fault = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
        response = error_response(HttpError(error.status_code, fault.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLOSED_REQUEST)

    async def bug(request: Request, error: Exception) -> Response:
        return error_response(HttpError(500, "a fault of the server; see its log"))

    app.add_exception_handler(DraftwoodError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, bug)


async def _answer(
    service: Service, request: Request, ask: Asked, exchange: Exchange, tickets: list[Ticket], shape: Shape
) -> Response:
    """Return the answers of an open exchange, as a stream or when all have ended."""
    if ask.stream:
        return EventStream(exchange, shape, tickets, service.settings.keep_alive, ask.stream_usage, ask.running_usage)
    choices = {ticket: Choice(ticket) for ticket in tickets}
    with exchange:
        exchange.watch(request.receive)
        async for batch in exchange.batches():
            for ticket, update in batch:
                choices[ticket].add(update)
    return _json(shape.response(list(choices.values())))


def _shape(kind: type[Shape], service: Service, llm: LLM, ask: Asked, prompts: list[Any]) -> Shape:
    return kind(llm.tokenizer, service.settings.names[0], prompts, bool(ask.timings), bool(ask.return_token_ids))


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        llm = service.runner.require()
        ask = read(ChatRequest, await read_json(request, service.max_bytes))
        exchange, tickets = await service.chat(ask, llm)
        return await _answer(service, request, ask, exchange, tickets, _shape(ChatShape, service, llm, ask, [tickets[0].ids]))

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        llm = service.runner.require()
        ask = read(CompletionRequest, await read_json(request, service.max_bytes))
        exchange, tickets = await service.complete(ask, llm)
        prompts = [ticket.ids for ticket in tickets[:: ask.n or 1]]
        return await _answer(service, request, ask, exchange, tickets, _shape(TextShape, service, llm, ask, prompts))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt or a conversation."""
        llm = service.runner.require()
        ask = read(TokenizeRequest, await read_json(request, service.max_bytes))
        service.check_model(ask.model)
        if (ask.prompt is None) == (ask.messages is None):
            raise RequestError("give either prompt or messages", "prompt")

        def ids() -> list[int]:
            if ask.prompt is not None:
                return llm.encode(ask.prompt, bool(ask.allow_special))
            talk = Conversation(
                messages=ask.messages or [],
                chat_template_kwargs=ask.chat_template_kwargs,
                add_generation_prompt=ask.add_generation_prompt,
            )
            return llm.chat_ids(talk.rendered_messages(), ask.tools, **talk.template())

        tokens = await service.work(ids)
        found = {"count": len(tokens), "max_model_len": llm.plan.max_model_len, "tokens": tokens}
        if ask.return_token_strs and llm.tokenizer is not None:
            found["token_strs"] = [llm.tokenizer.token_bytes(id).decode("utf-8", "replace") for id in tokens]
        return _json(found)

    @app.post("/detokenize", openapi_extra=_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        llm = service.runner.require()
        ask = read(DetokenizeRequest, await read_json(request, service.max_bytes))
        service.check_model(ask.model)
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer", "tokens")
        try:
            text = await service.work(lambda: tokenizer.decode(ask.tokens))
        except RequestError as error:
            raise RequestError(str(error), "tokens") from None
        return _json({"prompt": text})


def _add_facts(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        llm = service.runner.llm
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "draftwood",
            "root": service.settings.names[0],
            "parent": None,
            "max_model_len": None if llm is None else llm.plan.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        """List the names the model is served under."""
        return _json({"object": "list", "data": [card(name) for name in service.settings.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Return one of them."""
        service.check_model(name)
        return _json(card(name))

    @app.get("/health")
    async def health() -> Response:
        """200 when requests are taken, else 503 and why."""
        phase = service.runner.phase
        if phase == READY:
            return _json({"status": "ok"})
        return _json({"status": phase, "reason": service.runner.reason()}, 503)

    @app.get("/version")
    async def version() -> Response:
        """Return the server's version."""
        return _json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})
