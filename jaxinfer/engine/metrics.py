"""Prometheus metrics of serving, under the names that vLLM's dashboards use where the meaning is the same, and under
jaxinfer: where they have none.

Needs prometheus-client: pip install 'jaxinfer[metrics]'. What differs from vLLM's: a request's n completions count as n
requests, times end when the last token is on the host rather than when it is delivered, and the tokens that a
preempted sequence computes again count among the queries of the prefix cache.
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

_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)


@dataclass(slots=True)
class _Unfinished:
    """What the latencies of a sequence are counted from."""

    arrival: float
    num_prompt_tokens: int
    began: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class PrometheusMetrics:
    """An observer that keeps metrics; give it to an engine, and its registry to any Prometheus exporter.

    Args:
        model_name: label of every metric.
        registry: where the metrics are registered; a registry takes one of these objects.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        label = {"labelnames": ("model_name",), "registry": registry}

        def gauge(name: str, about: str, of: str = "vllm") -> Gauge:
            return Gauge(f"{of}:{name}", about, **label).labels(model_name)

        def counter(name: str, about: str, of: str = "vllm") -> Counter:
            return Counter(f"{of}:{name}", about, **label).labels(model_name)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", about, buckets=buckets, **label).labels(model_name)

        self._running = gauge("num_requests_running", "Sequences with a slot.")
        self._waiting = gauge("num_requests_waiting", "Sequences that wait for a slot.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the KV pages held by sequences, 1 for all.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of the sequences that have their first token.")
        self._generation_tokens = counter("generation_tokens", "Sampled tokens.")
        self._preemptions = counter("num_preemptions", "Sequences that lost their slot.")
        self._queries = counter("prefix_cache_queries", "Known tokens of sequences that entered a slot.")
        self._hits = counter("prefix_cache_hits", "Those of them that the cache had.")
        self._host_pages = gauge("host_pages", "KV pages kept in host memory.", "jaxinfer")
        self._pages_out = counter("pages_out", "KV pages moved to host memory.", "jaxinfer")
        self._pages_in = counter("pages_in", "KV pages moved back from host memory.", "jaxinfer")
        self._page_copies = counter("page_copies", "KV pages that a sequence began with a copy of.", "jaxinfer")
        finished = ("model_name", "finished_reason")
        self._success = Counter("vllm:request_success", "Sequences that ended.", finished, registry=registry)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SHORT)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", _SHORT)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LONG)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first work.", _LONG)
        self._prefill = histogram("request_prefill_time_seconds", "From the first work to the first token.", _LONG)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", _LONG)
        self._inference = histogram("request_inference_time_seconds", "From the first work to the last token.", _LONG)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean time of a token after the first.", _SHORT)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of each sequence.", _COUNTS)
        self._request_output = histogram("request_generation_tokens", "Tokens that each sequence sampled.", _COUNTS)
        self._round_tokens = histogram("iteration_tokens_total", "Tokens computed in each round.", _COUNTS)
        self._model_name = model_name
        self._sequences: dict[SequenceId, _Unfinished] = {}
        self._ended: dict[SequenceId, SequenceFinished] = {}

    def __call__(self, event: Event, /) -> None:
        """Take one event."""
        match event:
            case RequestQueued():
                self._settle()  # its id may be that of a sequence that has ended
                for index in range(event.num_sequences):
                    state = _Unfinished(event.arrival, event.num_prompt_tokens)
                    self._sequences[SequenceId(event.request_id, index)] = state
            case SequencePreempted():
                self._preemptions.inc()
            case SequenceFinished():
                self._success.labels(self._model_name, event.reason).inc()
                self._ended[event.sequence] = event
                if event.reason == "abort" and event.sequence in self._sequences:
                    # No token comes after it, and perhaps no round.
                    self._finish(self._sequences[event.sequence], event.num_output_tokens)
                if self._ended.keys() >= self._sequences.keys():
                    self._show_idle()  # no round may follow
            case RoundFinished():
                self._round(event)

    def _round(self, event: RoundFinished) -> None:
        self._running.set(event.running)
        self._waiting.set(event.waiting)
        self._usage.set(event.pages.active / sum(event.pages))
        self._round_tokens.observe(event.work.num_tokens)
        self._host_pages.set(event.host_pages)
        self._pages_out.inc(len(event.work.page_outs))
        self._pages_in.inc(len(event.work.page_ins))
        self._page_copies.inc(len(event.work.page_copies))
        for step in event.steps():
            if step.sequence in self._sequences:
                self._step(step, self._sequences[step.sequence], event)
        self._settle()
        if not self._sequences:
            self._show_idle()

    def _settle(self) -> None:
        """Be done with the sequences that have ended; a round's event comes after those of the sequences it ended."""
        for sequence, end in self._ended.items():
            state = self._sequences.pop(sequence, None)
            if state is not None and end.reason != "abort":
                self._finish(state, end.num_output_tokens)
        self._ended.clear()

    def _show_idle(self) -> None:
        for gauge in (self._running, self._waiting, self._usage):
            gauge.set(0)

    def _finish(self, state: _Unfinished, tokens: int) -> None:
        began, first, last = state.began, state.first_token, state.last_token
        if began is None or first is None or last is None:
            return
        self._e2e.observe(last - state.arrival)
        self._prefill.observe(first - began)
        self._decode.observe(last - first)
        self._inference.observe(last - began)
        self._request_prompt.observe(state.num_prompt_tokens)
        self._request_output.observe(tokens)
        if tokens > 1:
            self._tpot.observe((last - first) / (tokens - 1))

    def _step(self, step: SequenceStep, state: _Unfinished, event: RoundFinished) -> None:
        if state.began is None:
            state.began = event.start
            self._queue.observe(event.start - state.arrival)
        if step.kind == "prefill":
            self._queries.inc(step.cached_tokens + step.computed_tokens)
            self._hits.inc(step.cached_tokens)
        if step.sampled:
            self._generation_tokens.inc()
            if state.last_token is None:
                state.first_token = event.end
                self._prompt_tokens.inc(state.num_prompt_tokens)
                self._ttft.observe(event.end - state.arrival)
            else:
                self._itl.observe(event.end - state.last_token)
            state.last_token = event.end
