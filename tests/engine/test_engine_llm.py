"""The LLM class: prompt forms, batches, chat and streams."""

from __future__ import annotations

import pytest
from fake_runner import FakeLimits, FakeRunner, FakeTokenizer

from jaxinfer.core.observer import Observers, RoundFinished
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine, OutputKind, RequestRefused
from jaxinfer.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm():
    return LLM.from_engine(Engine(FakeRunner(), FakeTokenizer()))


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("abc", ["abc"]),
        (["abc", "ab"], ["abc", "ab"]),
        ([3, 4, 5], [None]),
        ([[3, 4, 5], [3, 4]], [None, None]),
        ({"prompt_token_ids": [3, 4, 5]}, [None]),
        ([{"prompt_token_ids": [3, 4, 5]}, {"prompt": "ab"}], [None, "ab"]),
    ],
)
def test_every_prompt_form(llm, prompts, texts):
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == texts
    assert [output.prompt_token_ids for output in outputs] == [(3, 4, 5), (3, 4)][: len(texts)]
    assert all(output.finished and len(output.outputs[0].token_ids) == 8 for output in outputs)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY) == []


def test_results_come_in_the_order_of_the_prompts_with_their_own_params(llm):
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (9, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert [output.prompt for output in outputs] == ["a", "b", "c"]


def test_number_of_params_must_match(llm):
    with pytest.raises(ValueError, match="There are 2 prompts but 1 sampling parameters"):
        llm.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize("prompts", [["abc", ""], ["abc", [99]], [[3], []]])
def test_one_bad_prompt_refuses_the_batch_and_leaves_nothing_behind(llm, prompts):
    with pytest.raises(RequestRefused):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_unfinished
    assert llm.generate("abc", GREEDY)[0].finished


def test_prompts_of_another_type_are_refused(llm):
    with pytest.raises(RequestRefused, match="not int"):
        llm.generate(7, GREEDY)


def test_chat_with_one_and_with_many_conversations(llm):
    one = [{"role": "user", "content": "abc"}]
    outputs = llm.chat(one, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [(2, 3, 4, 5)]
    many = llm.chat([one, one], GREEDY)
    assert [output.outputs for output in many] == [outputs[0].outputs] * 2
    with pytest.raises(RequestRefused, match="The conversation is empty"):
        llm.chat([], GREEDY)


def test_stream_is_cumulative(llm):
    outputs = list(llm.stream("abc", GREEDY))
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 9))
    assert [output.finished for output in outputs] == [False] * 7 + [True]
    assert outputs[-1].outputs == llm.generate("abc", GREEDY)[0].outputs


def test_stream_of_deltas_adds_up(llm):
    outputs = list(llm.stream("abc", GREEDY, OutputKind.DELTA))
    whole = llm.generate("abc", GREEDY)[0].outputs[0]
    assert "".join(output.outputs[0].text for output in outputs) == whole.text
    assert sum((output.outputs[0].token_ids for output in outputs), ()) == whole.token_ids


def test_stream_refuses_at_the_call(llm):
    with pytest.raises(RequestRefused):
        llm.stream("", GREEDY)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_a_stream_cancels_its_request(llm, taken):
    stream = llm.stream("abc", GREEDY)
    for _ in range(taken):
        next(stream)
    stream.close()
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.pool.free_pages == 32
    assert list(stream) == []


def test_leaving_a_stream_unfinished_cancels_its_request(llm):
    for _ in llm.stream("abc", GREEDY):
        break
    assert not llm.engine.has_unfinished


def test_streams_and_batches_overlap(llm):
    expected = [list(llm.stream(prompt, GREEDY))[-1].outputs for prompt in ("abc", "cba")]
    first, second = llm.stream("abc", GREEDY), llm.stream("cba", GREEDY)
    next(first)
    assert llm.generate("abc", GREEDY)[0].outputs == expected[0]
    assert list(second)[-1].outputs == expected[1]
    assert list(first)[-1].outputs == expected[0]


def test_interrupted_generate_cancels_its_requests():
    def interrupt(work):
        if len(runner.history) == 3:
            raise KeyboardInterrupt

    runner = FakeRunner(hook=interrupt)
    llm = LLM.from_engine(Engine(runner, FakeTokenizer()))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "b"] * 4, GREEDY)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.pool.free_pages == 32
    assert llm.generate("abc", GREEDY)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "told"),
    [
        (["a"], {"temperature": 0}, "not dict"),
        (["a"], [{"temperature": 0}], "not dict"),
        (["a"], 5, "not int"),
        (["a"], "greedy", "not str"),
        ({"prompt_token_ids": "abc"}, GREEDY, "prompt_token_ids must be a list"),
        ({"text": "abc", 3: 4}, GREEDY, "needs 'prompt'"),
    ],
)
def test_wrong_types_are_told_in_a_sentence(llm, prompts, params, told):
    with pytest.raises(ValueError, match=told):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished


def test_a_stream_refuses_what_are_no_params(llm):
    with pytest.raises(RequestRefused, match="not dict"):
        llm.stream("a", {"temperature": 0})


@pytest.mark.parametrize("messages", [{"role": "user", "content": "a"}, "a", None, 5])
def test_a_conversation_is_a_list(llm, messages):
    with pytest.raises(RequestRefused, match="must be a list of messages"):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize(("model", "told"), [(None, "NoneType"), (5, "int"), (b"x", "bytes"), ("", "empty")])
def test_what_names_no_model(model, told):
    with pytest.raises(ValueError, match=told):
        LLM(model)


def test_priorities_decide_who_goes_first():
    order = []

    def observe(event):
        if isinstance(event, RoundFinished):
            order.extend(row.token_ids[0] for row in event.work.prefills)

    limits = FakeLimits(max_slots=1)
    llm = LLM.from_engine(Engine(FakeRunner(limits), FakeTokenizer(), policy="priority", observer=observe))
    outputs = llm.generate([[3], [4], [5]], GREEDY, priority=[5, 0, -1])
    assert order == [5, 4, 3]
    assert [output.prompt_token_ids for output in outputs] == [(3,), (4,), (5,)]
    order.clear()
    streams = [llm.stream([token], GREEDY, priority=-token) for token in (3, 4)]
    assert all(list(stream) for stream in streams)
    assert order == [4, 3]


@pytest.mark.parametrize(
    ("priority", "told"),
    [("high", "not str"), (None, "not NoneType"), ([1], "2 prompts but 1 priorities"), ([1, 2.5], "not 2.5")],
)
def test_what_is_no_priority(llm, priority, told):
    with pytest.raises(ValueError, match=told):
        llm.generate(["a", "b"], GREEDY, priority=priority)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("tools", "told"),
    [(5, "not int"), ("search", "not str"), ({"name": "search"}, "not dict"), (["search"], "not str")],
)
def test_what_are_no_tools(llm, tools, told):
    with pytest.raises(RequestRefused, match=told):
        llm.chat([{"role": "user", "content": "abc"}], GREEDY, tools=tools)


@pytest.fixture
def build_calls(monkeypatch):
    """What LLM asks of build_engine."""
    from jaxinfer.engine import build

    calls = []

    def build_engine(model, options, on_progress, observer):
        calls.append((on_progress, observer))
        if on_progress is not None:
            on_progress("Compiling programs", 3, 7)
        return Engine(FakeRunner(), FakeTokenizer(), observer=observer)

    monkeypatch.setattr(build, "build_engine", build_engine)
    return calls


def test_progress_is_drawn_on_a_terminal_only(build_calls, monkeypatch, capsys):
    LLM("tiny")
    assert build_calls[-1][0] is None  # standard error is no terminal here
    monkeypatch.setenv("FORCE_COLOR", "1")
    LLM("tiny")
    shown = capsys.readouterr()
    assert "Compiling programs" in shown.err
    assert shown.out == ""
    LLM("tiny", show_progress=False)
    assert build_calls[-1][0] is None
    assert capsys.readouterr().err == ""


def test_observers_are_told(build_calls):
    first, second, third = [], [], []
    observers = Observers(first.append, second.append)
    llm = LLM("tiny", observer=observers)
    llm.generate("abc", GREEDY)
    observers.add(third.append)
    llm.generate("abc", GREEDY)
    assert first == second
    assert first[-len(third) :] == third
    assert 0 < len(third) < len(first)


def test_what_is_no_observer():
    with pytest.raises(ValueError, match="give several as"):
        LLM("smollm2-135m-instruct", observer=[print])


class SteppingClock:
    """A second passes whenever somebody looks."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def test_a_timeout_ends_each_prompt_with_what_it_has():
    llm = LLM.from_engine(Engine(FakeRunner(), FakeTokenizer(), clock=SteppingClock()))
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    ends = [*llm.generate(["abc", "ab"], params, timeout_s=40), *llm.stream("abcd", params, timeout_s=40)]
    ends += llm.chat([{"role": "user", "content": "abc"}], params, timeout_s=40)
    for output in (ends[0], ends[1], ends[-2], ends[-1]):
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("abort", "deadline")
        assert 0 < len(output.outputs[0].token_ids) < 50
    (done,) = llm.generate("abc", GREEDY, timeout_s=10_000)
    assert done.outputs[0].finish_reason == "length"
