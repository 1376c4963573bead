"""What an API must bring along; the HTTP side treats all of them alike."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.errors import ErrorBody
from services.gateway.generation.choice import Delta
from services.gateway.generation.generation import Collected, Generation
from services.gateway.generation.plan import Plan
from services.gateway.model_facts import ModelFacts

encode_json = msgspec.json.Encoder().encode


class Dialect(Protocol):
    """One answer in the making. A stream is `opening`, `delta`s, `closing`; else `whole` is all there is."""

    def opening(self, generation: Generation) -> bytes: ...

    def delta(self, generation: Generation, choice: int, delta: Delta) -> bytes: ...

    def closing(self, generation: Generation) -> bytes: ...

    def failure(self, error: ErrorBody) -> bytes:
        """The last event of a stream that has failed."""

    def whole(self, generation: Generation, collected: Sequence[Collected]) -> Any:
        """The answer, to be encoded as JSON."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: what to generate, and in which way to answer."""

    plan: Plan
    stream: bool
    make_dialect: Callable[[str], Dialect]
    """From the id of the call."""
    rids: tuple[str, ...] = ()
    """By which the client can abort it; the first is the id of the call."""


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What a request does not say and its plan depends on; `draw_seed` gives a new int63 each time."""

    facts: ModelFacts
    config: GatewayConfig
    tool_parser: str
    now_s: int
    draw_seed: Callable[[], int]


R = TypeVar("R", contravariant=True)


class Interpreter(Protocol[R]):
    """Turns a request of one API into what is asked. Raises ApiError."""

    def __call__(self, request: R, circumstances: Circumstances) -> Asked: ...


def sse(event: Any) -> bytes:
    """One server-sent event. JSON has no raw newlines, so nothing in a text can break the framing."""
    return b"data: " + encode_json(event) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEPALIVE = b": keep-alive\n\n"
