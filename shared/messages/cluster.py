"""Who is there, how busy it is, and what it has cached."""

from enum import StrEnum

import msgspec


class ServiceState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Every 500 ms on `heartbeat.<role>.<instance>`; silence for 3 s means gone. A last one says DRAINING on the way out."""

    role: str
    instance: str
    state: ServiceState
    epoch: int = 0
    info: dict[str, str | int | float] = {}
    """Capabilities and versions: flat, for people and for `GET /server_info`. A worker states `free` (1 or 0) and `group`."""


class Load(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="load"):
    """A scheduler's load: every 100 ms and on change."""

    replica_id: str
    epoch: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_uncached_tokens: int
    """Prompt tokens that wait for prefill, as far as known."""
    num_used_slots: int
    """Held by requests; cached and evictable ones do not count."""
    num_cached_slots: int
    """Held by the radix tree, locked or not."""
    num_slots: int
    accepting: bool
    num_retracted_reqs: int = 0
    """Since the start."""
    num_steps: int = 0
    """Since the start: tells a stalled loop from an idle one together with `num_running_reqs`."""
    max_total_tokens: int = 0
    """The longest sequence this replica can ever hold: the smaller of context and pool."""
    executor_wait_us: int = 0
    """Since the start: how long the worker's executor had nothing to run."""
    executor_run_us: int = 0


class KvEvents(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="kv_events"):
    """What the radix tree gained and lost, as hashes of blocks of tokens chained from their namespace.

    Numbered per epoch from 1: a router that misses a number asks for a KvSnapshot. Within one message `removed` comes first.
    """

    replica_id: str
    epoch: int
    first: int
    """Number of this message."""
    stored: bytes = b""
    """uint64 [n], little-endian"""
    removed: bytes = b""
    """uint64 [n], little-endian"""
    cleared: bool = False
    """Forget everything known before applying this."""


class KvSnapshotRequest(msgspec.Struct, frozen=True, kw_only=True, tag="kv_snapshot_request"):
    router_id: str


class KvSnapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="kv_snapshot"):
    replica_id: str
    epoch: int
    number: int
    """State after the KvEvents message of this number."""
    stored: bytes
    """uint64 [n], little-endian"""


class Booked(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="booked"):
    """router -> routers: a request is on its way to a replica; each counts it until a later Load of the replica shows it."""

    router_id: str
    replica_id: str
    num_prefill_tokens: int
    """Of its prompt, those not cached there."""


unpack_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
unpack_load = msgspec.msgpack.Decoder(Load).decode
unpack_kv_events = msgspec.msgpack.Decoder(KvEvents).decode
unpack_kv_snapshot = msgspec.msgpack.Decoder(KvSnapshot).decode
unpack_booked = msgspec.msgpack.Decoder(Booked).decode
