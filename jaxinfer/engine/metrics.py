"""Prometheus metrics of serving, under the names that vLLM's dashboards use where the meaning is the same.

Needs prometheus-client: pip install 'jaxinfer[metrics]'.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from jaxinfer.core.observer import (
    Event,
    RequestQueued,
    RoundFinished,
    SequenceFinished,
    SequenceId,
    SequencePreempted,
    SequenceStep,
)

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)


@dataclass(slots=True)
class _Unfinished:
    """What the latencies of a sequence are counted from."""

    arrival: float
    started: bool = False
    last_token: float | None = None


class PrometheusMetrics:
    """An observer that keeps metrics; give it to an engine, and its registry to any Prometheus exporter.

    Args:
        model_name: label of every metric.
        registry: where the metrics are registered; a registry takes one of these objects.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        label = {"labelnames": ("model_name",), "registry": registry}

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"vllm:{name}", about, **label).labels(model_name)

        def counter(name: str, about: str) -> Counter:
            return Counter(f"vllm:{name}", about, **label).labels(model_name)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", about, buckets=buckets, **label).labels(model_name)

        self._running = gauge("num_requests_running", "Sequences with a slot.")
        self._waiting = gauge("num_requests_waiting", "Sequences that wait for a slot.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the KV pages held by sequences, 1 for all.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted sequences.")
        self._generation_tokens = counter("generation_tokens", "Sampled tokens.")
        self._preemptions = counter("num_preemptions", "Sequences that lost their slot.")
        self._queries = counter("prefix_cache_queries", "Known tokens of sequences that entered a slot.")
        self._hits = counter("prefix_cache_hits", "Those of them that the cache had.")
        finished = ("model_name", "finished_reason")
        self._success = Counter("vllm:request_success", "Sequences that ended.", finished, registry=registry)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SHORT)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", _SHORT)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LONG)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first work.", _LONG)
        self._model_name = model_name
        self._sequences: dict[SequenceId, _Unfinished] = {}
        self._ended: dict[SequenceId, SequenceFinished] = {}

    def __call__(self, event: Event, /) -> None:
        """Take one event."""
        match event:
            case RequestQueued():
                for index in range(event.num_sequences):
                    self._sequences[SequenceId(event.request_id, index)] = _Unfinished(event.arrival)
                self._prompt_tokens.inc(event.num_prompt_tokens * event.num_sequences)
            case SequencePreempted():
                self._preemptions.inc()
            case SequenceFinished():
                self._success.labels(self._model_name, event.reason).inc()
                self._ended[event.sequence] = event
            case RoundFinished():
                self._round(event)

    def _round(self, event: RoundFinished) -> None:
        self._running.set(event.running)
        self._waiting.set(event.waiting)
        self._usage.set(event.pages.active / sum(event.pages))
        for step in event.steps():
            if step.sequence in self._sequences:
                self._step(step, self._sequences[step.sequence], event)
        # A round's event comes after those of the sequences that it ended.
        for sequence in self._ended:
            state = self._sequences.pop(sequence, None)
            if state is not None and state.last_token is not None:
                self._e2e.observe(state.last_token - state.arrival)
        self._ended.clear()

    def _step(self, step: SequenceStep, state: _Unfinished, event: RoundFinished) -> None:
        if not state.started:
            state.started = True
            self._queue.observe(event.start - state.arrival)
        if step.kind == "prefill":
            self._queries.inc(step.cached_tokens + step.computed_tokens)
            self._hits.inc(step.cached_tokens)
        if step.sampled:
            self._generation_tokens.inc()
            if state.last_token is None:
                self._ttft.observe(event.end - state.arrival)
            else:
                self._itl.observe(event.end - state.last_token)
            state.last_token = event.end
