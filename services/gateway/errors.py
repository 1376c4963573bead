"""What a client is told when its request fails: one error form for every endpoint and every phase."""

from typing import Any

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    """The field that is wrong, as a path: `messages[0].role`."""
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not 2xx, and the last event of a stream that failed."""

    error: ErrorDetail


class ApiError(Exception):
    """A request ends here: `status` and `body` before the answer has begun, an error event afterwards."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        """Goes out as Retry-After in whole seconds; None: sending the same request again does not help."""
        self.headers = headers or {}
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def invalid(param: str | None, problem: str, *, code: str | None = None) -> ApiError:
    """400: the client's mistake in the field `param`; `problem` states the value and the limit."""
    message = f"{param}: {problem}" if param else problem
    return ApiError(400, message, kind="invalid_request_error", param=param, code=code)


def unsupported(param: str, reason: str) -> ApiError:
    """400: a field of the interface that this server cannot honour, refused rather than ignored."""
    return invalid(param, f"not supported: {reason}", code="unsupported_parameter")


def model_not_found(model: str, served: str) -> ApiError:
    message = f"model {shown(model)} does not exist here; this server has {served!r}"
    return ApiError(404, message, kind="invalid_request_error", param="model", code="model_not_found")


def not_found(what: str) -> ApiError:
    return ApiError(404, what, kind="invalid_request_error", code="not_found")


def too_large(limit_bytes: int, size_bytes: int | None = None) -> ApiError:
    has = "more" if size_bytes is None else f"{size_bytes} bytes"
    message = f"the request has {has}, this server takes {limit_bytes} bytes"
    return ApiError(413, message, kind="invalid_request_error", code="request_too_large")


def unavailable(message: str, retry_after_s: float = 1.0, code: str = "unavailable") -> ApiError:
    """503: nothing is wrong with the request, there is nobody to serve it now."""
    return ApiError(503, message, kind="service_unavailable", code=code, retry_after_s=retry_after_s)


def rate_limited(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=max(1.0, retry_after_s)
    )


def deadline_exceeded(message: str) -> ApiError:
    """504: the request's own deadline or the server's; the message names the phase, queueing or generating."""
    return ApiError(504, message, kind="timeout_error", code="deadline_exceeded")


def aborted(message: str, code: str) -> ApiError:
    """499: ended on request, by its owner or because the client does not read."""
    return ApiError(499, message, kind="aborted", code=code)


def generation_failed(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code="generation_failed")


def internal_error() -> ApiError:
    return ApiError(500, "an internal error; the log has the details", kind="server_error", code="internal_error")


def shown(value: Any, limit: int = 80) -> str:
    """A value of the client's for an error message: as JSON, cut short."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
