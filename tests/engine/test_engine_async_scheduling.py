"""One round ahead: the device gets its next round before the host reads the last one's tokens."""

from __future__ import annotations

import itertools

import pytest
from fake_runner import Done, FakeLimits, FakeRunner, FakeTokenizer, alone

from jaxinfer.core.observer import RoundFinished
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine


class Logged(FakeRunner):
    """Notes when rounds are dispatched and when their results are asked for."""

    def __init__(self, limits: FakeLimits | None = None) -> None:
        super().__init__(limits)
        self.log: list[tuple[str, int]] = []

    def dispatch(self, work):
        done, number, log = super().dispatch(work), len(self.history), self.log
        log.append(("dispatch", number))

        class Later(Done):
            def result(self):
                log.append(("read", number))
                return super().result()

        return Later(done.value)


def run(engine: Engine) -> dict[str, tuple[int, ...]]:
    ids = {}
    while engine.has_unfinished:
        for output in engine.step():
            ids[output.request_id] = output.outputs[0].token_ids
        engine.scheduler.check_integrity()
    return ids


def served(runner: FakeRunner, params: SamplingParams, **options) -> dict[str, tuple[int, ...]]:
    engine = Engine(runner, FakeTokenizer(), **options)
    for name in ("abcd", "bbb"):
        engine.add_request(name, name, params)
    return run(engine)


@pytest.mark.parametrize("ahead", [True, False])
def test_the_next_round_is_dispatched_before_the_last_is_read(ahead):
    runner = Logged()
    served(runner, SamplingParams(max_tokens=4, ignore_eos=True, temperature=0), async_scheduling=ahead)
    numbers = [1, 2, 3, 4]
    serial = [event for number in numbers for event in (("dispatch", number), ("read", number))]
    early = [("dispatch", 1)]
    for number in numbers:
        early += [("dispatch", number + 1)] * (number < 4) + [("read", number)]
    assert runner.log == (early if ahead else serial)


def test_nothing_is_computed_beyond_a_known_length():
    ahead, serial = FakeRunner(), FakeRunner()
    params = SamplingParams(max_tokens=7, ignore_eos=True, seed=1)
    assert served(ahead, params) == served(serial, params, async_scheduling=False)
    assert ahead.history == serial.history


def test_a_sequence_that_ends_by_a_token_is_computed_once_too_often_and_no_more():
    params = SamplingParams(max_tokens=30, seed=5, temperature=1)
    runner = FakeRunner()
    ids = served(runner, params)
    for name in ("abcd", "bbb"):
        expected = alone(FakeTokenizer().encode(name), params, 5, runner.limits.max_context)
        assert expected.finish_reason == "stop"
        assert ids[name] == expected.token_ids
        cached = len(name) + len(expected.token_ids) - 1
        assert runner.max_cached[tuple(FakeTokenizer().encode(name))] == cached + 1


def test_a_slot_given_on_while_its_old_round_is_on_the_device_keeps_the_owners_apart():
    """One slot: b enters it while a's last round, computed for nothing, is still on the device."""
    runner, events = FakeRunner(FakeLimits(max_slots=1, num_pages=9)), []
    engine = Engine(runner, FakeTokenizer(), observer=events.append)
    params = SamplingParams(max_tokens=12, seed=5)
    for name in ("a", "b", "c"):
        engine.add_request(name, "ab" + name, params)
    ids = run(engine)
    for name in ("a", "b", "c"):
        expected = alone(FakeTokenizer().encode("ab" + name), params, 5, runner.limits.max_context)
        assert ids[name] == expected.token_ids
        rounds = [e for e in events if isinstance(e, RoundFinished)]
        sampled = [s for e in rounds for s in e.steps() if s.sequence.request_id == name and s.sampled]
        assert len(sampled) == len(expected.token_ids)


def test_a_request_that_is_cancelled_with_a_round_on_the_device_gives_its_pages_at_once():
    engine = Engine(FakeRunner(FakeLimits(num_pages=9)), FakeTokenizer())
    engine.add_request("a", "abcdabcd", SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    assert engine.scheduler.pool.usage.active > 0
    engine.abort("a")
    assert engine.scheduler.pool.usage.active == 0
    engine.scheduler.check_integrity()
    assert not engine.has_unfinished
    engine.add_request("b", "bcdabcda", SamplingParams(max_tokens=20, ignore_eos=True, temperature=0))
    expected = alone(
        FakeTokenizer().encode("bcdabcda"), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), 0, 64
    )
    assert run(engine)["b"] == expected.token_ids


def test_what_the_device_waits_for_and_what_the_host_hides_are_told_apart():
    events = []
    engine = Engine(FakeRunner(), FakeTokenizer(), observer=events.append)
    engine.add_request("a", "abcd", SamplingParams(max_tokens=5, ignore_eos=True))
    run(engine)
    rounds = [event for event in events if isinstance(event, RoundFinished)]
    assert all(r.host_start <= r.dispatched and r.start <= r.end <= r.host_end for r in rounds)
    for earlier, later in itertools.pairwise(rounds):
        assert later.dispatched <= earlier.end <= later.start  # the device runs one round at a time


def test_nobody_waits_for_a_round_that_was_computed_for_nothing():
    runner = Logged()
    engine = Engine(runner, FakeTokenizer())
    engine.add_request("a", "abcd", SamplingParams(max_tokens=30, seed=5))
    run(engine)
    dispatched = len(runner.history)
    assert ("read", dispatched) not in runner.log
    engine.add_request("b", "bcd", SamplingParams(max_tokens=3, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in engine.step()] == [1]
    assert runner.log[-1] == ("read", dispatched + 1)
