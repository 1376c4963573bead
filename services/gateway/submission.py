"""The conversation that brings one request to a replica: submit, and submit again until somebody answers."""

import asyncio
from typing import NamedTuple

from services.gateway.config import GatewayConfig
from services.gateway.errors import ApiError, deadline_exceeded, too_large, unavailable
from services.gateway.flight import Flight
from shared import subjects
from shared.bus import Bus, BusDisconnected, NoResponders, PayloadTooLarge, RequestTimeout
from shared.messages.generation import Accepted, RejectCode, Rejected, Submit, unpack_submit_reply
from shared.messages.packing import pack

RETRY_S = 0.05
"""Between two attempts."""


class Outcome(NamedTuple):
    """Which replica has the request, or why none has. `may_be_held`: some replica may have it although none said so."""

    replica_id: str | None = None
    error: ApiError | None = None
    may_be_held: bool = False


async def submit_until_answered(
    bus: Bus, config: GatewayConfig, flight: Flight, submit: Submit, *, patience_s: float, prompt_param: str
) -> Outcome:
    """Idempotent by request id, so an answer that was lost costs a repetition.

    For `patience_s` a refusal for lack of room counts as "not yet"; one for lack of replicas for as long as any service is
    looked for. `prompt_param` names the prompt in errors.
    """
    loop = asyncio.get_running_loop()
    started_s, attempt_s, may_be_held = loop.time(), config.submit_attempt_s, False
    subject, payload = subjects.router_submit(config.model), pack(submit)
    unavailable_after_s = max(config.unavailable_after_s, patience_s)
    while True:
        try:
            reply = unpack_submit_reply(await bus.request(subject, payload, timeout_s=attempt_s))
        except PayloadTooLarge as error:
            return Outcome(error=too_large(error.limit, error.size))
        except RequestTimeout:
            if flight.replica_id is not None:  # its tokens came, its answer was lost
                return Outcome(flight.replica_id)
            may_be_held = True
            attempt_s = min(2 * attempt_s, config.encode_timeout_s / 3)
            limit_s, failure = config.encode_timeout_s, unavailable("no replica has answered the submission")
        except NoResponders:
            limit_s, failure = unavailable_after_s, unavailable("no router is running")
        except BusDisconnected:
            may_be_held = True
            limit_s, failure = unavailable_after_s, unavailable("the message bus is away")
        else:
            if isinstance(reply, Accepted):
                return Outcome(reply.replica_id)
            failure = _rejection(reply, prompt_param)
            if reply.retry_after_s is None:
                limit_s = 0.0
            else:  # a worker that goes is soon replaced, a full queue takes longer
                limit_s = unavailable_after_s if reply.code is RejectCode.NO_REPLICA else patience_s
        if flight.is_landed or loop.time() - started_s >= limit_s:
            return Outcome(error=failure, may_be_held=may_be_held)
        await asyncio.sleep(RETRY_S)


def _rejection(rejected: Rejected, prompt_param: str) -> ApiError:
    message, client = rejected.message, "invalid_request_error"
    match rejected.code:
        case RejectCode.TOO_LONG:
            return ApiError(400, message, kind=client, param=prompt_param, code="context_length_exceeded")
        case RejectCode.INVALID:
            return ApiError(400, message, kind=client, code="invalid_value")
        case RejectCode.DEADLINE:
            return deadline_exceeded(message)
        case RejectCode.QUEUE_FULL | RejectCode.DRAINING | RejectCode.NO_REPLICA:
            return unavailable(message, rejected.retry_after_s or 1.0, rejected.code.value)
