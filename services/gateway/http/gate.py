"""The ASGI middleware in front of all endpoints: ids, keys, quotas, and an error object for whatever goes wrong."""

import re
import uuid

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import ApiError, internal_error, not_found, unavailable
from services.gateway.gateway import Gateway
from services.gateway.http.answers import send_error
from services.gateway.http.call import Call, call_of, put_call, surplus_limit
from services.gateway.lifeline import ClientGone
from shared.telemetry import get_logger, log_context

log = get_logger(__name__)

OPEN_PATHS = frozenset({"/live", "/health", "/ready", "/metrics", "/docs", "/openapi.json"})
"""For probes, scrapers and people: no key needed."""
CLIENT_GONE_STATUS = 499
"""Never sent: it stands in the log and the metrics."""
_RID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        rid = given.decode() if _RID.fullmatch(given) else uuid.uuid4().hex
        call = Call(rid=rid, key="", started_s=self._gateway.now())
        put_call(scope, call)
        scope["app"] = (
            self  # with an application above it, Starlette's router raises instead of answering in plain text
        )

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", call.rid.encode())]
            await send(message)

        with log_context(rid=rid):
            try:
                if (limit := surplus_limit(scope)) is not None:
                    raise unavailable(f"{limit} connections are open, which is the limit", code="too_many_connections")
                if scope["path"] not in OPEN_PATHS:
                    call.key = self._authenticate(headers)
                await self._app(scope, receive, send_with_id)
            except ApiError as error:
                await send_error(send_with_id, error, call.shape_error)
            except HTTPException as error:
                await send_error(send_with_id, _no_route(scope, error), call.shape_error)
            except ClientGone:
                call.status = CLIENT_GONE_STATUS
            except Exception:
                log.exception("request failed", path=scope["path"])
                if call.status is not None:
                    raise  # the answer has begun: the server can only close the connection
                await send_error(send_with_id, internal_error(), call.shape_error)
            self._record(scope)

    def _authenticate(self, headers: dict[bytes, bytes]) -> str:
        """The configured key of the caller. Raises ApiError (401)."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = headers.get(b"x-api-key", b"")  # Anthropic's clients
        key = self._gateway.key_of(token.strip().decode("latin-1"))
        if key is None:
            message = "no API key was sent" if not token else "the API key is not known here"
            raise ApiError(
                401,
                f"{message}; expected the header 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return key

    def _record(self, scope: Scope) -> None:
        call = call_of(scope)
        if scope["path"] in OPEN_PATHS or call.status is None:
            return
        self._gateway.metrics.count_request(call.status)
        if call.status == CLIENT_GONE_STATUS:
            self._gateway.metrics.num_aborted.inc()
        log.info(
            "answered",
            method=scope["method"],
            path=scope["path"],
            status=call.status,
            seconds=round(self._gateway.now() - call.started_s, 4),
            **call.details,
        )


def _no_route(scope: Scope, error: HTTPException) -> ApiError:
    """What the router raises: no such path, or not with this method."""
    if error.status_code == 404:
        return not_found(f"there is nothing at {scope['path']}")
    allowed = dict(error.headers or {})
    message = f"{scope['method']} is not possible at {scope['path']}, only {allowed.get('Allow', 'other methods')}"
    kind = "invalid_request_error"
    return ApiError(error.status_code, message, kind=kind, code="method_not_allowed", headers=allowed)
