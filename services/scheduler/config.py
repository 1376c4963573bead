"""Settings of the scheduler."""

from typing import Annotated, Literal

from msgspec import Meta

from shared.config import ServiceConfig


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one replica admits, batches and pipelines."""

    replica_id: Annotated[str, Meta(description="Name of the replica; the instance name when empty.")] = ""
    group: Annotated[str, Meta(description="Claim this worker group only; any free one when empty.")] = ""
    policy: Annotated[
        Literal["lpm", "fcfs", "priority"],
        Meta(
            description="Order of waiting requests: longest cached prefix with aging, arrival, or priority then arrival."
        ),
    ] = "lpm"
    aging_ms: Annotated[
        int, Meta(ge=0, description="Under lpm, a request goes before younger ones after this wait.")
    ] = 2000
    max_running_reqs: Annotated[int, Meta(ge=1, description="Requests computed at the same time.")] = 256
    max_prefill_tokens: Annotated[
        int, Meta(ge=1, description="A step's token budget; it bounds how long a prompt delays running streams.")
    ] = 512
    reserve_slots: Annotated[int, Meta(ge=1, description="KV slots added at a time to a growing sequence.")] = 64
    max_waiting_reqs: Annotated[int, Meta(ge=1, description="Requests that may wait; more are refused with 503.")] = (
        4096
    )
    overlap: Annotated[bool, Meta(description="Send step N+1 while N runs.")] = True
    step_deadline_s: Annotated[
        float, Meta(gt=0, description="A step's result may take this long (or 8 times the average, if that is longer).")
    ] = 5.0
    max_worker_deaths: Annotated[
        int, Meta(ge=1, description="A request under way at so many worker deaths fails; 1: none is computed again.")
    ] = 2
    worker_wait_s: Annotated[
        float, Meta(ge=0, description="Without a worker for so long, requests are handed back for other replicas.")
    ] = 2.0
    silence_s: Annotated[
        float, Meta(gt=0, description="A worker or gateway that says nothing for so long is gone.")
    ] = 3.0
    max_inbox: Annotated[
        int, Meta(ge=1, description="Messages waiting inside the scheduler; a Submit beyond is refused as queue_full.")
    ] = 10_000
