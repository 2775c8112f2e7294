"""One request at a time: refusals, cancelling, stopping, log probabilities and timing."""

from __future__ import annotations

import math

import pytest
from fake_runner import EOS_IDS, VOCAB_SIZE, Done, FakeLimits, FakeRunner, FakeTokenizer, log_softmax, logits

from jaxinfer.core.observer import RoundFinished
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.step import SampledToken, StepResult
from jaxinfer.core.timeline import TimelineRecorder
from jaxinfer.engine import Engine, OutputKind, RequestRefused


class ScriptedRunner:
    """Says the given tokens, whatever it is asked."""

    def __init__(self, tokens, limits=None, seconds=None):
        self.limits = limits or FakeLimits()
        self.tokens = tokens
        self._said = dict.fromkeys(range(self.limits.max_slots), 0)

    def dispatch(self, work):
        for setup in work.slot_setups:
            self._said[setup.slot] = 0
        sampled = {}
        for slot in (*work.decodes, *(row.slot for row in work.prefills if row.sample)):
            said = self._said[slot]
            sampled[slot] = SampledToken(self.tokens[said] if said < len(self.tokens) else 3)
            self._said[slot] += 1
        return Done(StepResult(sampled))


class WordTokenizer(FakeTokenizer):
    """Ids 0 .. are special, then the given pieces."""

    def __init__(self, *pieces):
        self.pieces = ["<eos>", "<end>", "<bos>", *pieces]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.pieces[i] for i in ids if not (skip_special_tokens and i in self.special_ids))


def finish(engine):
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def say(pieces, params, *, ids=None):
    """The final completion, and the deltas, when the model says these pieces one by one."""
    tokenizer = WordTokenizer(*pieces)
    engine = Engine(ScriptedRunner(ids or list(range(3, 3 + len(pieces)))), tokenizer)
    engine.add_request("r", [3], params)
    final = finish(engine)[-1].outputs[0]
    engine.add_request("r", [3], params, output_kind=OutputKind.DELTA)
    return final, [completion.text for output in finish(engine) for completion in output.outputs]


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "The prompt is empty; give some text."),
        ([], "The prompt is empty; give at least one token."),
        ("123", "The prompt '123' gives no tokens; give some other text."),
        ([3, VOCAB_SIZE], f"The prompt has token id {VOCAB_SIZE}, but the vocabulary has ids 0 to {VOCAB_SIZE - 1}."),
        ([-1], f"The prompt has token id -1, but the vocabulary has ids 0 to {VOCAB_SIZE - 1}."),
        ([3, "a"], "A prompt's token ids must be integers, not 'a'."),
        (7, "A prompt must be text or a list of token ids, not int."),
        ({"text": "a"}, "A prompt given as a dict needs 'prompt' or 'prompt_token_ids', not 'text'."),
        (
            [3] * 64,
            "The prompt has 64 tokens, but the context holds 64 including at least one new token; shorten the prompt.",
        ),
    ],
)
def test_bad_prompts_are_refused_in_one_sentence_and_leave_the_engine_unharmed(prompt, sentence):
    engine = Engine(FakeRunner(), FakeTokenizer())
    with pytest.raises(RequestRefused) as refusal:
        engine.add_request("bad", prompt)
    assert str(refusal.value) == sentence
    assert not engine.has_unfinished
    engine.add_request("bad", "abc")
    assert finish(engine)[-1].finished


@pytest.mark.parametrize("params", [SamplingParams(stop_token_ids=[99]), SamplingParams(logit_bias={99: 1.0})])
def test_parameters_with_ids_outside_the_vocabulary_are_refused(params):
    with pytest.raises(ValueError, match=r"has token id 99, but the vocabulary has ids 0 to 19\.$"):
        Engine(FakeRunner(), FakeTokenizer()).add_request("r", "a", params)


def test_request_larger_than_the_pool_is_refused_at_once_and_the_next_is_served():
    limits = FakeLimits(num_pages=17, max_context=256, max_batched_tokens=128)  # 64 positions
    engine = Engine(FakeRunner(limits), FakeTokenizer())
    with pytest.raises(RequestRefused) as refusal:
        engine.add_request("big", [3] * 100, SamplingParams(max_tokens=10))
    assert str(refusal.value) == (
        "The request needs 109 cache positions (100 prompt tokens and up to 10 new ones), but the whole cache has 64;"
        " lower max_tokens, shorten the prompt or enlarge the cache."
    )
    engine.add_request("next", [3] * 60, SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(finish(engine)[-1].outputs[0].token_ids) == 5


def test_max_tokens_is_capped_at_the_context():
    engine = Engine(FakeRunner(FakeLimits(max_context=10)), FakeTokenizer())
    engine.add_request("r", [3] * 6, SamplingParams(max_tokens=100, ignore_eos=True))
    completion = finish(engine)[-1].outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (4, "length")


def test_max_tokens_none_takes_what_the_pool_holds():
    engine = Engine(FakeRunner(FakeLimits(num_pages=4)), FakeTokenizer())
    engine.add_request("r", [3] * 6, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(finish(engine)[-1].outputs[0].token_ids) == 7  # 12 positions hold 6 + 7 - 1


def test_request_id_in_use_is_refused_and_the_first_goes_on():
    engine = Engine(FakeRunner(), FakeTokenizer())
    engine.add_request("r", "abc")
    with pytest.raises(RequestRefused, match="'r' is still being served"):
        engine.add_request("r", "abc")
    assert finish(engine)[-1].finished


# Stopping


@pytest.mark.parametrize("eos", EOS_IDS)
def test_every_eos_id_stops_and_its_text_is_left_out(eos):
    params = SamplingParams(skip_special_tokens=False)
    final, _ = say(["ab", "c"], params, ids=[3, 4, eos])
    assert (final.text, final.token_ids) == ("abc", (3, 4, eos))
    assert (final.finish_reason, final.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on():
    final, _ = say(["ab", "c"], SamplingParams(max_tokens=3, ignore_eos=True), ids=[3, 0, 4])
    assert (final.text, final.finish_reason) == ("abc", "length")


def test_stop_id_stops_with_its_id_as_reason_and_its_text_only_on_request():
    final, _ = say(["ab", "c"], SamplingParams(stop_token_ids=[4]), ids=[3, 4])
    assert (final.text, final.finish_reason, final.stop_reason) == ("ab", "stop", 4)
    final, _ = say(["ab", "c"], SamplingParams(stop_token_ids=[4], include_stop_str_in_output=True), ids=[3, 4])
    assert final.text == "abc"


def test_min_tokens_bans_every_eos_and_stop_id():
    engine = Engine(FakeRunner(), FakeTokenizer())
    for number in range(20):
        params = SamplingParams(min_tokens=12, max_tokens=12, stop_token_ids=[5, 6], seed=number)
        engine.add_request(str(number), "abcd", params)
    outputs = [output.outputs[0] for output in finish(engine) if output.finished]
    assert len(outputs) == 20
    assert not {0, 1, 5, 6} & {token for output in outputs for token in output.token_ids}
    assert {len(output.token_ids) for output in outputs} == {12}


def test_stop_string_over_token_borders_ends_the_text_where_it_begins():
    pieces = ["The", " quick", " brown", " o", "wn", " fo", "x", " jumps"]
    final, deltas = say(pieces, SamplingParams(stop=" own fox"))
    assert (final.text, final.finish_reason, final.stop_reason) == ("The quick brown", "stop", " own fox")
    assert "".join(deltas) == final.text
    assert deltas[:3] == ["The", " quick", " brown"]  # nothing is held back that cannot become the stop string
    assert final.token_ids == tuple(range(3, 10))


def test_stop_string_is_included_on_request_and_what_follows_it_is_not():
    final, deltas = say(["one", " tw", "o three"], SamplingParams(stop=["two"], include_stop_str_in_output=True))
    assert final.text == "one two"
    assert "".join(deltas) == final.text


def test_text_held_back_for_a_stop_string_is_delivered_at_the_end():
    final, deltas = say(["ple", "as"], SamplingParams(stop=["assistant"]), ids=[3, 4, 0])
    assert (final.text, final.finish_reason, final.stop_reason) == ("pleas", "stop", None)
    assert deltas == ["ple", "", "as"]


@pytest.mark.parametrize("ids", [[3, 4], [3, 4, 0]])
def test_character_left_unfinished_is_shown_at_the_end(ids):
    final, deltas = say(["a", "\N{REPLACEMENT CHARACTER}"], SamplingParams(max_tokens=len(ids)), ids=ids)
    assert final.text == "a\N{REPLACEMENT CHARACTER}"
    assert deltas[:-1] == ["a", ""][: len(ids) - 1]


def test_stop_string_in_the_last_token_outranks_length():
    final, _ = say(["ab", "cd"], SamplingParams(stop=["cd"], max_tokens=2))
    assert (final.text, final.finish_reason, final.stop_reason) == ("ab", "stop", "cd")


# Cancelling


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4])
def test_abort_while_waiting_mid_prefill_and_running(rounds):
    engine = Engine(FakeRunner(FakeLimits(max_batched_tokens=4)), FakeTokenizer())
    engine.add_request("r", [3] * 9, SamplingParams(ignore_eos=True))
    for _ in range(rounds):
        engine.step()
    output = engine.abort("r")
    assert output is not None
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == max(0, rounds - 2)
    assert not engine.has_unfinished
    assert engine.scheduler.pool.free_pages == 32
    assert engine.abort("r") is None
    engine.scheduler.check_integrity()


def test_abort_delivers_text_held_back_for_a_stop_string():
    engine = Engine(ScriptedRunner([3, 4, 4]), WordTokenizer("ple", "as"))
    engine.add_request("r", [3], SamplingParams(stop=["assistant"]))
    assert [engine.step()[0].outputs[0].text for _ in range(2)] == ["ple", "ple"]
    assert engine.abort("r").outputs[0].text == "pleas"


def test_failed_round_ends_its_requests_and_the_waiting_go_on():
    def fail_once(work):
        if len(runner.history) == 3:
            raise OSError("the device is gone")

    runner = FakeRunner(FakeLimits(max_slots=1), fail_once)
    engine = Engine(runner, FakeTokenizer())
    for name in ("running", "waiting"):
        engine.add_request(name, "abcd", SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    with pytest.raises(OSError, match="the device is gone"):
        engine.step()
    engine.scheduler.check_integrity()
    ends = {output.request_id: output.outputs[0] for output in finish(engine) if output.finished}
    assert ends["running"].finish_reason == "abort"
    assert len(ends["running"].token_ids) == 1
    assert ends["waiting"].finish_reason == "length"


# Log probabilities


def test_logprobs_hold_the_sampled_token_its_rank_and_the_best():
    engine = Engine(FakeRunner(), FakeTokenizer())
    prompt = [3, 4, 5]
    engine.add_request("r", prompt, SamplingParams(logprobs=3, temperature=3.0, seed=1, ignore_eos=True))
    completion = finish(engine)[-1].outputs[0]
    assert len(completion.logprobs) == 16
    ranks = []
    for step, entries in enumerate(completion.logprobs):
        values = log_softmax(logits([*prompt, *completion.token_ids[:step]]))
        order = sorted(range(VOCAB_SIZE), key=lambda i: -values[i])
        sampled = completion.token_ids[step]
        assert next(iter(entries)) == sampled
        assert set(entries) == {sampled, *order[:3]}
        for token, entry in entries.items():
            assert entry.rank == order.index(token) + 1
            assert entry.logprob == pytest.approx(values[token])
            assert entry.decoded_token == FakeTokenizer().decode([token], False)
        ranks.append(entries[sampled].rank)
    assert max(ranks) > 3  # the sampled token is reported also when it is not among the best
    sampled_values = [
        entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    assert completion.cumulative_logprob == pytest.approx(sum(sampled_values))


def test_logprobs_zero_reports_only_the_sampled_token_and_none_reports_nothing():
    engine = Engine(FakeRunner(), FakeTokenizer())
    engine.add_request("zero", "abc", SamplingParams(logprobs=0))
    engine.add_request("none", "abc", SamplingParams())
    ends = {output.request_id: output.outputs[0] for output in finish(engine) if output.finished}
    assert all(
        list(entries) == [token] for token, entries in zip(ends["zero"].token_ids, ends["zero"].logprobs, strict=True)
    )
    assert ends["none"].logprobs is None
    assert ends["none"].cumulative_logprob is None


@pytest.mark.parametrize("budget", [4, 5, 16])
def test_prompt_logprobs_are_the_same_however_the_prompt_is_cut(budget):
    engine = Engine(FakeRunner(FakeLimits(max_batched_tokens=budget)), FakeTokenizer())
    prompt = [3, 9, 4, 12, 5, 5, 7, 8, 10]
    engine.add_request("r", prompt, SamplingParams(prompt_logprobs=2, n=2, max_tokens=1))
    report = finish(engine)[-1].prompt_logprobs
    assert report[0] is None
    assert len(report) == len(prompt)
    for position, entries in enumerate(report[1:], 1):
        values = log_softmax(logits(prompt[:position]))
        assert entries[prompt[position]].logprob == pytest.approx(values[prompt[position]])
        assert {entry.rank for entry in entries.values()} >= {1, 2}


# Timing


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_metrics_follow_the_clock():
    clock = Clock()

    def pass_a_second(work):
        clock.now += 1

    runner = FakeRunner(FakeLimits(max_slots=1), pass_a_second)
    engine = Engine(runner, FakeTokenizer(), clock=clock, async_scheduling=False)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request("first", "abcd", params, arrival=98.0)
    engine.add_request("second", "abc", SamplingParams(max_tokens=1, ignore_eos=True))
    outputs = finish(engine)
    assert all((output.metrics is not None) is output.finished for output in outputs)
    metrics = {output.request_id: output.metrics for output in outputs}
    first, second = metrics["first"], metrics["second"]
    assert (first.queue_s, first.ttft_s, first.itl_s, first.e2e_s) == (2, 3, 1, 6)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (4, 4)
    assert first.e2e_s == first.ttft_s + (first.num_output_tokens - 1) * first.itl_s
    assert (second.queue_s, second.ttft_s, second.itl_s, second.e2e_s) == (4, 5, None, 5)


def test_request_without_a_token_has_no_first_token_time():
    clock = Clock()
    engine = Engine(FakeRunner(), FakeTokenizer(), clock=clock)
    engine.add_request("r", "abcd")
    clock.now += 2
    metrics = engine.abort("r").metrics
    assert (metrics.queue_s, metrics.ttft_s, metrics.itl_s, metrics.e2e_s) == (None, None, None, 2)


# Prefix cache, deadlines, failures and events


def test_cached_tokens_are_shown():
    engine = Engine(FakeRunner(), FakeTokenizer())
    prompt = [3 + i for i in range(10)]
    for expected, salt in ((0, ""), (9, ""), (0, "tenant")):
        engine.add_request("r", prompt, SamplingParams(max_tokens=2, ignore_eos=True), cache_salt=salt)
        outputs = finish(engine)
        assert [output.num_cached_tokens for output in outputs] == [expected] * 2
        assert outputs[-1].metrics.num_cached_tokens == expected
    engine.add_request("r", prompt)
    assert engine.abort("r").num_cached_tokens is None  # it never started


def test_a_deadline_ends_its_request_with_what_it_has_and_no_other():
    clock = Clock()

    def pass_a_second(work):
        clock.now += 1

    runner = FakeRunner(FakeLimits(max_slots=1), pass_a_second)
    engine = Engine(runner, FakeTokenizer(), clock=clock, async_scheduling=False)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    engine.add_request("late", "abcd", params, arrival=99.0, timeout_s=4.0)
    engine.add_request("waits", "abcd", params, timeout_s=3.0)
    engine.add_request("other", "abc", SamplingParams(max_tokens=1, ignore_eos=True), timeout_s=60.0)
    ends = {output.request_id: output for output in finish(engine) if output.finished}
    reasons = {name: (end.outputs[0].finish_reason, end.outputs[0].stop_reason) for name, end in ends.items()}
    assert reasons == {"late": ("abort", "deadline"), "waits": ("abort", "deadline"), "other": ("length", None)}
    assert [len(ends[name].outputs[0].token_ids) for name in ("late", "waits")] == [3, 0]
    assert ends["late"].metrics.e2e_s == 4
    engine.scheduler.check_integrity()


class FailingRunner(FakeRunner):
    """From its third round on, the logits of slot 0 are not numbers."""

    def execute(self, work):
        result = super().execute(work)
        return StepResult(result.sampled, result.prompt_logprobs, frozenset([0] if len(self.history) > 2 else []))


def test_a_sequence_without_finite_logits_ends_alone():
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, stop=["zz"])
    healthy = Engine(FakeRunner(), FakeTokenizer())
    engine = Engine(FailingRunner(), FakeTokenizer())
    results = []
    for some in (healthy, engine):
        some.add_request("a", "abcd", params)
        some.add_request("b", "bcda", params)
        results.append({output.request_id: output.outputs[0] for output in finish(some) if output.finished})
    whole, broken = results
    assert (broken["a"].finish_reason, broken["a"].stop_reason) == ("abort", "non-finite logits")
    assert broken["a"].token_ids == whole["a"].token_ids[:2]
    assert whole["a"].text.startswith(broken["a"].text)
    assert broken["b"] == whole["b"]
    engine.scheduler.check_integrity()


def test_a_token_that_failed_is_in_no_timeline():
    recorder = TimelineRecorder()
    engine = Engine(FailingRunner(), FakeTokenizer(), observer=recorder)
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    for name in ("a", "b"):
        engine.add_request(name, "abcd", params)
    outputs = {output.request_id: output.outputs[0] for output in finish(engine)}
    for sequence in recorder.timeline().sequences:
        assert len(sequence.token_times) == len(outputs[sequence.sequence.request_id].token_ids)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"request_id": 7}, "request_id must be a text, not 7"),
        ({"priority": "high"}, "priority must be an integer, not 'high'"),
        ({"priority": 0.5}, "priority must be an integer, not 0.5"),
        ({"priority": True}, "priority must be an integer, not True"),
        ({"cache_salt": b"tenant"}, "cache_salt must be a text, not b'tenant'"),
        ({"cache_salt": None}, "cache_salt must be a text, not None"),
        ({"arrival": "now"}, "arrival must be a finite number of seconds, not 'now'"),
        ({"arrival": math.inf}, "arrival must be a finite number of seconds, not inf"),
        ({"timeout_s": math.nan}, "timeout_s must be a finite number of seconds, not nan"),
        ({"timeout_s": 10**400}, "timeout_s must be a finite number of seconds"),
        ({"timeout_s": ""}, "timeout_s must be a finite number of seconds, not ''"),
        ({"output_kind": "delta"}, "output_kind must be an OutputKind, not 'delta'"),
        ({"prompt": "\ud800"}, "is not UTF-8 text"),
    ],
)
def test_arguments_of_the_wrong_kind_disturb_no_other_request(change, named):
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
    engine = Engine(FakeRunner(), FakeTokenizer(), policy="priority")
    engine.add_request("good", "abcd", params, priority=3)
    engine.step()
    with pytest.raises(RequestRefused, match=named) as refusal:
        engine.add_request(**({"request_id": "bad", "prompt": "abcd", "params": params} | change))
    assert str(refusal.value).endswith(".")
    engine.scheduler.check_integrity()
    (last,) = [output.outputs[0] for output in finish(engine) if output.finished]
    assert (last.finish_reason, len(last.token_ids)) == ("length", 5)


def test_a_prompt_brings_its_salt():
    engine = Engine(FakeRunner(), FakeTokenizer())
    hits = []
    for salt in ("one", "two", "one"):
        engine.add_request("a", {"prompt": "abcd" * 3, "cache_salt": salt}, SamplingParams(max_tokens=1))
        finish(engine)
        hits.append(engine.scheduler.counts.prefix_hits)
    assert hits[:2] == [0, 0]
    assert hits[2] > 0
    with pytest.raises(RequestRefused, match="the key 'salt'; the keys are prompt, prompt_token_ids, cache_salt"):
        engine.add_request("a", {"prompt": "abcd", "salt": "one"})


def test_any_text_is_a_salt():
    engine = Engine(FakeRunner(), FakeTokenizer(), model_version="\udcff")  # a path that is not UTF-8
    for name, salt in (("a", "\ud800"), ("b", "\ud800"), ("c", "\ud801")):
        engine.add_request(name, "abcd" * 3, SamplingParams(max_tokens=1), cache_salt=salt)
        finish(engine)
    assert engine.scheduler.counts.prefix_hits > 0
    engine.scheduler.check_integrity()


def test_priority_goes_first():
    engine = Engine(FakeRunner(FakeLimits(max_slots=1)), FakeTokenizer(), policy="priority")
    for name, priority in (("last", 5), ("first", -5), ("middle", 0)):
        engine.add_request(name, "abc", SamplingParams(max_tokens=1, ignore_eos=True), priority=priority)
    assert [output.request_id for output in finish(engine)] == ["first", "middle", "last"]


def test_observers_are_told_of_every_round():
    events = []
    engine = Engine(FakeRunner(FakeLimits(num_pages=5)), FakeTokenizer(), observer=events.append)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(name, "abcd", params)
    finish(engine)
    kinds = [type(event).__name__ for event in events]
    assert (kinds.count("RequestQueued"), kinds.count("SequenceFinished")) == (2, 2)
    assert kinds.count("SequencePreempted") == engine.scheduler.counts.preemptions > 0
    rounds = [event for event in events if isinstance(event, RoundFinished)]
    assert [event.work for event in rounds] == engine.runner.history
    assert sum(step.sampled for event in rounds for step in event.steps()) == 12
    assert all(event.host_start <= event.start <= event.end <= event.host_end for event in rounds)
    assert all(sum(event.pages) == 4 for event in rounds)
    assert [(event.waiting, event.running) for event in rounds[:2]] == [(0, 2), (0, 2)]
    assert rounds[0].pages.active == 2
