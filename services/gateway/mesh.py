"""The gateway on the bus: what it asks of tokenizer, grammar service, router and schedulers, and what it hears from them."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import msgspec

from services.gateway.cluster_view import ClusterView
from services.gateway.config import GatewayConfig
from services.gateway.errors import ApiError, invalid, too_large, unavailable
from services.gateway.flight import Flight
from services.gateway.outbox import Outbox
from services.gateway.submission import RETRY_S, submit_until_answered
from shared import subjects
from shared.bus import Bus, BusDisconnected, BusError, Delivery, NoResponders, PayloadTooLarge, RequestTimeout
from shared.messages.cluster import unpack_heartbeat, unpack_load
from shared.messages.constraints import Compile, Constraint, ConstraintRefused, Thinking, unpack_compile_reply
from shared.messages.generation import (
    Abort,
    CacheFlushed,
    Emission,
    FlushCache,
    ReplicaInbox,
    Submit,
    unpack_cache_flushed,
    unpack_frame,
)
from shared.messages.packing import pack
from shared.messages.tokenization import (
    Detokenized,
    Encoded,
    EncodeFailed,
    EncodeRefused,
    EncodeReply,
    EncodeRequest,
    unpack_encode_reply,
)
from shared.telemetry import get_logger

log = get_logger(__name__)
T = TypeVar("T")

MAX_STRAYS = 4096
"""Ended requests that are remembered, so that what still arrives for them is no surprise."""
STRAY_S = 1.0
"""An ended request may still be heard of for this long."""
FLUSH_TIMEOUT_S = 5.0


class Mesh:
    """All conversations of one gateway. Errors leave it as ApiError."""

    def __init__(self, config: GatewayConfig, bus: Bus, view: ClusterView) -> None:
        self._config = config
        self._bus = bus
        self._view = view
        self.outbox = Outbox(bus)
        self._flights: dict[str, Flight] = {}
        self._submissions: set[asyncio.Task[ApiError | None]] = set()
        self._landed: OrderedDict[str, float] = OrderedDict()
        """When each of the last requests ended."""
        bus.on_connection_change(lambda connected: view.take_connection(connected, self._now()))

    @property
    def max_payload(self) -> int:
        return self._bus.max_payload

    @property
    def is_connected(self) -> bool:
        return self._bus.connected

    async def start(self) -> None:
        model = self._config.model
        await self._bus.subscribe(subjects.gateway_frames(model, self._config.instance), self._on_frame)
        await self._bus.subscribe(subjects.replica_load(model), self._on_load)
        await self._bus.subscribe(subjects.heartbeat(model), self._on_heartbeat)

    # -- questions

    async def encode(self, request: EncodeRequest) -> tuple[bytes, ...]:
        """Token ids, packed, one entry per text. Raises ApiError: 400 for what cannot be encoded, 503 without a tokenizer."""
        reply = await self._ask_tokenizer(request)
        assert isinstance(reply, Encoded), reply
        return reply.prompts

    async def detokenize(self, request: EncodeRequest) -> str:
        reply = await self._ask_tokenizer(request)
        assert isinstance(reply, Detokenized), reply
        return reply.text

    async def _ask_tokenizer(self, request: EncodeRequest) -> Encoded | Detokenized:
        subject = subjects.tokenizer_encode(self._config.model)
        reply: EncodeReply = await self._ask(subject, _packed(request), unpack_encode_reply, "tokenizer")
        match reply:
            case EncodeFailed(message=message, param=param):
                raise invalid(param, message)
            case EncodeRefused(message=message, retry_after_s=retry_after_s):
                raise unavailable(message, retry_after_s)
        return reply

    async def compile(self, constraint: Constraint, param: str | None, thinking: Thinking | None = None) -> str:
        """The grammar for a constraint. Raises ApiError: 400 naming what cannot be enforced, 503 without a grammar service."""
        subject = subjects.grammar_compile(self._config.model)
        request = _packed(Compile(constraint=constraint, thinking=thinking))
        reply = await self._ask(subject, request, unpack_compile_reply, "grammar service")
        if isinstance(reply, ConstraintRefused):
            if reply.retry_after_s is not None:
                raise unavailable(reply.message, reply.retry_after_s)
            raise invalid(reply.param or param, reply.message)
        for warning in reply.warnings:
            log.info("constraint", warning=warning)
        return reply.grammar

    async def _ask(self, subject: str, payload: bytes, unpack: Callable[[bytes], T], service: str) -> T:
        """Ask until somebody answers: idempotent questions, so a lost answer costs a repetition."""
        config = self._config
        started = self._now()
        while True:
            try:
                answer = await self._bus.request(subject, payload, timeout_s=config.encode_timeout_s / 3)
                return unpack(answer)
            except PayloadTooLarge as error:
                raise too_large(error.limit, error.size) from None
            except RequestTimeout:
                patience_s, reason = config.encode_timeout_s, f"the {service} does not answer"
            except NoResponders:
                patience_s, reason = config.unavailable_after_s, f"no {service} is running"
            except BusDisconnected:
                patience_s, reason = config.unavailable_after_s, "the message bus is away"
            if self._now() - started >= patience_s:
                raise unavailable(reason)
            await asyncio.sleep(RETRY_S)

    # -- flights

    async def fly(self, flight: Flight, submit: Submit, *, patience_s: float, prompt_param: str) -> None:
        """Submit, and submit again until a replica accepts. Emissions then go to `flight.deliver` until `land`.

        `patience_s` and `prompt_param` as in `submit_until_answered`. Raises ApiError.
        """
        self._flights[flight.request_id] = flight
        submitting = self._submit(flight, submit, patience_s, prompt_param)
        submission = asyncio.create_task(submitting, name=f"submit {flight.request_id}")
        self._submissions.add(submission)
        submission.add_done_callback(self._submissions.discard)
        # A client that leaves now must not cut the conversation short: the answer says whom to send the abort.
        error = await asyncio.shield(submission)
        if error is not None:
            raise error

    def land(self, flight: Flight, *, abort_reason: str | None) -> None:
        """Hear no more of this flight. With a reason, whoever computes it is told to stop."""
        if flight.is_landed:
            return
        flight.is_landed = True
        self._flights.pop(flight.request_id, None)
        self._landed[flight.request_id] = self._now()
        if len(self._landed) > MAX_STRAYS:
            self._landed.popitem(last=False)
        if abort_reason is not None and flight.replica_id is not None:
            self.post(flight.replica_id, Abort(request_id=flight.request_id, reason=abort_reason))

    def post(self, replica_id: str, message: ReplicaInbox) -> None:
        """Tell a scheduler something it does not answer."""
        self.outbox.post(subjects.replica_requests(self._config.model, replica_id), pack(message))

    async def _submit(self, flight: Flight, submit: Submit, patience_s: float, prompt_param: str) -> ApiError | None:
        """The conversation of one submission; runs on when the client has left, then ends it with an abort."""
        outcome = await submit_until_answered(
            self._bus, self._config, flight, submit, patience_s=patience_s, prompt_param=prompt_param
        )
        abort = Abort(request_id=flight.request_id)
        if outcome.replica_id is not None and (not flight.accept(outcome.replica_id) or flight.is_landed):
            self.post(outcome.replica_id, abort)
        elif outcome.may_be_held:
            for view in self._view.replicas(self._now()):
                self.post(view.load.replica_id, abort)
        return outcome.error

    async def flush_caches(self) -> list[CacheFlushed]:
        """Have every replica drop what is cached and not in use."""
        model, payload = self._config.model, pack(FlushCache())
        replicas = [view.load.replica_id for view in self._view.replicas(self._now())]
        try:
            answers = await asyncio.gather(
                *(
                    self._bus.request(subjects.replica_requests(model, replica), payload, timeout_s=FLUSH_TIMEOUT_S)
                    for replica in replicas
                )
            )
        except BusError as error:
            raise unavailable(f"a replica does not answer: {error}") from None
        return [unpack_cache_flushed(answer) for answer in answers]

    # -- what arrives

    def _on_frame(self, delivery: Delivery) -> None:
        try:
            frame = unpack_frame(delivery.payload)
        except msgspec.DecodeError as error:
            log.error("unreadable frame", subject=delivery.subject, error=str(error))
            return
        now_s = self._now()
        for emission in frame.emissions:
            flight = self._flights.get(emission.request_id)
            if flight is None:
                self._take_stray(frame.replica_id, emission, now_s)
            elif flight.belongs_to(frame.replica_id):
                flight.heard_s = now_s
                flight.deliver(flight.choice, emission)
            elif emission.finish is None and flight.replica_id is not None:
                self.post(frame.replica_id, Abort(request_id=emission.request_id, reason="superseded"))

    def _take_stray(self, replica_id: str, emission: Emission, now_s: float) -> None:
        """An emission that nobody waits for. Some always trail an Abort or Finish; later ones mean that it was lost."""
        landed_s = self._landed.get(emission.request_id, 0.0)
        if emission.finish is None and now_s - landed_s > STRAY_S:
            self.post(replica_id, Abort(request_id=emission.request_id, reason="unknown"))

    def _on_load(self, delivery: Delivery) -> None:
        try:
            self._view.take_load(unpack_load(delivery.payload), self._now())
        except msgspec.DecodeError as error:
            log.warning("unreadable load", subject=delivery.subject, error=str(error))

    def _on_heartbeat(self, delivery: Delivery) -> None:
        try:
            self._view.take_heartbeat(unpack_heartbeat(delivery.payload), self._now())
        except msgspec.DecodeError as error:
            log.warning("unreadable heartbeat", subject=delivery.subject, error=str(error))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _packed(message: EncodeRequest | Compile) -> bytes:
    """Pack what holds free-form JSON of the client's: not every JSON value has a place in MessagePack."""
    try:
        return pack(message)
    except OverflowError:
        raise invalid(None, "an integer in the request does not fit into 64 bits") from None
    except RecursionError:
        raise invalid(None, "the request is nested too deeply") from None
