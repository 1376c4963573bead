"""Finds a free worker group, claims it, and notices when it is gone."""

import msgspec

from shared import subjects
from shared.bus import Bus, BusError
from shared.messages.cluster import Heartbeat, ServiceState
from shared.messages.execution import Claim, Lease, unpack_claim_reply
from shared.messages.packing import pack
from shared.telemetry import get_logger

log = get_logger(__name__)

CLAIM_TIMEOUT_S = 2.0


class LeaseKeeper:
    """The scheduler's view of worker groups, from their heartbeats."""

    def __init__(self, bus: Bus, model: str, claim: Claim, group: str, silence_ms: int) -> None:
        self._bus = bus
        self._model = model
        self._claim = claim
        self._wanted_group = group
        self._silence_ms = silence_ms
        self._free: dict[str, int] = {}
        """Groups that can be claimed, by the time they last said so."""
        self._last_group = ""
        """Leased last. Given up by us, it is not free as long as it hears our heartbeats; but we may claim it again."""
        self._lease: Lease | None = None
        self._heard_ms = 0

    def heard(self, heartbeat: Heartbeat, now_ms: int) -> None:
        group = str(heartbeat.info.get("group", ""))
        if self._lease is not None and group == self._lease.group and heartbeat.epoch == self._lease.epoch:
            self._heard_ms = now_ms
        can_be_had = bool(heartbeat.info.get("free")) or (self._lease is None and group == self._last_group)
        if heartbeat.state is ServiceState.READY and can_be_had and self._wanted_group in ("", group):
            self._free[group] = now_ms
        else:
            self._free.pop(group, None)

    def reconnected(self, now_ms: int) -> None:
        self._heard_ms = now_ms

    def drop(self) -> None:
        self._lease = None

    def is_silent(self, now_ms: int) -> bool:
        """The leased worker has not been heard of for too long."""
        return self._lease is not None and now_ms - self._heard_ms > self._silence_ms

    async def claim(self, now_ms: int) -> Lease | None:
        """Ask the free groups one after the other; None if none can be had now."""
        # Given up for a reason: the last one is taken again when there is no other.
        for group in sorted(self._free, key=lambda group: (group == self._last_group, group)):
            if now_ms - self._free.pop(group) > self._silence_ms:
                continue
            try:
                subject = subjects.worker_claim(self._model, group)
                reply = unpack_claim_reply(
                    await self._bus.request(subject, pack(self._claim), timeout_s=CLAIM_TIMEOUT_S)
                )
            except (BusError, msgspec.DecodeError) as error:
                log.info("claim failed", group=group, error=str(error))
                continue
            if isinstance(reply, Lease):
                self._lease, self._heard_ms, self._last_group = reply, now_ms, group
                return reply
            log.info("claim refused", group=group, reason=reply.reason)
        return None
