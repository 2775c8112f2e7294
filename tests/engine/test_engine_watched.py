"""Whatever happens to requests, timelines, traces and metrics tell what the outputs tell."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest
from fake_runner import VOCAB_SIZE, FakeLimits, FakeRunner, FakeTokenizer

from jaxinfer.core.observer import Observers
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.step import StepResult
from jaxinfer.core.timeline import TimelineRecorder
from jaxinfer.engine import Engine
from jaxinfer.engine.trace import chrome_trace

prometheus_client = pytest.importorskip("prometheus_client")


class Clock:
    """A second passes whenever somebody looks."""

    def __init__(self) -> None:
        self._now = itertools.count()

    def __call__(self) -> float:
        return float(next(self._now))


class UnreliableRunner(FakeRunner):
    """Now and then the logits of a slot are not numbers."""

    def __init__(self, limits: FakeLimits, draw: random.Random) -> None:
        super().__init__(limits)
        self._draw = draw

    def execute(self, work):
        result = super().execute(work)
        failed = frozenset(slot for slot in result.sampled if self._draw.random() < 0.01)
        return StepResult(result.sampled, result.prompt_logprobs, failed)


def served(draw: random.Random, observer) -> list:
    """Random requests, some cancelled, late or failing, under few ids; their last outputs."""
    limits = FakeLimits(num_pages=draw.choice([8, 12, 33]), host_pages=draw.choice([0, 6]))
    engine = Engine(
        UnreliableRunner(limits, draw),
        FakeTokenizer(),
        policy="priority",
        mode=draw.choice(["continuous", "continuous", "static"]),
        async_scheduling=draw.random() < 0.7,
        clock=Clock(),
        observer=observer,
    )
    unfinished, last = set(), []
    for _ in range(60):
        name = draw.choice("abcdef")
        if draw.random() < 0.4 and name not in unfinished:
            params = SamplingParams(n=draw.choice([1, 1, 2]), max_tokens=draw.randint(1, 9), seed=1)
            prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, 18))]
            timeout = draw.choice([None, None, 40.0])
            engine.add_request(name, prompt, params, priority=draw.randint(0, 2), timeout_s=timeout)
            unfinished.add(name)
        elif draw.random() < 0.1 and (cancelled := engine.abort(name)) is not None:
            unfinished.remove(name)
            last.append(cancelled)
        ended = [output for output in engine.step() if output.finished]
        unfinished -= {output.request_id for output in ended}
        last += ended
        engine.scheduler.check_integrity()
    while engine.has_unfinished:
        last += [output for output in engine.step() if output.finished]
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.usage.active == 0
    return last


@pytest.mark.parametrize("seed", range(60))
def test_what_is_watched_is_what_happened(seed):
    from jaxinfer.engine.metrics import PrometheusMetrics

    registry, recorder = prometheus_client.CollectorRegistry(), TimelineRecorder()
    last = served(random.Random(seed), Observers(recorder, PrometheusMetrics("tiny", registry)))
    completions = [completion for output in last for completion in output.outputs]
    timeline = recorder.timeline()
    assert len(timeline.sequences) == len(completions)
    tokens = [len(sequence.token_times) for sequence in timeline.sequences]
    assert sum(tokens) == sum(len(completion.token_ids) for completion in completions)
    check_metrics(registry, last, completions)
    check_trace(chrome_trace(timeline)["traceEvents"])
    for sequence in timeline.sequences:
        if sequence.e2e_s is not None and sequence.ttft_s is not None:
            rest = (len(sequence.token_times) - 1) * (sequence.tpot_s or 0)
            assert sequence.e2e_s == pytest.approx(sequence.ttft_s + rest)
            assert sum(sequence.itls_s) == pytest.approx(rest)


def check_metrics(registry, last, completions):
    def value(name, **labels):
        return registry.get_sample_value(f"vllm:{name}", {"model_name": "tiny"} | labels) or 0

    started = [(output, completion) for output in last for completion in output.outputs if completion.token_ids]
    assert value("generation_tokens_total") == sum(len(completion.token_ids) for completion in completions)
    assert value("prompt_tokens_total") == sum(len(output.prompt_token_ids) for output, _ in started)
    assert value("time_to_first_token_seconds_count") == len(started)
    assert value("e2e_request_latency_seconds_count") == len(started)
    assert value("request_generation_tokens_sum") == value("generation_tokens_total")
    assert value("inter_token_latency_seconds_count") == value("generation_tokens_total") - len(started)
    for reason in ("stop", "length", "abort"):
        expected = sum(completion.finish_reason == reason for completion in completions)
        assert value("request_success_total", finished_reason=reason) == expected
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(gauge) == 0


def check_trace(events):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(sorted(slices)))
    waits = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            waits[event["id"]].append((event["ph"], event["ts"]))
    for (begun, start), (ended, end) in waits.values():
        assert (begun, ended) == ("b", "e")
        assert start <= end
