"""All routes of the gateway as one ASGI application."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.api import operation_types as types
from services.gateway.api.chat import interpret_chat
from services.gateway.api.chat_types import ChatChunk, ChatCompletion, ChatRequest
from services.gateway.api.completion_types import Completion, CompletionRequest
from services.gateway.api.completions import interpret_completion
from services.gateway.api.dialect import Interpreter, encode_json
from services.gateway.api.messages import interpret_messages, messages_error
from services.gateway.api.messages_types import (
    AnsweredMessage,
    CountTokensRequest,
    ErrorEvent,
    Event,
    MessagesRequest,
    TokenCount,
)
from services.gateway.api.native import interpret_generate
from services.gateway.api.native_types import Generated, GenerateRequest
from services.gateway.decoding import BodyDecoder
from services.gateway.errors import ErrorBody
from services.gateway.gateway import Gateway
from services.gateway.http.answers import read_body, send_bytes, send_json
from services.gateway.http.gate import OPEN_PATHS, Gate
from services.gateway.http.generation import GenerationEndpoint
from services.gateway.http.openapi import DOCS_PAGE, Endpoint, openapi_document
from services.gateway.http.operations import Operations

T = TypeVar("T")

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def build_app(gateway: Gateway, tool_parser: str) -> ASGIApp:
    endpoints = [*_generating(gateway, tool_parser), *_operating(gateway)]
    document = encode_json(openapi_document(endpoints, model=gateway.facts.id, has_keys=bool(gateway.config.api_keys)))
    pages = [
        Route("/openapi.json", Page(lambda: document, b"application/json"), methods=["GET"]),
        Route("/docs", Page(lambda: DOCS_PAGE, b"text/html; charset=utf-8"), methods=["GET"]),
    ]
    # Bare routing: Starlette's own application would answer errors before the gate sees them.
    app: ASGIApp = Gate(Router([*_routes(endpoints), *pages], redirect_slashes=False), gateway)
    if gateway.config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=gateway.config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _routes(endpoints: list[Endpoint]) -> list[Route]:
    return [Route(endpoint.path, endpoint.app, methods=[endpoint.method]) for endpoint in endpoints]


def _generating(gateway: Gateway, tool_parser: str) -> list[Endpoint]:
    def endpoint(
        path: str,
        summary: str,
        request: type[T],
        interpret: Interpreter[T],
        answer: Any,
        event: Any,
        error: Any = ErrorBody,
        shape_error: Callable[[ErrorBody], Any] | None = None,
    ) -> Endpoint:
        app = GenerationEndpoint(gateway, tool_parser, request, interpret, shape_error)
        return Endpoint(
            method="POST",
            path=path,
            app=app,
            summary=summary,
            request=request,
            answer=answer,
            event=event,
            error=error,
        )

    return [
        endpoint("/v1/chat/completions", "Continue a chat.", ChatRequest, interpret_chat, ChatCompletion, ChatChunk),
        endpoint(
            "/v1/completions", "Continue a text.", CompletionRequest, interpret_completion, Completion, Completion
        ),
        endpoint(
            "/generate",
            "SGLang's native call; its streams are cumulative.",
            GenerateRequest,
            interpret_generate,
            Generated | list[Generated],
            Generated,
        ),
        endpoint(
            "/v1/messages",
            "Anthropic's API: continue a chat.",
            MessagesRequest,
            interpret_messages,
            AnsweredMessage,
            Event,
            ErrorEvent,
            messages_error,
        ),
    ]


def _operating(gateway: Gateway) -> list[Endpoint]:
    operations = Operations(gateway)

    def get(path: str, summary: str, handler: Callable[[Scope], Awaitable[Any]], answer: Any) -> Endpoint:
        needs_key = path not in OPEN_PATHS
        return Endpoint(
            method="GET", path=path, app=Answer(handler), summary=summary, answer=answer, needs_key=needs_key
        )

    def post(
        path: str, summary: str, request: type[T], handler: Callable[[T, Scope], Awaitable[Any]], answer: Any
    ) -> Endpoint:
        app = Handle(gateway, request, handler)
        return Endpoint(method="POST", path=path, app=app, summary=summary, request=request, answer=answer)

    return [
        get("/v1/models", "The served models.", operations.models, types.ModelList),
        get("/v1/models/{model:path}", "One of them.", operations.model, types.ModelCard),
        Endpoint(
            method="DELETE",
            path="/v1/requests/{rid}",
            app=Answer(operations.delete),
            summary="Abort a running request.",
            answer=types.Aborted,
        ),
        post("/abort_request", "Abort a running request.", types.AbortRequest, operations.abort, types.Aborted),
        post(
            "/v1/messages/count_tokens",
            "Anthropic's API: how long a prompt is.",
            CountTokensRequest,
            operations.count_tokens,
            TokenCount,
        ),
        post("/tokenize", "Text or chat to token ids.", types.TokenizeRequest, operations.tokenize, types.Tokenized),
        post("/detokenize", "Token ids to text.", types.DetokenizeRequest, operations.detokenize, types.Detokenized),
        Endpoint(
            method="POST",
            path="/flush_cache",
            app=Answer(operations.flush_cache),
            summary="Drop cached prefixes that no request uses.",
            answer=types.Flushed,
        ),
        get("/server_info", "Settings, versions, replicas.", operations.server_info, types.ServerInfo),
        get("/model_info", "The model and its defaults.", operations.model_info, types.ModelInfo),
        get("/live", "This process answers.", operations.live, types.Status),
        get("/ready", "A request would be routed now.", operations.ready, types.Status),
        get("/health", "The same as /ready.", operations.ready, types.Status),
        Endpoint(
            method="GET",
            path="/metrics",
            app=Page(gateway.metrics.render, METRICS_TYPE),
            summary="For Prometheus.",
            needs_key=False,
        ),
    ]


class Answer:
    """A route without a body: what the handler returns is the JSON that is sent."""

    def __init__(self, handler: Callable[[Scope], Awaitable[Any]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, await self._handler(scope))


class Handle(Generic[T]):
    """A route with a JSON body of one type."""

    def __init__(self, gateway: Gateway, kind: type[T], handler: Callable[[T, Scope], Awaitable[Any]]) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder(kind)
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        body = await read_body(scope, receive, gateway.max_body_bytes, gateway.config.receive_timeout_s)
        await send_json(send, await self._handler(self._decoder.decode(body), scope))


class Page:
    """A route whose answer is bytes of one content type."""

    def __init__(self, render: Callable[[], bytes], content_type: bytes) -> None:
        self._render = render
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, self._render(), self._content_type)
