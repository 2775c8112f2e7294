"""The simulator: the scheduling example by hand, closed loops, and a replay of a known schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.core.latency import Capacity, summarize
from jaxinfer.core.scheduler import SchedulerConfig
from jaxinfer.core.scheduling_example import REQUESTS, first_and_last_tick, run_all, run_example, tick_rows
from jaxinfer.core.simulator import RoundShape, Simulator, one_tick
from jaxinfer.core.timeline import TimelineRecorder
from jaxinfer.core.workload import Workload, WorkloadRequest, WorkloadSpec, random_workload

# By hand, for (mode, chunked prefill, prefix cache): ticks of the first and last token of A, B and C, most pages held.
#
# Continuous, whole prefill: 0 A prefill. 1 B prefill, A pauses. 2 A, B decode; C has come, but both slots are taken.
#   3 A, B decode, B's third and last; A holds 10 and B 10 positions, 3 pages each (5 when one is shared). 4 C prefill,
#   A pauses. 5 A, C decode, both end.
# Continuous, chunked: 0 A prefill. 1 A decode, B 7 of 8 tokens, as the budget is 8. 2 A decode, B the last one. 3 A, B
#   decode, A's last; 11 and 9 positions, 3 pages each. 4 B decode, its last, C prefill. 5 C decode. With 4 tokens of B
#   cached, 1 is enough for its prefill: 2 and 3 are decodes of both and end both; C has 4 and 5.
# Static: B comes when A's wave has started: 0 to 3 A alone. 4 B's 8 tokens take all the budget. 5 C prefill, with
#   chunks beside B's decode, else instead. 6 B, C decode, C's last; B ends with it or one tick later. B holds 3 pages,
#   C 2. With 4 of B cached, both prefill at 4; C ends at 5, B at 6.
BY_HAND = {
    ("static", False, False): ((0, 3), (4, 7), (5, 6), 5),
    ("static", False, True): ((0, 3), (4, 6), (4, 5), 5),
    ("static", True, False): ((0, 3), (4, 6), (5, 6), 5),
    ("static", True, True): ((0, 3), (4, 6), (4, 5), 5),
    ("continuous", False, False): ((0, 5), (1, 3), (4, 5), 6),
    ("continuous", False, True): ((0, 5), (1, 3), (4, 5), 5),
    ("continuous", True, False): ((0, 3), (2, 4), (4, 5), 6),
    ("continuous", True, True): ((0, 3), (1, 3), (4, 5), 5),
}


@pytest.mark.parametrize("combination", BY_HAND)
def test_scheduling_example(combination):
    run = run_example(*combination)
    found = (*(first_and_last_tick(sequence) for sequence in run.timeline.sequences), run.peak_pages)
    assert found == BY_HAND[combination]


def test_scheduling_example_leaves_what_it_must():
    for run in run_all():
        for sequence, request in zip(run.timeline.sequences, REQUESTS.requests, strict=True):
            in_cache = sum(span.cached_tokens + span.computed_tokens for span in sequence.spans)
            assert in_cache == len(request.prompt_ids) + request.output_tokens - 1
        assert run.pages_at_end.active == 0
        assert (run.pages_at_end.cached > 0) == run.prefix_cache
        a, b, c = run.timeline.sequences
        assert [s.spans[0].cached_tokens for s in (a, b, c)] == ([4, 4, 0] if run.prefix_cache else [0, 0, 0])


def test_scheduling_example_as_a_table():
    rows = list(tick_rows(run_example("continuous", True, False)))
    assert rows == [
        ("0", "prefill 8 -> token", "", "", "8", "2", "0"),
        ("1", "decode -> token", "prefill 7", "", "8", "5", "0"),
        ("2", "decode -> token", "prefill 1 -> token", "waits", "2", "5", "0"),
        ("3", "decode -> token", "decode -> token", "waits", "2", "6", "0"),
        ("4", "done", "decode -> token", "prefill 4 -> token", "5", "4", "0"),
        ("5", "done", "done", "decode -> token", "1", "2", "0"),
    ]


def config(**changes) -> SchedulerConfig:
    return SchedulerConfig(
        **({"max_slots": 2, "page_size": 4, "num_pages": 9, "max_context": 32, "max_batched_tokens": 8} | changes)
    )


def simulate(workload, step_seconds=one_tick, **changes):
    recorder = TimelineRecorder()
    simulator = Simulator(config(**changes), step_seconds, recorder)
    refused = simulator.run(workload)
    simulator.scheduler.check_integrity()
    return recorder.timeline(), refused


def requests(*shapes) -> tuple[WorkloadRequest, ...]:
    return tuple(
        WorkloadRequest(str(number), arrival, tuple(range(prompt)), output)
        for number, (arrival, prompt, output) in enumerate(shapes)
    )


def test_the_clock_jumps_over_idle_time_and_arrivals_within_a_round_count_from_then():
    timeline, _ = simulate(Workload(requests((0, 4, 1), (5.5, 4, 2), (5.75, 4, 1))), enable_prefix_caching=False)
    assert [round_.start for round_ in timeline.rounds] == [0, 5.5, 6.5]
    assert [sequence.ttft_s for sequence in timeline.sequences] == [1.0, 1.0, 1.75]


def test_closed_loop():
    timeline, _ = simulate(Workload(requests((0, 4, 2), (0, 4, 1), (0, 4, 1)), max_concurrency=1))
    assert [sequence.arrival for sequence in timeline.sequences] == [0, 2, 3]  # sent when the one before has ended
    assert [sequence.queue_s for sequence in timeline.sequences] == [0, 0, 0]


def test_round_shapes():
    shapes = []

    def seconds(shape: RoundShape) -> float:
        shapes.append(shape)
        return 0.5

    timeline, _ = simulate(Workload(requests((0, 6, 3), (0, 4, 1))), seconds, enable_prefix_caching=False)
    assert shapes == [RoundShape((), ((0, 6), (0, 2))), RoundShape((6,), ((2, 2),)), RoundShape((7,), ())]
    assert timeline.end == 1.5


def test_what_can_never_fit_is_refused_and_the_others_are_served():
    timeline, refused = simulate(Workload(requests((0, 40, 2), (0, 4, 2))))
    assert len(refused) == 1
    assert "40 prompt tokens and 2 new ones" in refused[0]
    assert [sequence.sequence.request_id for sequence in timeline.sequences] == ["1"]


@settings(max_examples=50, deadline=None)
@given(
    spec=st.builds(
        WorkloadSpec,
        num_prompts=st.integers(1, 12),
        request_rate=st.sampled_from([0.3, 1.0, float("inf")]),
        burstiness=st.sampled_from([0.3, 1.0, 5.0]),
        max_concurrency=st.sampled_from([None, 1, 3]),
        input_len=st.integers(1, 10),
        output_len=st.integers(1, 6),
        range_ratio=st.sampled_from([0.0, 0.5, 1.0]),
        prefix_len=st.integers(0, 8),
        prefix_share=st.sampled_from([0.0, 0.5, 1.0]),
        seed=st.integers(0, 1000),
    ),
    mode=st.sampled_from(["continuous", "static"]),
    prefix=st.booleans(),
    chunked=st.booleans(),
)
def test_every_token_of_every_request_comes(spec, mode, prefix, chunked):
    workload = random_workload(spec, 50)
    longest = 8 + 2 * 10 + 2 * 6  # prefix, input and output
    sizes = {"max_batched_tokens": 8 if chunked else longest, "num_pages": 12, "max_context": longest}
    timeline, refused = simulate(
        workload, mode=mode, enable_prefix_caching=prefix, enable_chunked_prefill=chunked, **sizes
    )
    assert not refused
    tokens = {s.sequence.request_id: len(s.token_times) for s in timeline.sequences}
    assert tokens == {request.request_id: request.output_tokens for request in workload.requests}
    assert all(sequence.reason == "length" for sequence in timeline.sequences)
    summary = summarize(timeline, Capacity(2, 11, sizes["max_batched_tokens"], mode == "static"))
    assert summary.complete == len(workload.requests)
    assert summary.kv_peak <= 1
    assert prefix or summary.hit_rate == 0
