"""Logs and traces, set up once per process.

Logs are structlog events on stderr, JSON or pretty on a terminal, with role and instance, the ids bound by `log_context`
(request, replica) and the current trace. Spans go to a collector when `otlp_endpoint` is set; the trace context crosses the
bus in the `trace` field of messages.
"""

import logging
import logging.config
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from shared.config import ServiceConfig, StartupError

_propagator = TraceContextTextMapPropagator()
_EXPORT_TIMEOUT_S = 2.0
"""A collector that does not answer must not hold up the end of a process."""

log_context = structlog.contextvars.bound_contextvars
"""`with log_context(request_id=...)`: every log line below carries it, across awaits and in tasks started inside."""
bind_log_context = structlog.contextvars.bind_contextvars
"""The same until the current task ends."""


def setup(config: ServiceConfig, role: str, instance: str) -> None:
    """Configure logs and traces of this process. Raises StartupError when traces are wanted and cannot be exported."""
    _setup_logs(config)
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"radixmesh-{role}", "service.instance.id": instance})
    )
    if config.otlp_endpoint:
        provider.add_span_processor(BatchSpanProcessor(_otlp_exporter(config.otlp_endpoint)))
    trace.set_tracer_provider(provider)


def shutdown() -> None:
    """Export what is left, for two seconds at most when the collector does not answer."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines say which module they come from; usable at import time, before `setup`."""
    logger: FilteringBoundLogger = structlog.get_logger(name)
    return logger


def tracer() -> trace.Tracer:
    return trace.get_tracer("radixmesh")


def inject() -> dict[str, str]:
    """The current trace context for a message's `trace` field; empty outside a span."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """The context of a received message: `tracer().start_as_current_span(name, context=extract(message.trace))`."""
    return _propagator.extract(carrier)


def _otlp_exporter(endpoint: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise StartupError(
            "otlp_endpoint is set, but the exporter is not installed: pip install 'radixmesh[telemetry]'"
        ) from None
    path = "" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path, timeout=_EXPORT_TIMEOUT_S)


def _add_trace_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
        event["span_id"] = trace.format_span_id(span.span_id)
    return event


def _setup_logs(config: ServiceConfig) -> None:
    """One format for our lines and those of libraries, which go through the standard logging."""
    pretty = config.log_format == "pretty" or (config.log_format == "auto" and sys.stderr.isatty())
    shared: Sequence[Processor] = (
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        _add_trace_ids,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    )
    render: tuple[Processor, ...] = (
        (structlog.dev.ConsoleRenderer(),)
        if pretty
        else (structlog.processors.format_exc_info, structlog.processors.JSONRenderer())
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    formatter: dict[str, Any] = {
        "()": structlog.stdlib.ProcessorFormatter,
        "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        "foreign_pre_chain": shared,
    }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"lines": formatter},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
            "root": {"handlers": ["stderr"], "level": config.log_level.upper()},
        }
    )
