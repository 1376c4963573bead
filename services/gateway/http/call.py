"""What is known about one HTTP request besides its body; travels in the ASGI scope."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from services.gateway.errors import ErrorBody

_SCOPE_KEY = "radixmesh.call"
ABORT_EXTENSION = "radixmesh.abort"
"""ASGI extension of our server: a function that closes the connection without sending what is buffered."""

SURPLUS_EXTENSION = "radixmesh.surplus"
"""On connections beyond the limit, with that limit: their requests are refused."""


def _as_it_is(error: ErrorBody) -> Any:
    return error


@dataclass(slots=True)
class Call:
    """
    rid          the client's id or ours
    key          the API key it came with, "" without
    status       of the answer, once it is on its way
    shape_error  how the API that is spoken writes errors
    details      for the log
    """

    rid: str
    key: str
    started_s: float
    status: int | None = None
    shape_error: Callable[[ErrorBody], Any] = _as_it_is
    details: dict[str, Any] = field(default_factory=dict)


def put_call(scope: Scope, call: Call) -> None:
    scope[_SCOPE_KEY] = call


def call_of(scope: Scope) -> Call:
    call: Call = scope[_SCOPE_KEY]
    return call


def surplus_limit(scope: Scope) -> int | None:
    """The limit on connections, when this one exceeds it."""
    limit: int | None = scope.get("extensions", {}).get(SURPLUS_EXTENSION)
    return limit


def abort_connection(scope: Scope) -> None:
    """Close at once, whatever is buffered; a server without the extension closes when it can."""
    abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if abort is not None:
        abort()
