"""The record of each request that ended: one log line, and the phases as spans of the request's trace."""

from opentelemetry import trace

from services.scheduler.events import RecordUsage
from shared.telemetry import extract, get_logger, tracer

log = get_logger(__name__)

NS_PER_MS = 1_000_000


class UsageLog:
    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id

    def record(self, usage: RecordUsage) -> None:
        """Write the line; spans only where the gateway started a trace."""
        started_ms = usage.ended_ms if usage.admitted_ms is None else usage.admitted_ms
        log.info(
            "request ended",
            request=usage.request_id,
            replica=self._replica_id,
            finish=usage.finish.value,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.generated_tokens,
            num_retractions=usage.num_retractions,
            queue_ms=started_ms - usage.arrived_ms,
            total_ms=usage.ended_ms - usage.arrived_ms,
            error=usage.error,
        )
        if usage.trace:
            self._trace(usage, started_ms)

    def _trace(self, usage: RecordUsage, started_ms: int) -> None:
        prefilled_ms = usage.ended_ms if usage.first_token_ms is None else usage.first_token_ms
        phases = [
            ("queue", usage.arrived_ms, started_ms),
            ("prefill", started_ms, prefilled_ms),
            ("decode", prefilled_ms, usage.ended_ms),
        ]
        parent = extract(usage.trace)
        for name, start_ms, end_ms in phases:
            if end_ms > start_ms:
                span = tracer().start_span(name, context=parent, start_time=start_ms * NS_PER_MS)
                span.set_attributes(
                    {
                        "gen_ai.usage.input_tokens": usage.prompt_tokens,
                        "gen_ai.usage.output_tokens": usage.generated_tokens,
                        "radixmesh.cached_tokens": usage.cached_tokens,
                        "radixmesh.replica": self._replica_id,
                    }
                )
                if usage.error:
                    span.set_status(trace.StatusCode.ERROR, usage.error)
                span.end(end_time=end_ms * NS_PER_MS)
