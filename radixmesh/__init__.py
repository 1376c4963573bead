"""radixmesh: serve large language models from small services. What users import and type."""

from radixmesh.client import (
    Answer,
    ApiError,
    AsyncClient,
    Chunk,
    Client,
    ClientError,
    Message,
    ServerUnreachable,
    Usage,
)

__all__ = [
    "Answer",
    "ApiError",
    "AsyncClient",
    "Chunk",
    "Client",
    "ClientError",
    "Message",
    "ServerUnreachable",
    "Usage",
]
