"""What dashboards read: SGLang's metric names, for what this gateway served and what the replicas report."""

from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.cluster_view import ReplicaView
from shared.messages.cluster import Load

PREFIX = "sglang:"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)

_GAUGES: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("num_running_reqs", "Requests in the running batch.", lambda load: load.num_running_reqs),
    ("num_queue_reqs", "Requests waiting for admission.", lambda load: load.num_waiting_reqs),
    ("num_retracted_reqs", "Requests retracted since the replica's start.", lambda load: load.num_retracted_reqs),
    ("num_used_tokens", "KV slots held by requests.", lambda load: load.num_used_slots),
    ("num_cached_tokens", "KV slots held by the prefix cache.", lambda load: load.num_cached_slots),
    ("max_total_num_tokens", "KV slots in the pool.", lambda load: load.num_slots),
    (
        "token_usage",
        "Share of the KV pool that requests hold.",
        lambda load: load.num_used_slots / load.num_slots if load.num_slots else 0.0,
    ),
)


class Metrics:
    """Counters of one gateway; a registry of its own, so that several gateways can live in one process."""

    def __init__(self, model: str, replicas: Callable[[], Iterator[ReplicaView]]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_ReplicaGauges(model, replicas))
        self._requests = self._counter("num_requests", "Requests answered, by HTTP status.", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.").labels(model)
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the cache.").labels(model)
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.").labels(model)
        self.num_aborted = self._counter("num_aborted_requests", "Requests whose client left.").labels(model)
        self.num_moved = self._counter("num_moved_reqs", "Requests moved to another replica.").labels(model)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _SECONDS
        ).labels(model)
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between tokens of a request.", _TOKEN_SECONDS
        ).labels(model)
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _SECONDS
        ).labels(model)
        self._model = model

    def count_request(self, status: int) -> None:
        self._requests.labels(self._model, str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, ("model_name",), buckets=buckets, registry=self.registry)


class _ReplicaGauges(Collector):
    """Read from the last Load of each replica when scraped: a replica that is gone leaves no stale series behind."""

    def __init__(self, model: str, replicas: Callable[[], Iterator[ReplicaView]]) -> None:
        self._model = model
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        loads = [view.load for view in self._replicas()]
        for name, text, value_of in _GAUGES:
            family = GaugeMetricFamily(PREFIX + name, text, labels=("model_name", "replica"))
            for load in loads:
                family.add_metric((self._model, load.replica_id), value_of(load))
            if not loads:  # a series that is absent looks like an exporter that is broken
                family.add_metric((self._model, ""), 0.0)
            yield family
