"""A client for programs and for the command."""

from radixmesh.client.client import AsyncClient, Client
from radixmesh.client.protocol import Answer, ApiError, Chunk, ClientError, Message, ServerUnreachable, Usage

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
