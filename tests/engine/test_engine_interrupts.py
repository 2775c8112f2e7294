"""Rounds that are left by an exception at any point: the engine goes on, and loses neither requests nor pages."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_runner import EOS_IDS, FakeLimits, FakeRunner, FakeTokenizer, alone

import jaxinfer
from jaxinfer.core.request import Request
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import Scheduler, SchedulerConfig
from jaxinfer.engine import Engine

LIMITS = FakeLimits(max_slots=3, num_pages=12, max_batched_tokens=6, max_prefill_rows=2, host_pages=6)
PROMPTS = {"a": "abcdabcdab", "b": "abcdabcdcc", "c": "ccd", "d": "abcdabcdab", "e": "dddda", "f": "bab"}
SOURCES = Path(jaxinfer.__file__).parent
LATE = {"step", "_recover", "_finish_recovery", "_deliver_abort"}  # what runs when the round has ended or failed


def params_of(name: str) -> SamplingParams:
    return SamplingParams(n=2 if name == "c" else 1, max_tokens=7, ignore_eos=True, seed=ord(name), logprobs=1)


def started_engine(runner: FakeRunner, rounds: int, clock: Callable[[], float] = time.monotonic) -> tuple[Engine, list]:
    engine = Engine(runner, FakeTokenizer(), clock=clock)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, params_of(name), timeout_s=900 if name in "ae" else None)
    return engine, [output for _ in range(rounds) for output in engine.step()]


def drain(engine: Engine) -> list:
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
        engine.scheduler.check_integrity()
    return outputs


def check_afterwards(engine: Engine, outputs: list) -> set[str]:
    """Everything is answered, by the right tokens or as aborted; returns who was aborted."""
    outputs += drain(engine)
    engine.add_request("new", PROMPTS["a"], params_of("a"))
    outputs += drain(engine)
    last = {output.request_id: output for output in outputs}
    assert set(last) == {*PROMPTS, "new"}
    aborted = set()
    for name, output in last.items():
        assert output.finished
        like = "a" if name == "new" else name
        prompt, params = FakeTokenizer().encode(PROMPTS[like]), params_of(like)
        for index, completion in enumerate(output.outputs):
            expected = alone(prompt, params, ord(like) + index, LIMITS.max_context)
            if completion.finish_reason == "abort":
                aborted.add(name)
                assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
            else:
                assert (completion.token_ids, completion.text) == (expected.token_ids, expected.text)
                assert len(completion.logprobs) == len(completion.token_ids)
    assert engine.scheduler.pool.free_pages == LIMITS.num_pages - 1
    assert not engine.scheduler.running
    return aborted


class Interrupter:
    """Raises KeyboardInterrupt before the nth line that core and engine run from now on."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame, event, arg):
        path = Path(frame.f_code.co_filename)
        mine = SOURCES in path.parents and path.name != "interrupts.py"
        return self._line if mine and frame.f_code.co_name not in LATE else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize(("rounds", "late"), [(0, False), (2, False), (2, True), (10, False)])
def test_an_interrupt_before_any_line_of_a_round_leaves_a_working_engine(rounds, late):
    line, interrupted = 0, True
    while interrupted:
        line += 1
        now = [0.0]
        engine, outputs = started_engine(FakeRunner(LIMITS), rounds, lambda now=now: now[0])
        now[0] = 1000.0 if late else 1.0  # a, which runs, and e, which waits, are late
        before = sys.gettrace()
        sys.settrace(Interrupter(line))
        try:
            outputs += engine.step()
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        engine.scheduler.check_integrity()
        aborted = check_afterwards(engine, outputs)
        assert "f" not in aborted or rounds == 10  # it only waited
        assert interrupted or aborted == ({"a", "e"} if late else set())
    assert line > 100


@pytest.mark.parametrize("change", ["abort", "add"])
def test_an_interrupt_before_any_line_of_a_change_leaves_a_working_engine(change):
    line, silent, interrupted = 0, 0, True
    while interrupted:
        line += 1
        engine, outputs = started_engine(FakeRunner(LIMITS), 2)
        before = sys.gettrace()
        sys.settrace(Interrupter(line))
        try:
            if change == "abort":
                outputs.append(engine.abort("a"))
            else:
                engine.add_request("more", "abcd", params_of("a"))
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        outputs += drain(engine)
        last = {output.request_id: output for output in outputs}
        expected = set(PROMPTS) | ({"more"} if "more" in last else set())
        assert set(last) == expected
        # An abort that was interrupted when all was done has nobody to tell.
        unfinished = [name for name, output in last.items() if not output.finished]
        silent += bool(unfinished)
        assert unfinished == [] or (unfinished == ["a"] and interrupted and change == "abort")
        assert engine.scheduler.pool.free_pages == LIMITS.num_pages - 1
    assert line > 10
    assert silent <= 3  # the lines that only hand it back


def test_an_interrupt_before_the_device_ends_only_the_requests_of_the_round():
    def interrupt(work):
        if len(runner.history) == 4:
            raise KeyboardInterrupt

    runner = FakeRunner(LIMITS, interrupt)
    engine, outputs = started_engine(runner, 2)
    running = {sequence.request.request_id for sequence in engine.scheduler.running}
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_unfinished
    aborted = check_afterwards(engine, outputs)
    assert running <= aborted < set(PROMPTS)


class LosingRunner(FakeRunner):
    """Its fourth round fails after it changed the cache, which is lost."""

    def execute(self, work):
        result = super().execute(work)
        if len(self.history) == 4:
            self.cache_lost = True
            raise OSError("the device is gone")
        return result


def test_a_lost_cache_ends_what_had_begun_and_forgets_every_prefix():
    engine, outputs = started_engine(LosingRunner(LIMITS), 2)
    with pytest.raises(OSError, match="the device is gone"):
        engine.step()
    assert engine.scheduler.pool.usage.free == LIMITS.num_pages - 1  # none is kept as cache
    aborted = check_afterwards(engine, outputs)
    assert aborted
    assert "f" not in aborted


def test_an_interrupted_recovery_is_done_again():
    runner = LosingRunner(LIMITS)
    engine, outputs = started_engine(runner, 2)
    recover, failures = runner.recover, [KeyboardInterrupt()]

    def interrupted() -> bool:
        if failures:
            raise failures.pop()
        return recover()

    runner.recover = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert "f" not in check_afterwards(engine, outputs)


def test_a_last_output_that_was_handed_out_is_not_handed_out_again():
    class Interrupting(dict):
        """Is interrupted before it forgets its first key."""

        def __delitem__(self, key):
            failures, self.failures = self.failures, 0
            if failures:
                raise KeyboardInterrupt
            super().__delitem__(key)

    now = [0.0]
    engine, outputs = started_engine(FakeRunner(LIMITS), 2, lambda: now[0])
    now[0] = 1000.0  # a, which runs, and e, which waits, are late
    engine._states = Interrupting(engine._states)
    engine._states.failures = 1
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs += drain(engine)
    ends = [output.request_id for output in outputs if output.finished]
    assert sorted(ends) == sorted(PROMPTS)


# Ctrl-C


@contextmanager
def python_handler():
    """Python's own handler of SIGINT, whatever the test run has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_round_and_loses_no_output():
    def press(work):
        if len(runner.history) == 4:
            signal.raise_signal(signal.SIGINT)

    with python_handler():
        runner = FakeRunner(LIMITS, press)
        engine, outputs = started_engine(runner, 2)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert check_afterwards(engine, outputs) == set()


def test_a_second_ctrl_c_interrupts_the_round():
    def press(work):
        if len(runner.history) == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with python_handler():
        runner = FakeRunner(LIMITS, press)
        engine, outputs = started_engine(runner, 2)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert check_afterwards(engine, outputs)


def test_a_handler_of_the_program_is_left_alone():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(len(runner.history)))
    try:
        runner = FakeRunner(LIMITS, lambda work: signal.raise_signal(signal.SIGINT) if len(seen) == 0 else None)
        engine, outputs = started_engine(runner, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]
    assert check_afterwards(engine, outputs) == set()


# A real runner: its programs are given the cache and hand it back

TINY = {
    "max_slots": 2,
    "page_size": 8,
    "num_pages": 60,
    "max_context": 256,
    "max_batched_tokens": 24,
    "max_prefill_rows": 2,
}


class IdTokenizer(FakeTokenizer):
    eos_ids = ()

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(0x100 + i) for i in ids)


def interrupt_after(programs: dict, error: BaseException) -> None:
    """Let the next call of any of the programs raise after it took the donated arrays."""

    def wrapped(program):
        def call(*args):
            program(*args)
            programs.update(originals)
            raise error

        return call

    originals = dict(programs)
    programs.update({key: wrapped(program) for key, program in originals.items()})


@pytest.mark.parametrize("kind", ["decode", "prefill", "sample"])
def test_donated_arrays_that_were_never_handed_back_are_replaced(build_runner, golden_models, kind):
    runner, model = build_runner("qwen2", **TINY), golden_models["qwen2"]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    engine = Engine(runner, IdTokenizer())
    for name in range(4):
        engine.add_request(str(name), model.prompts[name].tolist(), params)
    outputs = []
    if kind != "prefill":
        while not any(sequence.decoding for sequence in engine.scheduler.running):
            outputs += engine.step()
    interrupt_after(getattr(runner.programs, kind), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs += drain(engine)
    engine.add_request("new", model.prompts[0].tolist(), params)
    outputs += drain(engine)
    last = {output.request_id: output.outputs[0] for output in outputs}
    assert set(last) == {"0", "1", "2", "3", "new"}
    assert last["0"].finish_reason == "abort"
    served = [name for name in last if last[name].finish_reason == "length"]
    assert {"2", "3", "new"} <= set(served)
    for name in served:
        np.testing.assert_array_equal(last[name].token_ids, model.greedy[0 if name == "new" else int(name)][:8])
    assert engine.scheduler.pool.free_pages == TINY["num_pages"] - 1


def test_a_runner_whose_arrays_are_sound_keeps_its_cache(build_runner):
    runner = build_runner("qwen2", **TINY)
    state = runner.state
    assert runner.recover() is False
    assert runner.state is state
    state.page_table.delete()
    assert runner.recover() is True
    assert all(pages.data.is_deleted() for pages in state.kv)


# Many completions


def test_the_end_of_a_sequence_takes_no_time_that_grows_with_its_siblings():
    config = SchedulerConfig(
        max_slots=1, page_size=4, num_pages=9, max_context=16, max_batched_tokens=16, enable_prefix_caching=False
    )
    scheduler = Scheduler(config)
    request = Request("many", (3, 4), SamplingParams(n=30_000, max_tokens=1), 0, EOS_IDS, 0.0)
    scheduler.add(request)
    start = time.process_time()
    for sequence in request.sequences[:20_000]:
        scheduler.finish(sequence, "abort")
    scheduler.cancel("many")
    assert time.process_time() - start < 2
    assert request.finished
    assert not scheduler.has_unfinished
