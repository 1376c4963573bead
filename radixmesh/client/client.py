"""`Client` and `AsyncClient`: a small typed client of a running server."""

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from radixmesh.client.protocol import (
    DEFAULT_BASE_URL,
    Answer,
    Chunk,
    ClientError,
    Message,
    ServerUnreachable,
    answer_of,
    prompt_call,
    read_chunk,
    read_error,
)

_CONNECT_TIMEOUT_S = 5.0


def _options(base_url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {
        "base_url": base_url.rstrip("/").removesuffix("/v1"),
        "headers": headers,
        "timeout": httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
        "limits": httpx.Limits(max_connections=None),  # how many calls run at once is for the caller to say
    }


class Client:
    """Talks to one server; `timeout_s` bounds the silence between two pieces of an answer.

    A `prompt` is a text, continued as it is, or a list of chat messages. `params` are fields of the OpenAI API
    (`max_tokens`, `temperature`, `seed`, ...). All calls raise ServerUnreachable, ApiError, or their base ClientError.
    """

    def __init__(
        self, base_url: str = DEFAULT_BASE_URL, *, model: str = "", api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        """An empty `model` means the first one that the server lists."""
        self.base_url = base_url
        self._model = model
        self._http = httpx.Client(**_options(base_url, api_key, timeout_s))

    def models(self) -> list[str]:
        """Ids of the models that are served."""
        with _reported(self.base_url):
            response = self._http.get("/v1/models")
        if not response.is_success:
            raise read_error(response.status_code, response.content)
        return _model_ids(response, self.base_url)

    def stream(self, prompt: str | Sequence[Message], **params: Any) -> Generator[Chunk, None, None]:
        """The answer as it is generated. Closing the iterator early aborts the request on the server."""
        path, body = prompt_call(prompt, self._known_model(), params)
        with _reported(self.base_url), self._http.stream("POST", path, json=body) as response:
            if not response.is_success:
                raise read_error(response.status_code, response.read())
            for line in response.iter_lines():
                if chunk := read_chunk(line):
                    yield chunk

    def generate(self, prompt: str | Sequence[Message], **params: Any) -> Answer:
        """The whole answer."""
        return answer_of(list(self.stream(prompt, **params)))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _known_model(self) -> str:
        self._model = self._model or self.models()[0]
        return self._model


class AsyncClient:
    """`Client` for asyncio."""

    def __init__(
        self, base_url: str = DEFAULT_BASE_URL, *, model: str = "", api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        """An empty `model` means the first one that the server lists."""
        self.base_url = base_url
        self._model = model
        self._http = httpx.AsyncClient(**_options(base_url, api_key, timeout_s))

    async def models(self) -> list[str]:
        """Ids of the models that are served."""
        with _reported(self.base_url):
            response = await self._http.get("/v1/models")
        if not response.is_success:
            raise read_error(response.status_code, response.content)
        return _model_ids(response, self.base_url)

    async def stream(self, prompt: str | Sequence[Message], **params: Any) -> AsyncGenerator[Chunk, None]:
        """The answer as it is generated. Closing the iterator early aborts the request on the server."""
        path, body = prompt_call(prompt, await self._known_model(), params)
        with _reported(self.base_url):
            async with self._http.stream("POST", path, json=body) as response:
                if not response.is_success:
                    raise read_error(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if chunk := read_chunk(line):
                        yield chunk

    async def generate(self, prompt: str | Sequence[Message], **params: Any) -> Answer:
        """The whole answer."""
        return answer_of([chunk async for chunk in self.stream(prompt, **params)])

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _known_model(self) -> str:
        self._model = self._model or (await self.models())[0]
        return self._model


@contextmanager
def _reported(base_url: str) -> Iterator[None]:
    """The transport's errors in our words."""
    try:
        yield
    except httpx.ConnectError as error:
        raise ServerUnreachable(f"no server answers at {base_url}") from error
    except httpx.TransportError as error:
        raise ServerUnreachable(f"the connection to {base_url} broke: {str(error) or type(error).__name__}") from error
    except httpx.InvalidURL as error:
        raise ClientError(f"{base_url!r} is no base URL: {error}") from error


def _model_ids(response: httpx.Response, base_url: str) -> list[str]:
    try:
        ids = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ClientError(f"{base_url} does not speak the OpenAI API: {response.text[:200]!r}") from error
    if not ids:
        raise ClientError(f"{base_url} serves no model")
    return ids
