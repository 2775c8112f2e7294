"""A thousand random schedules on tiny real models: every request gets, token by token, what it gets alone.

What each request gives alone is computed once, without any cache; a schedule then draws some of them, with arrivals,
cancels, priorities, a small pool, host memory and conversations that go on behind an answer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_runner import FakeTokenizer

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.models import DecoderConfig, RopeConfig, init_params
from jaxinfer.runtime.limits import Buckets, RunnerLimits
from jaxinfer.runtime.runner import Runner

VOCAB, PAGE, CONTEXT, PAGES, HOST_PAGES = 61, 8, 88, 33, 24
WINDOW = 13
SCHEDULES_PER_BLOCK = 50


class Ids(FakeTokenizer):
    eos_ids = (2,)

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(0x100 + i) for i in ids)


@dataclasses.dataclass(frozen=True)
class Case:
    """A request and what each of its completions gives alone."""

    prompt: list[int]
    params: SamplingParams
    expected: list[tuple[int, ...]]


def build_runner(window: int | None) -> Runner:
    config = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=16,
        max_positions=CONTEXT,
        norm_eps=1e-5,
        ropes=(RopeConfig(1e4, 8),),
        windows=(window,),
        tied_head=True,
    )
    params = jax.tree.map(lambda leaf: leaf * 12, init_params(config, jax.random.key(3)))
    limits = RunnerLimits(4, PAGE, PAGES, CONTEXT, 32, 3, VOCAB, window=window, host_pages=HOST_PAGES)
    # Few programs, to be built fast; small prefills take decodes along.
    buckets = Buckets((1, 4), ((8, 1), (32, 3)), mixed_rows=3, least_mixed=2, most_mixed=8)
    return Runner(config, params, limits, buckets=buckets)


def spoil(runner: Any) -> None:
    """An empty cache in which every position is NaN."""
    runner.reset()
    kv = tuple(dataclasses.replace(pages, data=jnp.full_like(pages.data, jnp.nan)) for pages in runner.state.kv)
    runner.state = dataclasses.replace(runner.state, kv=kv)


class PartOf:
    """A compiled runner with other limits: some of its pages, slots, budget and host memory."""

    def __init__(self, runner: Runner, **fewer: int) -> None:
        self.limits = dataclasses.replace(runner.limits, **fewer)
        self.dispatch, self.recover = runner.dispatch, runner.recover


def random_params(numbers: np.random.Generator, most_tokens: int) -> SamplingParams:
    return SamplingParams(
        n=int(numbers.choice([1, 1, 1, 2, 3])),
        temperature=float(numbers.choice([0.0, 0.0, 0.8, 1.3])),
        top_k=int(numbers.choice([0, 20])),
        repetition_penalty=float(numbers.choice([1.0, 1.0, 1.2])),
        frequency_penalty=float(numbers.choice([0.0, 0.0, 0.3])),
        seed=int(numbers.integers(2**32)),
        ignore_eos=bool(numbers.random() < 0.8),
        max_tokens=int(numbers.choice([1, 2, *range(most_tokens // 2, most_tokens)])),
        prompt_logprobs=1 if numbers.random() < 0.05 else None,
    )


def case(runner: Runner, prompt: list[int], params: SamplingParams) -> Case:
    """The request computed alone: nothing cached, room for everything, no round ahead."""
    spoil(runner)
    options = {"enable_prefix_caching": False, "reserve_full": True, "async_scheduling": False}
    engine = Engine(PartOf(runner, window=None, host_pages=0), Ids(), **options)
    engine.add_request("alone", prompt, params)
    while engine.has_unfinished:
        outputs = engine.step()
    return Case(prompt, params, [completion.token_ids for completion in outputs[0].outputs])


def catalogue(runner: Runner, count: int) -> list[tuple[Case, Case]]:
    """Requests, many of which begin alike, each with a second turn that begins with its answer."""
    numbers = np.random.default_rng(11)
    shared = [numbers.integers(3, VOCAB, 30).tolist() for _ in range(3)]
    turns = []
    for _ in range(count):
        begin = shared[int(numbers.integers(3))][: int(numbers.integers(31))] if numbers.random() < 0.7 else []
        prompt = begin + numbers.integers(3, VOCAB, numbers.integers(1, 10)).tolist()
        first = case(runner, prompt, random_params(numbers, 31))
        answer = list(first.expected[-1])
        again = numbers.integers(3, VOCAB, numbers.integers(1, 6)).tolist()
        turns.append((first, case(runner, prompt + answer + again, random_params(numbers, 12))))
    return turns


@pytest.fixture(scope="module", params=["full attention", "window"])
def model(request):
    runner = build_runner(None if request.param == "full attention" else WINDOW)
    return runner, catalogue(runner, 50)


def random_engine(runner: Runner, numbers: np.random.Generator) -> Engine:
    slots = int(numbers.choice([1, 2, 3, 4, 4]))
    pages = [12, 12, 12, 13, 16] if runner.limits.window is None else [4, 5, 5, 6, 8]  # the least hold any request
    part = PartOf(
        runner,
        max_slots=slots,
        num_pages=int(numbers.choice([*pages, PAGES])),
        max_batched_tokens=int(numbers.integers(max(slots, 4), 33)),
        max_prefill_rows=int(numbers.integers(1, 4)),
        host_pages=int(numbers.choice([0, 2, 6, HOST_PAGES])),
    )
    return Engine(
        part,
        Ids(),
        mode="static" if numbers.random() < 0.15 else "continuous",
        policy="priority" if numbers.random() < 0.5 else "fcfs",
        enable_prefix_caching=bool(numbers.random() < 0.9),
        enable_chunked_prefill=bool(numbers.random() < 0.9) or part.limits.max_batched_tokens < 32,
        reserve_full=bool(numbers.random() < 0.1),
        async_scheduling=bool(numbers.random() < 0.6),
    )


class Schedule:
    """Some requests of the catalogue, when they come and when they are cancelled."""

    def __init__(self, turns: list[tuple[Case, Case]], numbers: np.random.Generator, engine: Engine) -> None:
        chosen = numbers.choice(len(turns), int(numbers.integers(5, 10)))
        self.engine = engine
        self.cases = {str(number): turns[index][0] for number, index in enumerate(chosen)}
        self.next_turns = {str(number): turns[index][1] for number, index in enumerate(chosen)}
        if not engine.scheduler.config.enable_chunked_prefill:  # longer prompts would be refused
            self.cases = {name: one for name, one in self.cases.items() if len(one.prompt) <= 32}
            self.next_turns = {name: one for name, one in self.next_turns.items() if len(one.prompt) <= 32}
        spread = int(numbers.choice([1, 1, 6, 25]))
        self.arrivals = {name: int(numbers.integers(spread)) for name in self.cases}
        self.cancels = {name: int(numbers.integers(1, 40)) for name in self.cases if numbers.random() < 0.15}
        self.resumed = {name for name in self.cases if name in self.next_turns and numbers.random() < 0.5}
        self.numbers = numbers
        self.outputs: dict[str, Any] = {}

    def run(self) -> None:
        step = 0
        while step <= 25 or self.engine.has_unfinished:
            for name in [name for name, arrival in self.arrivals.items() if arrival == step]:
                self._add(name, self.cases[name])
            for name in [name for name, due in self.cancels.items() if due == step]:
                self._take(self.engine.abort(name))
            for output in self.engine.step():
                self._take(output)
                name = output.request_id
                if output.finished and name in self.resumed:
                    self._add(f"{name}+", self.next_turns[name])
            self.engine.scheduler.check_integrity()
            step += 1
            assert step < 3000, "the engine does not come to an end"

    def _add(self, name: str, added: Case) -> None:
        priority = int(self.numbers.integers(-1, 2)) if self.engine.scheduler.config.policy == "priority" else 0
        self.engine.add_request(name, added.prompt, added.params, priority=priority)
        self.cases[name] = added

    def _take(self, output: Any) -> None:
        if output is None:
            return
        if output.request_id in self.outputs:
            before = {completion.index: completion.token_ids for completion in self.outputs[output.request_id].outputs}
            for completion in output.outputs:
                assert completion.token_ids[: len(before[completion.index])] == before[completion.index]
        self.outputs[output.request_id] = output

    def check(self) -> None:
        """Every request ended, with what it gives alone, and every page is back."""
        added = set(self.arrivals) | {name for name in self.cases if name.endswith("+")}
        cancelled_before = {name for name, due in self.cancels.items() if due < self.arrivals[name]}
        assert set(self.outputs) | set(self.cancels) - cancelled_before == added
        for name, output in self.outputs.items():
            assert output.finished
            for completion, ids in zip(output.outputs, self.cases[name].expected, strict=True):
                assert (completion.finish_reason == "abort") <= (name in self.cancels)
                count = len(completion.token_ids) if completion.finish_reason == "abort" else None
                assert completion.token_ids == ids[:count], (name, completion.index)
        scheduler = self.engine.scheduler
        assert scheduler.pool.usage.active == scheduler.reserved_pages == 0
        assert scheduler.counts.preemptions == 0 or not scheduler.config.reserve_full


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 500 // SCHEDULES_PER_BLOCK))]
)
def test_a_thousand_random_schedules_give_what_each_request_gives_alone(model, block):
    runner, turns = model
    happened: Counter[str] = Counter()
    for seed in range(block * SCHEDULES_PER_BLOCK, (block + 1) * SCHEDULES_PER_BLOCK):
        numbers = np.random.default_rng(seed)
        spoil(runner)
        schedule = Schedule(turns, numbers, random_engine(runner, numbers))
        schedule.run()
        schedule.check()
        counts = schedule.engine.scheduler.counts
        happened.update({field.name: getattr(counts, field.name) for field in dataclasses.fields(counts)})
    # Each mechanism was at work, or the test says little.
    assert all(happened[name] >= SCHEDULES_PER_BLOCK for name in ("page_copies", "pages_out", "prefix_hits")), happened
    assert min(happened["preemptions"], happened["pages_in"]) >= 4, happened
