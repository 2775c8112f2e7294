"""Prometheus metrics from events, by hand."""

from __future__ import annotations

import pytest
from rounds import finished, prefill, queued, round_of

from jaxinfer.core.observer import SequenceId, SequencePreempted
from jaxinfer.core.step import PageCopy, PageIn, PageOut

prometheus_client = pytest.importorskip("prometheus_client")


def test_metrics_by_hand():
    from jaxinfer.engine.metrics import PrometheusMetrics

    registry = prometheus_client.CollectorRegistry()
    metrics = PrometheusMetrics("tiny", registry)
    for event in (
        queued("a", 0.0, 10),
        round_of(1.0, 2.0, {0: "a"}, prefills=[prefill(0, 3, 4, sample=False)], entered=[0], waiting=2),
        queued("b", 2.0, 2),
        finished("b", 4.0, 1, "stop"),
        round_of(3.0, 4.0, {0: "a", 1: "b"}, prefills=[prefill(0, 3, 7), prefill(1, 2)], entered=[1], active=4),
        SequencePreempted(4.5, SequenceId("a", 0), 0),
        queued("c", 8.5, 2),
        finished("a", 9.0, 2),
        round_of(8.0, 9.0, {0: "a"}, decodes=[0], active=5, cached=1, waiting=1),
    ):
        metrics(event)

    def value(name, **labels):
        return registry.get_sample_value(f"vllm:{name}", {"model_name": "tiny"} | labels)

    assert (value("num_requests_running"), value("num_requests_waiting"), value("kv_cache_usage_perc")) == (1, 1, 0.5)
    assert (value("prompt_tokens_total"), value("generation_tokens_total")) == (12, 3)
    assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (12, 4)
    assert value("num_preemptions_total") == 1
    assert value("request_success_total", finished_reason="stop") == 1
    assert value("request_success_total", finished_reason="length") == 1
    assert (value("time_to_first_token_seconds_count"), value("time_to_first_token_seconds_sum")) == (2, 4 + 2)
    assert (value("inter_token_latency_seconds_count"), value("inter_token_latency_seconds_sum")) == (1, 5)
    assert (value("e2e_request_latency_seconds_count"), value("e2e_request_latency_seconds_sum")) == (2, 9 + 2)
    assert (value("request_queue_time_seconds_count"), value("request_queue_time_seconds_sum")) == (2, 1 + 1)
    # a: first work at 1, tokens at 4 and 9; b: first work at 3, its only token at 4
    assert value("request_prefill_time_seconds_sum") == 3 + 1
    assert value("request_decode_time_seconds_sum") == 5 + 0
    assert value("request_inference_time_seconds_sum") == 8 + 1
    per_token = "request_time_per_output_token_seconds"
    assert (value(f"{per_token}_count"), value(f"{per_token}_sum")) == (1, 5)
    assert (value("request_prompt_tokens_sum"), value("request_generation_tokens_sum")) == (12, 3)
    assert (value("iteration_tokens_total_count"), value("iteration_tokens_total_sum")) == (3, 3 + 5 + 1)

    metrics(finished("c", 9.5, 0, "abort"))  # it waited, and no round follows
    assert (value("num_requests_running"), value("num_requests_waiting"), value("kv_cache_usage_perc")) == (0, 0, 0)
    metrics(queued("d", 10.0, 1))
    metrics(finished("d", 12.0, 1))
    metrics(round_of(11.0, 12.0, {0: "d"}, prefills=[prefill(0, 1)], entered=[0]))
    assert (value("num_requests_running"), value("kv_cache_usage_perc")) == (0, 0)


def test_an_id_that_is_used_again_counts_as_another_request():
    from jaxinfer.engine.metrics import PrometheusMetrics

    registry = prometheus_client.CollectorRegistry()
    metrics = PrometheusMetrics("tiny", registry)
    for event in (
        queued("a", 0.0, 10),
        round_of(1.0, 2.0, {0: "a"}, prefills=[prefill(0, 10)], entered=[0]),
        finished("a", 3.0, 1, "abort"),  # between two rounds
        queued("a", 3.0, 4),
        round_of(4.0, 5.0, {0: "a"}, prefills=[prefill(0, 4)], entered=[0]),
        finished("a", 6.0, 2),
        round_of(5.0, 6.0, {0: "a"}, decodes=[0]),
    ):
        metrics(event)

    def value(name):
        return registry.get_sample_value(f"vllm:{name}", {"model_name": "tiny"})

    assert (value("request_prompt_tokens_sum"), value("request_generation_tokens_sum")) == (10 + 4, 1 + 2)
    assert (value("e2e_request_latency_seconds_count"), value("e2e_request_latency_seconds_sum")) == (2, 2 + 3)
    assert (value("inter_token_latency_seconds_count"), value("inter_token_latency_seconds_sum")) == (1, 1)


def test_page_moves_are_counted():
    from jaxinfer.engine.metrics import PrometheusMetrics

    registry = prometheus_client.CollectorRegistry()
    metrics = PrometheusMetrics("tiny", registry)
    metrics(round_of(1.0, 2.0, {}, moves=((PageOut(1, 0), PageOut(2, 1)), (PageCopy(3, 4),), ()), host=2))
    metrics(round_of(2.0, 3.0, {}, moves=((), (PageCopy(3, 4), PageCopy(3, 5)), (PageIn(1, 6),)), host=1))
    names = ("host_pages", "pages_out_total", "pages_in_total", "page_copies_total")
    values = [registry.get_sample_value(f"jaxinfer:{name}", {"model_name": "tiny"}) for name in names]
    assert values == [1, 2, 1, 3]
