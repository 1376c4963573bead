"""What the core says of itself and of the requests that ended."""

from services.scheduler.events import RecordUsage
from services.scheduler.kv_cache import KvCache
from services.scheduler.planner import Planner
from services.scheduler.request import Request
from services.scheduler.step_window import StepWindow
from shared.messages.cluster import Load
from shared.messages.execution import Lease


def max_total_tokens(lease: Lease | None) -> int:
    """The longest sequence that context and pool can hold, prompt and output together; 0 without a worker."""
    return min(lease.context_len, lease.num_slots) if lease else 0


def load_report(
    replica_id: str, lease: Lease | None, planner: Planner, cache: KvCache | None, window: StepWindow, accepting: bool
) -> Load:
    """The load as routers and gateways hear it."""
    waiting, running = planner.waiting, planner.running
    uncached = sum(request.seq_len - request.match_len for request in waiting)
    uncached += sum(request.prefill_left for request in running.values())
    return Load(
        replica_id=replica_id,
        epoch=lease.epoch if lease else 0,
        num_running_reqs=len(running),
        num_waiting_reqs=len(waiting),
        num_uncached_tokens=uncached,
        num_used_slots=cache.num_used_slots if cache else 0,
        num_cached_slots=cache.tree.num_slots if cache else 0,
        num_slots=cache.pool.num_slots if cache else 0,
        accepting=accepting,
        num_retracted_reqs=planner.num_retracted_reqs,
        num_steps=window.num_steps,
        max_total_tokens=max_total_tokens(lease),
        executor_wait_us=window.executor_wait_us,
        executor_run_us=window.executor_run_us,
    )


def usage_record(request: Request, num_counted: int | None, now_ms: int, error: str | None) -> RecordUsage:
    """What a request that has ended used; `num_counted` generated tokens, when the gateway cut the rest."""
    assert request.finish is not None
    return RecordUsage(
        request_id=request.request_id,
        finish=request.finish,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached_tokens or 0,
        generated_tokens=request.num_generated if num_counted is None else num_counted,
        num_retractions=request.num_retractions,
        arrived_ms=request.arrived_ms,
        admitted_ms=request.admitted_ms,
        first_token_ms=request.first_token_ms,
        ended_ms=now_ms,
        trace=request.submit.trace,
        error=error,
    )
