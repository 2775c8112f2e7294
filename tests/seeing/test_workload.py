"""Workloads: the same for the same seed, of the asked distribution, and datasets that are refused with the line."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest

from jaxinfer.core import workload
from jaxinfer.core.workload import Feed, Workload, WorkloadRequest, WorkloadSpec, dataset_workload, random_workload


def test_same_seed_same_work_and_anything_else_other_work():
    spec = {"num_prompts": 20, "request_rate": 2.0, "range_ratio": 0.5, "prefix_len": 4, "seed": 3}
    first, again = (random_workload(WorkloadSpec(**spec), 100) for _ in range(2))
    assert first == again
    hashes = {first.hash}
    changes = ({"seed": 4}, {"request_rate": 3.0}, {"input_len": 255}, {"output_len": 63}, {"max_concurrency": 2})
    for change in (*changes, {"prefix_len": 5}, {"num_prompts": 19}, {"burstiness": 2.0}):
        hashes.add(random_workload(WorkloadSpec(**(spec | change)), 100).hash)
    assert len(hashes) == 9
    assert first.hash == again.hash == "d960a9446d329e85"  # on every machine


def test_another_rate_leaves_the_tokens_as_they_are():
    slow, fast = (random_workload(WorkloadSpec(request_rate=rate), 100).requests for rate in (1.0, 5.0))
    assert [request.prompt_ids for request in slow] == [request.prompt_ids for request in fast]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals(burstiness, variation):
    spec = WorkloadSpec(num_prompts=20_000, request_rate=10.0, burstiness=burstiness, input_len=1)
    times = [request.arrival for request in random_workload(spec, 2).requests]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


def test_all_at_once():
    assert {request.arrival for request in random_workload(WorkloadSpec(), 10).requests} == {0.0}


def test_lengths_and_prefixes():
    spec = WorkloadSpec(2000, input_len=100, output_len=10, range_ratio=0.5, prefix_len=7, prefix_share=0.25)
    requests = random_workload(spec, 1000).requests
    starts = [request.prompt_ids[:7] for request in requests]
    shared = max(starts, key=starts.count)
    with_prefix = [request for request in requests if request.prompt_ids[:7] == shared]
    assert len(with_prefix) / 2000 == pytest.approx(0.25, abs=0.03)
    lengths = [len(request.prompt_ids) - 7 * (request.prompt_ids[:7] == shared) for request in requests]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert {request.output_tokens for request in requests} == set(range(5, 16))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_prompts": 0}, "num_prompts"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": 0}, "output_len"),
        ({"prefix_len": -1}, "prefix_len"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"burstiness": -1.0}, "burstiness"),
        ({"burstiness": math.inf}, "burstiness"),
        ({"range_ratio": 1.1}, "range_ratio"),
        ({"prefix_share": math.nan}, "prefix_share"),
        ({"max_concurrency": 0}, "max_concurrency"),
    ],
)
def test_specs_that_are_none(change, named):
    with pytest.raises(ValueError, match=named) as error:
        WorkloadSpec(**change)
    assert str(error.value).endswith(".")


def dataset(*entries, encode=None, **spec):
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    return dataset_workload(lines, WorkloadSpec(**spec), 100, encode)


def test_dataset():
    found = dataset(
        {"prompt_token_ids": [1, 2, 3], "output_tokens": 5, "arrival": 2.5},
        "",
        {"input_tokens": 4, "arrival": 1},
        {"prompt": "abc", "arrival": 3},
        {"input_tokens": 9, "arrival": 4},
        encode=lambda text: [ord(letter) - 90 for letter in text],
        num_prompts=3,
        output_len=7,
    )
    shapes = [(r.request_id, r.arrival, len(r.prompt_ids), r.output_tokens) for r in found.requests]
    assert shapes == [("1", 1.0, 4, 7), ("0", 2.5, 3, 5), ("2", 3.0, 3, 7)]
    assert found.requests[2].prompt_ids == (7, 8, 9)
    assert [request.positions for request in found.requests] == [11, 8, 10]


def test_a_dataset_of_more_tokens_than_a_workload_keeps(monkeypatch):
    monkeypatch.setattr(workload, "MOST_TOKENS", 1000)
    assert len(dataset({"input_tokens": 600}, {"input_tokens": 400}).requests) == 2
    with pytest.raises(ValueError, match="1001 tokens together, but a workload keeps at most 1000"):
        dataset({"input_tokens": 600}, {"input_tokens": 401})


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("{", "Line 2 of the dataset is not JSON"),
        ("[" * 100_000, "Line 2 of the dataset is not JSON"),
        ('{"input_tokens": ' + "9" * 5000 + "}", "Line 2 of the dataset is not JSON"),
        ({"input_tokens": 3, "arrival": 1e10}, "arrival 10000000000.0, which must be seconds, 0 to 1e"),
        ([1], "is not a JSON object"),
        ({"input_tokens": 3, "temperature": 1}, "the key 'temperature'"),
        ({}, "needs one of"),
        ({"prompt": "a", "input_tokens": 3}, "needs one of"),
        ({"prompt": "a"}, "no tokenizer"),
        ({"prompt_token_ids": []}, "without tokens"),
        ({"prompt_token_ids": "abc"}, "without tokens"),
        ({"prompt_token_ids": [100]}, "token id 100, not one of 0 to 99"),
        ({"prompt_token_ids": [True]}, "token id True"),
        ({"input_tokens": 0}, "input_tokens 0"),
        ({"input_tokens": 10**12}, "input_tokens 1000000000000"),
        ({"input_tokens": 3, "output_tokens": 1.5}, "output_tokens 1.5"),
        ({"input_tokens": 3, "arrival": -1}, "arrival -1"),
        ({"input_tokens": 3, "arrival": "now"}, "arrival 'now'"),
        ({"input_tokens": 3, "arrival": 1}, "disagree on having 'arrival'"),
    ],
)
def test_lines_that_are_refused(entry, named):
    with pytest.raises(ValueError, match=named) as error:
        dataset({"input_tokens": 1}, entry)
    assert str(error.value).endswith(".")
    assert len(str(error.value)) < 200


def test_half_a_character_is_no_text():
    with pytest.raises(ValueError, match="Line 1 of the dataset has a prompt without tokens"):
        dataset({"prompt": "a\ud800"}, encode=lambda text: list(text.encode()))


def test_an_empty_dataset():
    with pytest.raises(ValueError, match="has no requests"):
        dataset("", " ")


def test_feed_holds_back_and_counts_from_the_release():
    requests = tuple(WorkloadRequest(str(i), float(i), (1,), 1) for i in range(4))
    feed = Feed(Workload(requests, max_concurrency=2), begin=10.0)
    assert [(r.request_id, at) for r, at in feed.take(12.5, 0)] == [("0", 10.0), ("1", 11.0)]
    assert list(feed.take(13.0, 2)) == []
    assert [(r.request_id, at) for r, at in feed.take(14.0, 1)] == [("2", 14.0)]  # due at 12, held until 14
    assert [(r.request_id, at) for r, at in feed.take(15.0, 0)] == [("3", 15.0)]
    assert feed.next_arrival is None
