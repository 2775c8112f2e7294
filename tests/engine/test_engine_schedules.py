"""Random schedules: every request gets what it would get alone, and nothing is lost on the way."""

from __future__ import annotations

import pytest
from fake_runner import VOCAB_SIZE, FakeLimits, FakeRunner, FakeTokenizer, alone
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine, OutputKind, RequestRefused

SHARED = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
PROMPTS = st.one_of(
    st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=30),
    st.builds(
        lambda length, suffix: SHARED[:length] + suffix,
        st.integers(1, len(SHARED)),
        st.lists(st.integers(2, VOCAB_SIZE - 1), max_size=4),
    ),
)


@st.composite
def sampling_params(draw):
    max_tokens = draw(st.integers(1, 20))
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        seed=draw(st.integers(0, 2**33)),
        stop=draw(st.one_of(st.just([]), st.lists(st.sampled_from(["a", "ab", "bca", " c", "d a", "cc"]), max_size=2))),
        stop_token_ids=draw(st.one_of(st.just([]), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2))),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(4, max_tokens))),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
    )


@st.composite
def limits(draw):
    slots = draw(st.integers(1, 4))
    return FakeLimits(
        max_slots=slots,
        page_size=draw(st.sampled_from([1, 2, 4, 5])),
        num_pages=draw(st.one_of(st.integers(6, 12), st.integers(6, 40))),
        max_context=draw(st.integers(12, 40)),
        max_batched_tokens=draw(st.integers(slots, 24)),
        max_prefill_rows=draw(st.integers(1, 4)),
        window=draw(st.sampled_from([None, None, 1, 3, 4, 9])),
        host_pages=draw(st.sampled_from([0, 1, 5, 50])),
    )


@st.composite
def schedulings(draw):
    """How an engine may schedule."""
    return {
        "mode": draw(st.sampled_from(["continuous", "continuous", "static"])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "enable_chunked_prefill": draw(st.booleans()),
        "reserve_full": draw(st.sampled_from([False, False, True])),
        "async_scheduling": draw(st.booleans()),
    }


def assert_writes_are_private(scheduler, work):
    """Whatever a round writes to belongs to one sequence, and nobody can find it yet."""
    sequences = {sequence.slot: sequence for sequence in scheduler.running}
    spans = [(slot, sequences[slot].num_cached - 1, 1) for slot in work.decodes]
    spans += [(row.slot, row.start, len(row.token_ids)) for row in work.prefills]
    for slot, start, count in spans:
        size = scheduler.config.page_size
        for column in range(start // size, (start + count - 1) // size + 1):
            page = sequences[slot].pages[column]
            assert scheduler.pool.reference_count(page) == 1
            assert scheduler.pool.name_of(page) is None
            assert column * size + len(scheduler.pool.run_of(page)) <= max(start, column * size)


def fits(bounds, scheduling, prompt, params):
    """Whether a request can be served at all."""
    room = bounds.max_context - len(prompt)
    pages = -(-(len(prompt) + min(room, params.max_tokens) - 1) // bounds.page_size)
    if bounds.window is not None:
        pages = min(pages, max(1, (bounds.window - 2) // bounds.page_size + 2))
    whole = scheduling["enable_chunked_prefill"] or len(prompt) <= bounds.max_batched_tokens
    return room > 0 and pages < bounds.num_pages and whole


def assert_as_alone(output, prompt, params, max_context, window=None):
    for completion in output.outputs:
        seed = (params.seed + completion.index) % 2**32
        expected = alone(prompt, params, seed, max_context, window)
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text
        assert completion.finish_reason == expected.finish_reason
        assert completion.stop_reason == expected.stop_reason


class Streams:
    """Adds up what the engine delivers and checks that nothing is taken back or sent twice."""

    def __init__(self):
        self.text: dict[tuple[str, int], str] = {}
        self.ids: dict[tuple[str, int], tuple[int, ...]] = {}
        self.final = {}

    def take(self, output, kind):
        assert output.request_id not in self.final
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            if kind is OutputKind.DELTA:
                self.text[key] = self.text.get(key, "") + completion.text
                self.ids[key] = self.ids.get(key, ()) + completion.token_ids
            else:
                assert completion.text.startswith(self.text.get(key, ""))
                assert completion.token_ids[: len(self.ids.get(key, ()))] == self.ids.get(key, ())
                self.text[key], self.ids[key] = completion.text, completion.token_ids
        if output.finished:
            self.final[output.request_id] = output


@settings(max_examples=300, deadline=None)
@given(st.data(), limits(), schedulings())
def test_random_schedules_give_what_each_request_gives_alone(data, bounds, scheduling):
    requests = data.draw(st.lists(st.tuples(PROMPTS, sampling_params()), min_size=2, max_size=7))
    kinds = data.draw(st.lists(st.sampled_from(OutputKind), min_size=len(requests), max_size=len(requests)))
    arrivals = data.draw(st.lists(st.integers(0, 12), min_size=len(requests), max_size=len(requests)))
    cancels = data.draw(st.dictionaries(st.integers(0, len(requests) - 1), st.integers(0, 20), max_size=2))
    priorities = [0] * len(requests)
    if scheduling["policy"] == "priority":
        priorities = data.draw(st.lists(st.integers(-1, 1), min_size=len(requests), max_size=len(requests)))
    salts = data.draw(st.lists(st.sampled_from(["", "", "x"]), min_size=len(requests), max_size=len(requests)))
    suffixes = st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=5)
    resumes = data.draw(st.dictionaries(st.integers(0, len(requests) - 1), suffixes, max_size=3))
    inside = data.draw(st.booleans())  # cancel between schedule and commit
    round_number = 0
    cancelled = set()
    engine: Engine

    def cancel_due(work=None):
        for index, due in cancels.items():
            if due == round_number and index not in cancelled and (work is None) is not inside:
                output = engine.abort(str(index))
                if output is not None:
                    cancelled.add(index)
                    streams.take(output, kinds[index])

    def watch(work):
        assert_writes_are_private(engine.scheduler, work)
        cancel_due(work)

    streams = Streams()
    runner = FakeRunner(bounds, watch)
    engine = Engine(runner, FakeTokenizer(), **scheduling)
    refused = set()
    resumed = {}
    while round_number <= 12 or engine.has_unfinished:
        for index, (prompt, params) in enumerate(requests):
            if arrivals[index] == round_number:
                try:
                    engine.add_request(
                        str(index),
                        prompt,
                        params,
                        output_kind=kinds[index],
                        priority=priorities[index],
                        cache_salt=salts[index],
                    )
                except RequestRefused:
                    refused.add(index)
        cancel_due()
        for output in engine.step():
            turn = output.request_id
            streams.take(output, OutputKind.CUMULATIVE if turn in resumed else kinds[int(turn)])
            if output.finished and turn not in resumed and int(turn) in resumes:  # the conversation goes on
                prompt, params = requests[int(turn)]
                prompt = [*prompt, *streams.ids[turn, 0], *resumes[int(turn)]]
                if fits(bounds, scheduling, prompt, params):
                    resumed[f"{turn}+"] = prompt, params
                    engine.add_request(f"{turn}+", prompt, params, cache_salt=salts[int(turn)])
        engine.scheduler.check_integrity()
        round_number += 1
        assert round_number < 2000, "the engine does not come to an end"

    for index, (prompt, params) in enumerate(requests):
        assert (index in refused) is not fits(bounds, scheduling, prompt, params)
        if index in refused or index in cancelled:
            continue
        output = streams.final[str(index)]
        if kinds[index] is not OutputKind.DELTA:
            assert len(output.outputs) == params.n
            assert_as_alone(output, prompt, params, bounds.max_context, bounds.window)
        for number in range(params.n):
            expected = alone(prompt, params, (params.seed + number) % 2**32, bounds.max_context, bounds.window)
            assert streams.ids[str(index), number] == expected.token_ids
            assert streams.text[str(index), number] == expected.text
    for name, (prompt, params) in resumed.items():
        assert_as_alone(streams.final[name], prompt, params, bounds.max_context, bounds.window)
    for index in cancelled:
        output = streams.final[str(index)]
        assert output.finished
        assert all(completion.finish_reason for completion in output.outputs)
    assert engine.scheduler.pool.free_pages == bounds.num_pages - 1
    assert engine.scheduler.reserved_pages == 0
    assert engine.scheduler.counts.preemptions == 0 or not scheduling["reserve_full"]


def run_all(engine):
    final = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                final[output.request_id] = output
        engine.scheduler.check_integrity()
    return final


def test_cache_holds_prompt_and_all_sampled_tokens_but_the_last():
    runner = FakeRunner()
    engine = Engine(runner, FakeTokenizer())
    for length, count in ((5, 1), (8, 4), (3, 9)):
        engine.add_request(str(length), range(3, 3 + length), SamplingParams(max_tokens=count, ignore_eos=True))
    run_all(engine)
    assert {len(prompt): cached for prompt, cached in runner.max_cached.items()} == {5: 5, 8: 11, 3: 11}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("waiting", [4, 8])
def test_tight_pool_gives_the_same_ids_as_a_large_one(waiting, temperature):
    """Room for one request and a half: the others still get what they get with plenty of room."""
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=temperature, seed=3)
    prompts = [[3 + i, 4, 5, 6, 7, 8, 9, 10] for i in range(waiting)]
    results = []
    for pages in (7, 60):
        engine = Engine(FakeRunner(FakeLimits(num_pages=pages)), FakeTokenizer())
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params)
        results.append({key: output.outputs for key, output in run_all(engine).items()})
        assert (engine.scheduler.counts.preemptions > 0) is (pages == 7)
    assert results[0] == results[1]
    assert len(results[0]) == waiting


def test_eight_equal_prompts_and_shared_prefixes_equal_each_alone():
    prefix = [3 + i % 12 for i in range(32)]
    prompts = [[3, 4, 5, 6, 7, 8, 9, 10]] * 8 + [[*prefix, *suffix] for suffix in ([5], [6, 7], [8, 9, 10])]
    params = SamplingParams(max_tokens=6, temperature=0, seed=0)
    engine = Engine(FakeRunner(FakeLimits(max_slots=8, num_pages=60, max_batched_tokens=64)), FakeTokenizer())
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    for index, output in run_all(engine).items():
        assert_as_alone(output, prompts[int(index)], params, 64)


def test_same_seed_gives_the_same_alone_and_in_a_batch():
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    engine = Engine(FakeRunner(), FakeTokenizer())
    for name in "abc":
        engine.add_request(name, "abcd", params)
    together = {output.outputs for output in run_all(engine).values()}
    engine.add_request("alone", "abcd", params)
    assert together == {run_all(engine)["alone"].outputs}


@pytest.mark.parametrize(("temperature", "distinct"), [(0, 1), (1, 3)])
def test_three_completions_are_equal_only_when_greedy(temperature, distinct):
    engine = Engine(FakeRunner(), FakeTokenizer(), seed=1)
    engine.add_request("r", "abc", SamplingParams(n=3, temperature=temperature, ignore_eos=True))
    outputs = run_all(engine)["r"].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({output.token_ids for output in outputs}) == distinct


def test_requests_without_a_seed_differ_and_the_engine_seed_repeats_them():
    def sample(seed):
        engine = Engine(FakeRunner(), FakeTokenizer(), seed=seed)
        for name in "ab":
            engine.add_request(name, "abc", SamplingParams(ignore_eos=True))
        final = run_all(engine)
        return final["a"].outputs[0].token_ids, final["b"].outputs[0].token_ids

    assert sample(1) == sample(1)
    assert sample(1)[0] != sample(1)[1]
    assert sample(None) != sample(None)


def test_static_wave_admits_nothing_while_one_of_it_runs():
    engine = Engine(FakeRunner(FakeLimits(max_slots=2)), FakeTokenizer(), mode="static")
    for name, count in (("short", 2), ("long", 8), ("next", 2)):
        engine.add_request(name, "abcd", SamplingParams(max_tokens=count, ignore_eos=True))
    order = [output.request_id for _ in range(10) for output in engine.step() if output.finished]
    assert order == ["short", "long", "next"]
    setups = [len(work.slot_setups) for work in engine.runner.history]
    assert setups == [2, 0, 0, 0, 0, 0, 0, 0, 1, 0]


def test_static_wave_is_whole_even_when_its_prefill_takes_rounds():
    engine = Engine(FakeRunner(FakeLimits(max_slots=3, max_batched_tokens=5)), FakeTokenizer(), mode="static")
    for name in "abc":
        engine.add_request(name, [3, 4, 5, 6], SamplingParams(max_tokens=2, ignore_eos=True))
    run_all(engine)
    assert [len(work.slot_setups) for work in engine.runner.history if work.slot_setups] == [3]


def test_long_prompt_is_prefilled_in_pieces_while_others_decode():
    limits = FakeLimits(max_slots=2, max_batched_tokens=8)
    runner = FakeRunner(limits)
    engine = Engine(runner, FakeTokenizer())
    running = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0, seed=0)
    engine.add_request("running", [9, 4], running)
    engine.step()
    prompt = [3 + i % 10 for i in range(20)]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, seed=0)
    engine.add_request("long", prompt, params)
    final = run_all(engine)
    pieces = [(row.start, len(row.token_ids), row.sample) for work in runner.history[1:] for row in work.prefills]
    assert pieces == [(0, 7, False), (7, 7, False), (14, 6, True)]
    assert all(work.decodes for work in runner.history[1:4])
    assert_as_alone(final["long"], prompt, params, limits.max_context)
    assert_as_alone(final["running"], [9, 4], running, limits.max_context)
