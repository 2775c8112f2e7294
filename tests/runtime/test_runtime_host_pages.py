"""A real runner whose evicted pages go to host memory: same answers, nothing compiled, recovery after failures."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine_tools import PlainTokenizer, finish, poison
from test_runtime_compilation import counted_compilations

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.runtime.limits import Buckets, RunnerLimits
from jaxinfer.runtime.runner import Runner

PAGE, PAGES, HOST_PAGES = 8, 18, 40


@pytest.fixture(scope="module")
def runner(golden_models):
    model = golden_models["qwen2"]
    limits = RunnerLimits(3, PAGE, PAGES, 128, 48, 2, model.config.vocab_size, host_pages=HOST_PAGES)
    return Runner(model.config, model.params, limits, buckets=Buckets((3,), ((48, 2),)))


class WithHostPages:
    """The runner with fewer pages of host memory."""

    def __init__(self, runner: Runner, host_pages: int) -> None:
        self.limits = dataclasses.replace(runner.limits, host_pages=host_pages)
        self.dispatch, self.recover = runner.dispatch, runner.recover


def conversations(count: int, seed: int = 4) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that come again and again with other endings, more than the pool holds."""
    numbers = np.random.default_rng(seed)
    begins = [numbers.integers(3, 140, 40).tolist() for _ in range(4)]
    requests = []
    for index in range(count):
        prompt = begins[index % 4][: int(numbers.integers(30, 41))] + numbers.integers(3, 140, 3).tolist()
        tokens = int(numbers.integers(2, 30))
        n = 2 if index % 3 == 0 else 1
        params = SamplingParams(n=n, temperature=float(index % 2), seed=index, max_tokens=tokens, ignore_eos=True)
        requests.append((prompt, params))
    return requests


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> dict[str, list[tuple[int, ...]]]:
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    outputs = finish(engine)
    engine.scheduler.check_integrity()
    return {name: [completion.token_ids for completion in output.outputs] for name, output in outputs.items()}


def test_a_tiny_pool_answers_the_same_with_and_without_host_memory(runner):
    requests = conversations(24)
    results = []
    for host_pages in (0, 3, HOST_PAGES):
        poison(runner)
        engine = Engine(WithHostPages(runner, host_pages), PlainTokenizer())
        results.append(answers(engine, requests))
        counts = engine.scheduler.counts
        assert (counts.pages_out > 0, counts.pages_in > 0) == (host_pages > 0, host_pages > 3 or counts.pages_in > 0)
    assert counts.pages_in > 20
    assert results[0] == results[1] == results[2]


def test_nothing_compiles_while_pages_move(runner):
    poison(runner)
    engine = Engine(runner, PlainTokenizer())
    requests = conversations(24, seed=5)
    with counted_compilations() as names:
        answers(engine, requests)
    counts = engine.scheduler.counts
    assert min(counts.page_copies, counts.pages_out, counts.pages_in) > 0
    assert names == []


class Broken(Exception):
    pass


def test_after_a_failure_host_memory_is_not_trusted(runner, monkeypatch):
    requests = conversations(12, seed=6)
    poison(runner)
    expected = answers(Engine(runner, PlainTokenizer()), requests)
    poison(runner)
    engine = Engine(runner, PlainTokenizer())
    answers(engine, requests)
    assert engine.scheduler.cache.host.used_slots > 0
    scatter = runner._mover._scatter

    def fail(*arguments):
        raise Broken

    monkeypatch.setattr(runner._mover, "_scatter", fail)
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    with pytest.raises(Broken):
        finish(engine)
    assert engine.scheduler.cache.host.used_slots == 0
    assert not runner._mover._host._arriving
    monkeypatch.setattr(runner._mover, "_scatter", scatter)
    engine.scheduler.check_integrity()
    finish(engine)
    assert answers(engine, requests) == expected


def test_a_lost_cache_takes_host_memory_with_it(runner):
    requests = conversations(12, seed=7)
    poison(runner)
    engine = Engine(runner, PlainTokenizer())
    expected = answers(engine, requests)
    engine.add_request("torn", requests[0][0], requests[0][1])
    for leaf in (runner.state.kv[0].data, runner.state.page_table):
        leaf.delete()
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.scheduler.cache.host.used_slots == 0
    finish(engine)
    assert answers(engine, requests) == expected
