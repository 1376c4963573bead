"""What is said over HTTP, without saying it: bodies out, events and errors in. Shared by both clients."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

DEFAULT_BASE_URL = "http://127.0.0.1:8000"

Message = Mapping[str, Any]
"""A chat message: `{"role": "user", "content": "..."}`."""


class ClientError(Exception):
    """A call to the server did not succeed."""


class ServerUnreachable(ClientError):
    """Nobody answers at the base URL, or the connection broke."""


class ApiError(ClientError):
    """The server answered with an error."""

    def __init__(self, message: str, *, status: int | None, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; None for a failure after a stream had begun."""
        self.param = param
        self.code = code


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that the server found in its prefix cache."""


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a streamed answer; `finish_reason` comes once, then `usage` once, with empty text."""

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


class Answer(msgspec.Struct, frozen=True):
    text: str
    finish_reason: str
    usage: Usage


def prompt_call(prompt: str | Sequence[Message], model: str, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Path and body of a call: text is continued as it is, messages are answered through the model's chat template."""
    body = {**params, "model": model, "stream": True, "stream_options": {"include_usage": True}}
    if isinstance(prompt, str):
        return "/v1/completions", {**body, "prompt": prompt}
    return "/v1/chat/completions", {**body, "messages": list(prompt)}


def read_chunk(line: str) -> Chunk | None:
    """A line of the event stream; None for comments, blank lines and the end mark.

    Raises ApiError for an error event, ClientError for a line that is no event of this protocol.
    """
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return None
    try:
        event = json.loads(data)
        if "error" in event:
            raise _api_error(event["error"], status=None)
        usage = _usage(event["usage"]) if event.get("usage") else None
        if not event["choices"]:
            return Chunk(usage=usage)
        choice = event["choices"][0]
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        return Chunk(text or "", choice.get("finish_reason"), usage)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ClientError(f"not an answer of a chat or completion server: {data[:200]!r}") from error


def read_error(status: int, body: bytes) -> ApiError:
    """The error that a non-2xx answer states, whoever wrote it (a proxy may answer in its own words)."""
    try:
        return _api_error(json.loads(body)["error"], status)
    except (ValueError, LookupError, TypeError):
        return ApiError(f"HTTP {status}: {body[:200].decode(errors='replace')}", status=status)


def answer_of(chunks: Sequence[Chunk]) -> Answer:
    """The whole of a stream. Raises ClientError when the stream ended early."""
    reasons = [chunk.finish_reason for chunk in chunks if chunk.finish_reason]
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    if not reasons or not usages:
        raise ClientError("the stream ended before the answer did")
    return Answer("".join(chunk.text for chunk in chunks), reasons[0], usages[-1])


def _api_error(error: Mapping[str, Any], status: int | None) -> ApiError:
    return ApiError(str(error["message"]), status=status, param=error.get("param"), code=error.get("code"))


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0)
