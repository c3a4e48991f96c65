"""Prometheus metrics. Names and meanings follow vLLM's, under the prefix `metainfer:`.

`METRICS` is the whole list; the reference page is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from metainfer.core.events import GenerationEnd
from metainfer.llm.client import EngineStats
from metainfer.llm.generation import Generation

PREFIX = "metainfer:"

_SECONDS_TO_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_SECONDS_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0,
)  # fmt: skip
_SECONDS_PER_REQUEST = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))[:-2]  # 1 to 1,000,000


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """One metric, without prefix; Prometheus itself appends `_total` to counters."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: tuple[MetricRecord, ...] = (
    MetricRecord("num_requests_running", "gauge", "Requests that the engine computes", "requests"),
    MetricRecord("num_requests_waiting", "gauge", "Requests that wait for room", "requests"),
    MetricRecord(
        "kv_cache_usage_perc", "gauge", "Share of the cache blocks in use, 0 to 1", "share"
    ),
    MetricRecord("engine_alive", "gauge", "1 while the engine answers", "1 or 0"),
    MetricRecord("num_preemptions", "counter", "Requests set back for want of room", "requests"),
    MetricRecord("engine_steps", "counter", "Forward passes", "steps"),
    MetricRecord(
        "kernels_compiled", "counter", "Kernels compiled while requests were served", "kernels"
    ),
    MetricRecord(
        "decodes_without_graph", "counter", "Decode steps whose CUDA graph is missing", "steps"
    ),
    MetricRecord("restarts", "counter", "Starts anew of all ranks, after one was lost", "starts"),
    MetricRecord("prompt_tokens", "counter", "Prompt tokens computed", "tokens"),
    MetricRecord("generation_tokens", "counter", "Tokens generated", "tokens"),
    MetricRecord(
        "request_success", "counter", "Requests that ended", "requests", ("finished_reason",)
    ),
    MetricRecord(
        "http_requests", "counter", "HTTP answers", "answers", ("method", "route", "status")
    ),
    MetricRecord(
        "time_to_first_token_seconds", "histogram", "From arrival to the first token",
        "seconds", (), _SECONDS_TO_FIRST,
    ),
    MetricRecord(
        "inter_token_latency_seconds", "histogram", "From one token to the next",
        "seconds", (), _SECONDS_PER_TOKEN,
    ),
    MetricRecord(
        "request_time_per_output_token_seconds", "histogram",
        "Mean time of a request's tokens after the first", "seconds", (), _SECONDS_PER_TOKEN,
    ),
    MetricRecord(
        "e2e_request_latency_seconds", "histogram", "From arrival to the end",
        "seconds", (), _SECONDS_PER_REQUEST,
    ),
    MetricRecord(
        "request_decode_time_seconds", "histogram", "From the first token to the last",
        "seconds", (), _SECONDS_PER_REQUEST,
    ),
    MetricRecord(
        "request_prompt_tokens", "histogram", "Prompt tokens of a request", "tokens", (), _TOKENS
    ),
    MetricRecord(
        "request_generation_tokens", "histogram", "Tokens generated for a request",
        "tokens", (), _TOKENS,
    ),
)  # fmt: skip

_FROM_STATS: dict[str, Callable[[EngineStats], float]] = {
    "num_requests_running": lambda stats: stats.num_running,
    "num_requests_waiting": lambda stats: stats.num_waiting,
    "kv_cache_usage_perc": lambda stats: 1 - stats.num_free_blocks / max(stats.num_blocks, 1),
    "engine_alive": lambda stats: stats.alive,
    "num_preemptions": lambda stats: stats.num_preemptions,
    "engine_steps": lambda stats: stats.num_steps,
    "kernels_compiled": lambda stats: stats.kernels_compiled,
    "decodes_without_graph": lambda stats: stats.decodes_without_graph,
    "restarts": lambda stats: stats.restarts,
    "prompt_tokens": lambda stats: stats.prompt_tokens,
    "generation_tokens": lambda stats: stats.generation_tokens,
}


class Metrics:
    """The registry of one server; observes generations (`llm.dispatch.Observer`).

    Args:
        model_name: the `model_name` label of every series, as in vLLM.
        stats: asked for a snapshot of the engine at each scrape.
    """

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, stats))
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._model_name = model_name
        for record in METRICS:
            labels = ("model_name", *record.labels)
            name = PREFIX + record.name
            if record.kind == "histogram":
                self._histograms[record.name] = Histogram(
                    name, record.help, labels, buckets=record.buckets, registry=self._registry
                )
            elif record.name not in _FROM_STATS:
                self._counters[record.name] = Counter(
                    name, record.help, labels, registry=self._registry
                )

    def page(self) -> bytes:
        """What /metrics shows."""
        return generate_latest(self._registry)

    def on_tokens(self, generation: Generation, count: int, now_s: float) -> None:
        if generation.last_token_s is None:
            self._observe("time_to_first_token_seconds", now_s - generation.request.arrival_s)
        else:
            # Tokens that come together share the time since the last ones.
            interval_s = (now_s - generation.last_token_s) / count
            for _ in range(count):
                self._observe("inter_token_latency_seconds", interval_s)

    def on_end(self, generation: Generation, end: GenerationEnd, now_s: float) -> None:
        usage = end.usage
        self._count("request_success", 1, end.reason.value)
        self._observe("request_prompt_tokens", usage.prompt_tokens)
        self._observe("request_generation_tokens", usage.completion_tokens)
        self._observe("e2e_request_latency_seconds", now_s - generation.request.arrival_s)
        first_s, last_s = generation.first_token_s, generation.last_token_s
        if first_s is not None and last_s is not None:
            self._observe("request_decode_time_seconds", last_s - first_s)
            if usage.completion_tokens > 1:
                per_token_s = (last_s - first_s) / (usage.completion_tokens - 1)
                self._observe("request_time_per_output_token_seconds", per_token_s)

    def on_answer(self, method: str, route: str, status: int) -> None:
        """One HTTP answer. `method` and `route` are those of the API, never free text."""
        self._count("http_requests", 1, method, route, str(status))

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(self._model_name, *labels).inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(self._model_name).observe(value)


class _EngineCollector(Collector):
    """Metrics that the engine counts itself, read when somebody looks."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        return iter(())  # so that registering does not ask the engine

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for record in METRICS:
            read = _FROM_STATS.get(record.name)
            if read is None:
                continue
            kind = GaugeMetricFamily if record.kind == "gauge" else CounterMetricFamily
            family = kind(PREFIX + record.name, record.help, labels=("model_name",))
            family.add_metric((self._model_name,), read(stats))
            yield family
