"""Serving a workload: the engine does on a device, round by round, what the simulator says."""

from __future__ import annotations

import pytest
from fake_runner import VOCAB_SIZE, FakeLimits, FakeRunner, FakeTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.core.observer import Observers, SequenceFinished
from jaxinfer.core.simulator import Simulator, one_tick
from jaxinfer.core.timeline import TimelineRecorder
from jaxinfer.core.workload import Workload, WorkloadRequest, WorkloadSpec, random_workload
from jaxinfer.engine import Engine
from jaxinfer.engine.serve_bench import measure_serving, serve


class Clock:
    """Moves one second with each round, and when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


class TimedRunner(FakeRunner):
    """Each round takes one second, after the round before it; whoever asks for its result sooner waits."""

    def __init__(self, limits: FakeLimits, clock: Clock) -> None:
        super().__init__(limits)
        self._clock = clock
        self._free_at = 0.0

    def dispatch(self, work):
        done, clock = super().dispatch(work), self._clock
        self._free_at = end = max(clock.now, self._free_at) + 1.0

        class Later:
            def result(self):
                clock.now = max(clock.now, end)
                return done.result()

        return Later()


def served(workload: Workload, limits: FakeLimits, **policies):
    clock, recorder = Clock(), TimelineRecorder()
    engine = Engine(TimedRunner(limits, clock), FakeTokenizer(), clock=clock, observer=recorder, **policies)
    refused = serve(engine, workload, clock, clock.move)
    engine.scheduler.check_integrity()
    return recorder.timeline(), refused


def simulated(workload: Workload, limits: FakeLimits, **policies):
    config = Engine(FakeRunner(limits), FakeTokenizer(), **policies).scheduler.config
    recorder = TimelineRecorder()
    refused = Simulator(config, one_tick, recorder).run(workload)
    return recorder.timeline(), refused


@settings(max_examples=60, deadline=None)
@given(
    spec=st.builds(
        WorkloadSpec,
        num_prompts=st.integers(1, 12),
        request_rate=st.sampled_from([0.4, float("inf")]),
        max_concurrency=st.sampled_from([None, 2]),
        input_len=st.integers(1, 16),
        output_len=st.integers(1, 12),
        range_ratio=st.sampled_from([0.0, 1.0]),
        prefix_len=st.sampled_from([0, 8]),
        seed=st.integers(0, 1000),
    ),
    num_pages=st.sampled_from([12, 33]),
    mode=st.sampled_from(["continuous", "static"]),
    reserve_full=st.booleans(),
    async_scheduling=st.booleans(),
)
def test_the_simulator_foretells_the_engine(spec, num_pages, mode, reserve_full, async_scheduling):
    workload, limits = random_workload(spec, VOCAB_SIZE), FakeLimits(num_pages=num_pages)
    policies = {"mode": mode, "reserve_full": reserve_full, "async_scheduling": async_scheduling}
    assert served(workload, limits, **policies) == simulated(workload, limits, **policies)


def test_preemption_is_seen():
    workload = random_workload(WorkloadSpec(4, input_len=8, output_len=20), VOCAB_SIZE)
    timeline, _ = served(workload, FakeLimits(num_pages=12))
    assert sum(len(sequence.preemptions) for sequence in timeline.sequences) > 0
    assert all(len(sequence.token_times) == 20 for sequence in timeline.sequences)


def test_what_can_never_fit_is_refused():
    requests = (WorkloadRequest("long", 0.0, (3,) * 64, 4), WorkloadRequest("short", 0.0, (3,), 4))
    timeline, refused = served(Workload(requests), FakeLimits())
    assert [sequence.sequence.request_id for sequence in timeline.sequences] == ["short"]
    assert len(refused) == 1
    assert "64 prompt tokens and 4 new ones" in refused[0]


@pytest.mark.parametrize("mode", ["continuous", "static"])
def test_the_warm_up_is_left_out_and_leaves_nothing_cached(mode):
    runner = FakeRunner()
    workload = random_workload(WorkloadSpec(6, input_len=10, output_len=6, prefix_len=8), VOCAB_SIZE)
    observers, also = Observers(), []
    engine = Engine(runner, FakeTokenizer(), mode=mode, observer=observers)
    run = measure_serving(engine, observers, workload, also=also.append)
    assert len(runner.history) > len(run.timeline.rounds)
    assert [len(sequence.token_times) for sequence in run.timeline.sequences] == [6] * 6
    assert run.timeline.sequences[0].spans[0].cached_tokens == 0
    assert sum(isinstance(event, SequenceFinished) for event in also) == 6
    assert run.config.mode == mode
    assert run.timeline.rounds[0].pages.cached == 0
    computed = sum(span.computed_tokens for s in run.timeline.sequences for span in s.spans if span.kind == "prefill")
    cached = sum(span.cached_tokens for s in run.timeline.sequences for span in s.spans)
    assert computed + cached == 6 * 18


def test_the_warm_up_cannot_be_found_in_the_cache():
    """A second prompt that is the first one's warm-up, token for token."""
    prompt = tuple(range(3, 15))
    shifted = tuple(token + 1 for token in prompt)
    workload = Workload((WorkloadRequest("a", 0.0, prompt, 1), WorkloadRequest("b", 0.0, shifted, 1)))
    observers = Observers()
    run = measure_serving(Engine(FakeRunner(), FakeTokenizer(), observer=observers), observers, workload)
    assert not any(span.cached_tokens for s in run.timeline.sequences for span in s.spans)


def test_the_warm_up_leaves_nothing_to_be_moved_to_host_memory():
    limits = FakeLimits(num_pages=8, host_pages=16)
    workload = random_workload(WorkloadSpec(1, input_len=20, output_len=4), VOCAB_SIZE)
    observers = Observers()
    engine = Engine(FakeRunner(limits), FakeTokenizer(), observer=observers)
    run = measure_serving(engine, observers, workload)
    assert sum(round_.pages_out for round_ in run.timeline.rounds) == 0
    assert engine.scheduler.cache.host.used_slots == 0
    engine.scheduler.check_integrity()
