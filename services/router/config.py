"""Settings of the router."""

from typing import Annotated

from msgspec import Meta

from shared.config import ServiceConfig


class RouterConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the router weighs replicas, and how long it believes what it heard."""

    prefill_tokens_per_s: Annotated[
        float, Meta(gt=0, description="How fast a replica prefills; only its ratio to decode_weight_s matters")
    ] = 2000.0
    decode_weight_s: Annotated[
        float, Meta(ge=0, description="What one running request adds to the cost of its replica, in seconds")
    ] = 0.02
    silence_s: Annotated[float, Meta(gt=0, description="A replica that says nothing for so long is gone")] = 3.0
    suspect_s: Annotated[
        float, Meta(gt=0, description="After so much silence a replica is used only if no other has spoken since")
    ] = 0.75
    settle_ms: Annotated[
        int, Meta(ge=0, description="A Load this much younger than a dispatch counts the dispatched request itself")
    ] = 30
    snapshot_interval_s: Annotated[
        float, Meta(gt=0, description="A replica is asked for a snapshot of its cache at most this often")
    ] = 1.0
    max_blocks: Annotated[int, Meta(ge=1, description="Hashes of cached blocks remembered for each replica")] = 500_000
    max_inbox: Annotated[
        int, Meta(ge=1, description="Messages waiting inside the router; a Submit beyond is refused as queue_full")
    ] = 10_000
