"""The whole engine on a real (tiny) model: whatever the schedule and the buckets, a request gets what it gets alone."""

from __future__ import annotations

import numpy as np
import pytest
from engine_tools import NARROW, WIDE, PlainTokenizer, alone, finish, poison, random_request
from sampler_oracle import log_softmax

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine, RequestRefused

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def model(golden_models):
    return golden_models["qwen2"]  # full attention, biases, and a vocabulary that is no multiple of 128


@pytest.fixture
def wide(build_runner):
    return build_runner("qwen2", **WIDE)


@pytest.fixture
def narrow(build_runner):
    return build_runner("qwen2", **NARROW)


@pytest.fixture(params=["wide", "narrow"])
def runner(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("mode", ["continuous", "static"])
def test_greedy_ids_are_those_of_hugging_face(model, runner, mode):
    poison(runner)
    engine = Engine(runner, PlainTokenizer(), mode=mode)
    for index, prompt in enumerate(model.prompts):
        engine.add_request(str(index), prompt.tolist(), GREEDY)
    outputs = finish(engine)
    for index, expected in enumerate(model.greedy):
        assert outputs[str(index)].outputs[0].token_ids == tuple(expected)
        assert outputs[str(index)].outputs[0].finish_reason == "length"
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.free_pages == runner.limits.num_pages - 1


def test_the_cache_holds_all_but_the_last_token(model, wide):
    poison(wide)
    engine = Engine(wide, PlainTokenizer())
    counts = [(len(prompt), 3 + 5 * index) for index, prompt in enumerate(model.prompts)]
    for index, (prompt, (_, new)) in enumerate(zip(model.prompts, counts, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        engine.add_request(str(index), prompt.tolist(), params)
    finish(engine)
    assert sorted(np.asarray(wide.state.lengths).tolist()) == sorted(prompt + new - 1 for prompt, new in counts)


def test_positions_are_cached_one_by_one(model, narrow):
    poison(narrow)
    engine = Engine(narrow, PlainTokenizer(), async_scheduling=False)
    prompt = model.prompts[2].tolist()  # 20 tokens, in chunks of 5
    engine.add_request("0", prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    lengths = []
    while engine.has_unfinished:
        engine.step()
        lengths.append(int(narrow.state.lengths[0]))
    assert lengths == [5, 10, 15, 20, 21, 22, 23]


class Schedule:
    """Requests that arrive, and are cancelled, at random moments."""

    def __init__(self, seed: int, vocab: int, count: int = 9) -> None:
        numbers = np.random.default_rng(seed)
        self.requests = {str(i): random_request(numbers, vocab) for i in range(count)}
        self.arrivals = {i: int(numbers.integers(0, 25)) for i in self.requests}
        cancelled = [i for i in self.requests if numbers.random() < 0.25]
        self.cancels = {i: self.arrivals[i] + int(numbers.integers(1, 40)) for i in cancelled}

    def run(self, runner, mode="continuous"):
        poison(runner)
        engine = Engine(runner, PlainTokenizer(), mode=mode)
        outputs = {}
        step = 0
        while len(outputs) < len(self.requests) or engine.has_unfinished:
            for request_id, (prompt, params) in self.requests.items():
                if self.arrivals[request_id] == step:
                    engine.add_request(request_id, prompt, params)
                    outputs[request_id] = None
                if self.cancels.get(request_id) == step:
                    outputs[request_id] = engine.abort(request_id) or outputs[request_id]
            outputs |= {output.request_id: output for output in engine.step()}
            step += 1
            engine.scheduler.check_integrity()
        assert engine.scheduler.pool.free_pages == runner.limits.num_pages - 1
        return outputs


@pytest.mark.parametrize("seed", range(5))
def test_random_schedules_give_what_each_request_gives_alone(model, wide, narrow, seed):
    schedule = Schedule(seed, model.config.vocab_size)
    expected = {i: alone(wide, *request) for i, request in schedule.requests.items()}
    for runner, mode in ((wide, "continuous"), (narrow, "continuous"), (narrow, "static")):
        outputs = schedule.run(runner, mode)
        for request_id, output in outputs.items():
            for completion, ids in zip(output.outputs, expected[request_id], strict=True):
                if completion.finish_reason == "abort":
                    assert completion.token_ids == ids[: len(completion.token_ids)]
                else:
                    # A stop string ends it in the same round, so nothing comes after.
                    assert completion.token_ids == ids
        assert len(outputs) == len(schedule.requests)


def test_n_completions(model, runner):
    prompt = model.prompts[2].tolist()
    sampled = alone(runner, prompt, SamplingParams(n=3, seed=7, max_tokens=12, temperature=1.5, ignore_eos=True))
    assert len(set(sampled)) == 3
    for index, ids in enumerate(sampled):
        one = SamplingParams(seed=7 + index, max_tokens=12, temperature=1.5, ignore_eos=True)
        assert alone(runner, prompt, one) == [ids]
    greedy = alone(runner, prompt, SamplingParams(n=3, temperature=0.0, max_tokens=12, ignore_eos=True))
    assert greedy == [tuple(model.greedy[2][:12])] * 3


def test_same_prompt_and_seed_twice_in_a_batch(model, wide):
    poison(wide)
    params = SamplingParams(seed=3, max_tokens=15, temperature=1.3, ignore_eos=True)
    prompt = model.prompts[1].tolist()
    engine = Engine(wide, PlainTokenizer())
    for request_id in ("a", "b"):
        engine.add_request(request_id, prompt, params)
    outputs = finish(engine)
    assert outputs["a"].outputs[0].token_ids == outputs["b"].outputs[0].token_ids
    assert [outputs["a"].outputs[0].token_ids] == alone(wide, prompt, params)


def test_prompt_logprobs_are_those_of_hugging_face(model, runner):
    poison(runner)
    engine = Engine(runner, PlainTokenizer())
    asked = [0, 3, 20, 5]
    for index, prompt in enumerate(model.prompts):
        params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=asked[index], logprobs=asked[index])
        engine.add_request(str(index), prompt.tolist(), params)
    outputs = finish(engine)
    for index, prompt in enumerate(model.prompts):
        expected = log_softmax(model.logits[index])
        entries = outputs[str(index)].prompt_logprobs
        assert len(entries) == len(prompt)
        assert entries[0] is None
        for position in range(1, len(prompt)):
            assert_entry(entries[position], int(prompt[position]), expected[position - 1], asked[index])
        completion = outputs[str(index)].outputs[0]
        assert_entry(completion.logprobs[0], completion.token_ids[0], expected[-1], asked[index])


def assert_entry(entry, token: int, expected: np.ndarray, count: int) -> None:
    order = np.argsort(-expected, kind="stable")[:count].tolist()
    assert set(entry) == {token, *order}
    assert next(iter(entry)) == token
    for token_id, logprob in entry.items():
        assert abs(logprob.logprob - expected[token_id]) < 2e-4
        assert logprob.rank == (expected > expected[token_id]).sum() + 1


def test_min_tokens_bans_every_end_and_each_end_stops(model, wide):
    prompt = model.prompts[1].tolist()
    for end in PlainTokenizer.eos_ids:
        push = {end: 100.0}
        params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, logit_bias=push)
        (ids,) = alone(wide, prompt, params)
        assert len(ids) == 5
        assert ids[-1] == end
        assert not set(ids[:-1]) & set(PlainTokenizer.eos_ids)


def test_prompts_that_cannot_be_served(wide):
    poison(wide)
    engine = Engine(wide, PlainTokenizer())
    for prompt, reason in (
        ([5] * 256, "The prompt has 256 tokens, but the context holds 256"),
        ([], "The prompt is empty"),
        ([157], "vocabulary has ids 0 to 156"),
        ([-1], "vocabulary has ids 0 to 156"),
    ):
        with pytest.raises(RequestRefused, match=reason):
            engine.add_request("x", prompt)
    assert not engine.has_unfinished
    engine.add_request("x", [5] * 255, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    assert len(finish(engine)["x"].outputs[0].token_ids) == 1


def test_bfloat16_engine(model, build_runner):
    limits = {"max_slots": 1, "max_prefill_rows": 1, "max_batched_tokens": 16, "num_pages": 20}
    runner = build_runner("qwen2", "bfloat16", **(WIDE | limits))
    assert str(runner.params["embedding"].dtype) == "bfloat16"
    assert str(runner.state.kv[0].data.dtype) == "float32"  # on a CPU
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    poison(runner)
    engine = Engine(runner, PlainTokenizer())
    engine.add_request("0", model.prompts[3].tolist(), params)
    output = finish(engine)["0"]
    expected = log_softmax(model.logits[3])
    found = [output.prompt_logprobs[i + 1][int(token)].logprob for i, token in enumerate(model.prompts[3][1:])]
    exact = [expected[i][token] for i, token in enumerate(model.prompts[3][1:])]
    error = np.abs(np.array(found) - exact) / model.logits[3].std()
    assert np.quantile(error, 0.5) < 0.03
    assert np.quantile(error, 0.95) < 0.12
    assert len(output.outputs[0].token_ids) == 6
