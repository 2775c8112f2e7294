"""Random schedules on a real (tiny) model: shared prefixes, tiny pools, preemption, and ids as of each alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fake_runner import FakeTokenizer

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine

LIMITS = {
    "max_slots": 3,
    "page_size": 8,
    "num_pages": 40,
    "max_context": 256,
    "max_batched_tokens": 24,
    "max_prefill_rows": 2,
}


class IdTokenizer(FakeTokenizer):
    eos_ids = (2, 140)

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(0x100 + i) for i in ids)


@pytest.fixture
def runner(build_runner):
    return build_runner("qwen2", **LIMITS)


def spoil(runner: Any) -> None:
    """An empty cache in which every position is NaN."""
    runner.reset()
    kv = tuple(dataclasses.replace(pages, data=jnp.full_like(pages.data, jnp.nan)) for pages in runner.state.kv)
    runner.state = dataclasses.replace(runner.state, kv=kv)


@dataclasses.dataclass(frozen=True)
class Limits:
    """A runner's limits with a part of its pages, budget and slots."""

    max_slots: int
    page_size: int
    num_pages: int
    max_context: int
    max_batched_tokens: int
    max_prefill_rows: int
    vocab_size: int
    window: int | None = None
    host_pages: int = 0


class PartOf:
    """A compiled runner of which only a part may be used, so that no other needs to be compiled."""

    def __init__(self, runner: Any, **fewer: int) -> None:
        own = {field.name: getattr(runner.limits, field.name) for field in dataclasses.fields(Limits)}
        self.limits = Limits(**(own | fewer))
        self.dispatch, self.recover = runner.dispatch, runner.recover


def random_request(numbers: np.random.Generator, shared: list[int]) -> tuple[list[int], SamplingParams]:
    """A prompt that often begins as others do, and parameters whose state a resumed sequence must get back."""
    own = numbers.integers(3, 140, numbers.integers(1, 12)).tolist()
    prompt = shared[: int(numbers.integers(0, len(shared)))] + own if numbers.random() < 0.7 else own
    params = SamplingParams(
        n=int(numbers.choice([1, 1, 1, 2, 3])),
        temperature=float(numbers.choice([0.0, 0.0, 0.8, 1.3])),
        top_k=int(numbers.choice([0, 20])),
        repetition_penalty=float(numbers.choice([1.0, 1.2])),
        presence_penalty=float(numbers.choice([0.0, 0.5])),
        frequency_penalty=float(numbers.choice([0.0, 0.3])),
        seed=int(numbers.integers(2**32)),
        ignore_eos=bool(numbers.random() < 0.7),
        max_tokens=int(numbers.integers(1, 30)),
        logprobs=1 if numbers.random() < 0.2 else None,
        prompt_logprobs=1 if numbers.random() < 0.1 else None,
    )
    return prompt, params


def run_alone(runner: Any, prompt: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    """What each completion gives with nothing else in the engine, nothing cached and room for everything."""
    spoil(runner)
    engine = Engine(runner, IdTokenizer(), enable_prefix_caching=False, reserve_full=True)
    engine.add_request("alone", prompt, params)
    outputs = [output for _ in range(1000) if engine.has_unfinished for output in engine.step()]
    return [completion.token_ids for completion in outputs[-1].outputs]


def random_engine(runner: Any, numbers: np.random.Generator) -> Engine:
    slots = int(numbers.integers(1, 4))
    part = PartOf(
        runner,
        max_slots=slots,
        num_pages=int(numbers.integers(10, 16)),
        max_batched_tokens=int(numbers.integers(slots, 25)),
        max_prefill_rows=int(numbers.integers(1, 3)),
    )
    return Engine(
        part,
        IdTokenizer(),
        mode="static" if numbers.random() < 0.2 else "continuous",
        policy="priority" if numbers.random() < 0.5 else "fcfs",
        enable_prefix_caching=bool(numbers.random() < 0.8),
        async_scheduling=bool(numbers.random() < 0.7),
        reserve_full=bool(numbers.random() < 0.1),
    )


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 100))])
def test_random_schedules_give_what_each_request_gives_alone(runner, seed):
    numbers = np.random.default_rng(seed)
    shared = numbers.integers(3, 140, 40).tolist()
    requests = {str(i): random_request(numbers, shared) for i in range(7)}
    expected = {name: run_alone(runner, *request) for name, request in requests.items()}
    arrivals = {name: int(numbers.integers(0, 12)) for name in requests}
    cancels = {name: int(numbers.integers(1, 40)) for name in requests if numbers.random() < 0.15}
    spoil(runner)
    engine = random_engine(runner, numbers)
    priorities = {name: int(numbers.integers(-1, 2)) for name in requests}
    outputs: dict[str, Any] = {}
    for step in range(2000):
        if step > 12 and not engine.has_unfinished:
            break
        for name, (prompt, params) in requests.items():
            if arrivals[name] == step:
                priority = priorities[name] if engine.scheduler.config.policy == "priority" else 0
                engine.add_request(name, prompt, params, priority=priority)
            if cancels.get(name) == step and (output := engine.abort(name)) is not None:
                outputs[name] = output
        for output in engine.step():
            if output.request_id in outputs:
                before = {completion.index: completion for completion in outputs[output.request_id].outputs}
                for completion in output.outputs:
                    earlier = before[completion.index].token_ids
                    assert completion.token_ids[: len(earlier)] == earlier
            outputs[output.request_id] = output
        engine.scheduler.check_integrity()
    assert set(outputs) | set(cancels) == set(requests)
    for name, output in outputs.items():
        assert output.finished
        for completion, ids in zip(output.outputs, expected[name], strict=True):
            count = len(completion.token_ids) if completion.finish_reason == "abort" else None
            assert completion.token_ids == ids[:count], (name, completion.index)
    assert engine.scheduler.pool.usage.active == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_room_for_one_and_a_half_and_eight_waiting(runner, temperature):
    numbers = np.random.default_rng(5)
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=30, ignore_eos=True, frequency_penalty=0.4)
        for i in range(8)
    ]
    prompts = [numbers.integers(3, 140, 20).tolist() for _ in range(8)]
    expected = [run_alone(runner, prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
    spoil(runner)
    engine = Engine(PartOf(runner, num_pages=11), IdTokenizer())  # each comes to need 7 of the 10 pages
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params[index])
    ids = {}
    while engine.has_unfinished:
        for output in engine.step():
            new = output.outputs[0].token_ids
            assert len(new) == len(ids.get(output.request_id, ())) + 1  # nothing twice, nothing lost
            ids[output.request_id] = new
        engine.scheduler.check_integrity()
    assert [ids[str(index)] for index in range(8)] == expected
    assert engine.scheduler.counts.preemptions > 0


def test_a_long_prefix_enters_the_table_at_once(runner):
    """31 pages found in the cache and one token computed: more table entries than a prefill of that size brings."""
    prompt = np.random.default_rng(1).integers(3, 140, 249).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    expected = run_alone(runner, prompt, params)[0]
    spoil(runner)
    engine = Engine(runner, IdTokenizer())
    for cached in (0, 248):
        engine.add_request("r", prompt, params)
        while engine.has_unfinished:
            output = engine.step()
        assert output[0].num_cached_tokens == cached
        assert output[0].outputs[0].token_ids == expected


def test_a_sequence_whose_logits_are_no_numbers_ends_alone(runner):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = {"bad": list(range(3, 15)), "good": list(range(20, 40))}
    expected = run_alone(runner, prompts["good"], params)[0]
    spoil(runner)
    engine = Engine(runner, IdTokenizer())
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    while len(engine.scheduler.running) < 2:
        engine.step()
    engine.step()
    page = next(s.pages[0] for s in engine.scheduler.running if s.request.request_id == "bad")
    kv = tuple(dataclasses.replace(kv, data=kv.data.at[_values(kv, page)].set(jnp.nan)) for kv in runner.state.kv)
    runner.state = dataclasses.replace(runner.state, kv=kv)
    ends = {}
    while engine.has_unfinished:
        ends |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
        engine.scheduler.check_integrity()
    assert (ends["bad"].finish_reason, ends["bad"].stop_reason) == ("abort", "non-finite logits")
    assert (ends["good"].finish_reason, ends["good"].token_ids) == ("length", expected)


def _values(kv, page):
    """Where the values of a page are: keys and values lie apart, or values stand behind keys of the same width."""
    return (page, slice(None), 1) if kv.apart else (page, ..., slice(kv.width // 2, None))
