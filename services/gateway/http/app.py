"""All routes of the gateway as one ASGI application."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.api.chat import interpret_chat
from services.gateway.api.chat_types import ChatRequest
from services.gateway.api.completion_types import CompletionRequest
from services.gateway.api.completions import interpret_completion
from services.gateway.api.native import interpret_generate
from services.gateway.api.native_types import GenerateRequest
from services.gateway.api.operation_types import AbortRequest, DetokenizeRequest, TokenizeRequest
from services.gateway.decoding import BodyDecoder
from services.gateway.gateway import Gateway
from services.gateway.http.answers import read_body, send_bytes, send_json
from services.gateway.http.gate import Gate
from services.gateway.http.generation import GenerationEndpoint
from services.gateway.http.operations import Operations

T = TypeVar("T")

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def build_app(gateway: Gateway, tool_parser: str) -> ASGIApp:
    operations = Operations(gateway)
    routes = [
        Route(
            "/v1/chat/completions",
            GenerationEndpoint(gateway, tool_parser, ChatRequest, interpret_chat),
            methods=["POST"],
        ),
        Route(
            "/v1/completions",
            GenerationEndpoint(gateway, tool_parser, CompletionRequest, interpret_completion),
            methods=["POST"],
        ),
        Route(
            "/generate", GenerationEndpoint(gateway, tool_parser, GenerateRequest, interpret_generate), methods=["POST"]
        ),
        Route("/v1/models", Answer(operations.models), methods=["GET"]),
        Route("/v1/models/{model:path}", Answer(operations.model), methods=["GET"]),
        Route("/v1/requests/{rid}", Answer(operations.delete), methods=["DELETE"]),
        Route("/abort_request", Handle(gateway, AbortRequest, operations.abort), methods=["POST"]),
        Route("/tokenize", Handle(gateway, TokenizeRequest, operations.tokenize), methods=["POST"]),
        Route("/detokenize", Handle(gateway, DetokenizeRequest, operations.detokenize), methods=["POST"]),
        Route("/flush_cache", Answer(operations.flush_cache), methods=["POST", "GET"]),
        Route("/server_info", Answer(operations.server_info), methods=["GET"]),
        Route("/model_info", Answer(operations.model_info), methods=["GET"]),
        Route("/live", Answer(operations.live), methods=["GET"]),
        Route("/ready", Answer(operations.ready), methods=["GET"]),
        Route("/health", Answer(operations.ready), methods=["GET"]),
        Route("/metrics", _MetricsPage(gateway), methods=["GET"]),
    ]
    # Bare routing: Starlette's own application would answer errors before the gate sees them.
    app: ASGIApp = Gate(Router(routes, redirect_slashes=False), gateway)
    if gateway.config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=gateway.config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


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
        body = await read_body(scope, receive, self._gateway.max_body_bytes)
        await send_json(send, await self._handler(self._decoder.decode(body), scope))


class _MetricsPage:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, self._gateway.metrics.render(), METRICS_TYPE)
