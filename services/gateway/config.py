"""Settings of the gateway."""

import ipaddress
from typing import Annotated, Literal

from msgspec import Meta

from shared.config import ServiceConfig

MEBIBYTE = 2**20


class GatewayConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="Address to listen on.", min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8000
    api_keys: Annotated[
        tuple[str, ...], Meta(description="Keys that clients must present; none: open to everybody who can connect.")
    ] = ()
    allow_unauthenticated: Annotated[
        bool, Meta(description="Listen beyond loopback although no api_keys are configured.")
    ] = False
    max_requests_per_minute: Annotated[int, Meta(description="Requests a minute per key; 0: no limit.", ge=0)] = 0
    max_tokens_per_minute: Annotated[
        int, Meta(description="Prompt and generated tokens a minute per key; 0: no limit.", ge=0)
    ] = 0
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="Origins whose web pages may call this server; none: CORS is off.")
    ] = ()

    max_body_bytes: Annotated[int, Meta(description="Largest request body; 413 above.", ge=1024)] = 8 * MEBIBYTE
    max_header_bytes: Annotated[int, Meta(description="Largest request head; 431 above.", ge=1024)] = 64 * 1024
    receive_timeout_s: Annotated[
        float, Meta(description="A client that takes longer to send a head, or a body, is cut off.", gt=0)
    ] = 60.0
    max_connections: Annotated[int, Meta(description="Open connections; 503 above.", ge=1)] = 8192
    max_active_requests: Annotated[int, Meta(description="Requests being generated; 503 above.", ge=1)] = 4096
    max_choices: Annotated[int, Meta(description="Prompts times n (or best_of) of one request.", ge=1)] = 1024

    request_timeout_s: Annotated[
        float, Meta(description="A request ends with 504 after this long; its own `timeout` can only be shorter.", gt=0)
    ] = 1800.0
    queue_timeout_s: Annotated[
        float, Meta(description="A request without its first token ends with 504 after this long.", gt=0)
    ] = 600.0
    keepalive_s: Annotated[float, Meta(description="Silence in a stream before a comment line is sent.", gt=0)] = 10.0
    slow_client_timeout_s: Annotated[
        float, Meta(description="A client that takes no bytes for this long is cut off.", gt=0)
    ] = 30.0
    max_unread_emissions: Annotated[
        int, Meta(description="Emissions that may wait for a slow client before it is cut off.", ge=16)
    ] = 2048

    submit_attempt_s: Annotated[float, Meta(description="Wait for the answer to one submission.", gt=0)] = 0.25
    unavailable_after_s: Annotated[
        float, Meta(description="Try for this long to reach a service before answering 503.", gt=0)
    ] = 2.0
    encode_timeout_s: Annotated[float, Meta(description="Wait for the tokenizer or the grammar service.", gt=0)] = 10.0
    replica_silence_s: Annotated[
        float, Meta(description="A replica not heard of for this long is gone; its requests move.", gt=0)
    ] = 3.0
    failover_timeout_s: Annotated[
        float, Meta(description="A request whose replica is gone fails after looking this long for another.", ge=0)
    ] = 30.0
    stall_timeout_s: Annotated[
        float, Meta(description="/health turns 503 when a busy replica makes no step for this long.", gt=0)
    ] = 10.0

    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Meta(description="Defaults of sampling fields: the model's generation_config, or OpenAI's."),
    ] = "model"
    tool_parser: Annotated[str, Meta(description="Format of tool calls; empty: chosen by the model's family.")] = ""
    reasoning_parser: Annotated[
        str, Meta(description="Format of thinking text to move to reasoning_content; empty: none.")
    ] = ""

    def __post_init__(self) -> None:
        """Raises ValueError where settings contradict each other."""
        if not self.api_keys and not self.allow_unauthenticated and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from outside and there are no api_keys; "
                "configure keys, or set allow_unauthenticated"
            )
        if any(not key for key in self.api_keys):
            raise ValueError("api_keys: a key is never empty")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
