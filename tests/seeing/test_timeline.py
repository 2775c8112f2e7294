"""Timelines and latencies from events."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds import finished, prefill, queued, round_of

from jaxinfer.core.latency import Capacity, Slo, distribution, find_bottleneck, summarize
from jaxinfer.core.observer import PoolUsage, RoundFinished, SequenceId, SequencePreempted
from jaxinfer.core.step import StepWork
from jaxinfer.core.timeline import Preemption, Span, TimelineRecorder

CAPACITY = Capacity(max_slots=2, usable_pages=10, max_batched_tokens=8)


def recorded(*events):
    recorder = TimelineRecorder()
    for event in events:
        recorder(event)
    return recorder.timeline()


def two_requests():
    """A waits 1 s, has 4 of 10 tokens cached, is prefilled in two chunks and gets 3 tokens; B gets one."""
    return (
        queued("a", 0.0, 10),
        round_of(1.0, 2.0, {0: "a"}, prefills=[prefill(0, 3, 4, sample=False)], entered=[0], active=2),
        queued("b", 2.0, 2),
        finished("b", 4.0, 1, "stop"),
        round_of(3.0, 4.0, {0: "a", 1: "b"}, prefills=[prefill(0, 3, 7), prefill(1, 2)], entered=[1], active=4),
        round_of(5.0, 6.0, {0: "a"}, decodes=[0], active=4, cached=1),
        finished("a", 9.0, 3),
        round_of(8.0, 9.0, {0: "a"}, decodes=[0], active=4, cached=1),
    )


def test_spans_of_a_request():
    a, b = recorded(*two_requests()).sequences
    assert a.spans == (
        Span("prefill", 0, 1.0, 2.0, 4, 3, False),
        Span("prefill", 0, 3.0, 4.0, 0, 3, True),  # cached positions count once, when it enters the slot
        Span("decode", 0, 5.0, 6.0, 0, 1, True),
        Span("decode", 0, 8.0, 9.0, 0, 1, True),
    )
    assert (a.queue_s, a.ttft_s, a.itls_s, a.tpot_s, a.e2e_s) == (1.0, 4.0, (2.0, 3.0), 2.5, 9.0)
    assert (a.finished_at, a.reason, a.complete) == (9.0, "length", True)
    assert (b.queue_s, b.ttft_s, b.itls_s, b.tpot_s, b.e2e_s) == (1.0, 2.0, (), None, 2.0)


def test_a_request_that_never_ran():
    (a,) = recorded(queued("a", 1.0, 3), finished("a", 2.0, 0, "abort")).sequences
    assert (a.queue_s, a.ttft_s, a.itls_s, a.tpot_s, a.e2e_s, a.complete) == (None, None, (), None, None, False)


def test_each_of_n_sequences_and_a_name_used_twice():
    recorder = TimelineRecorder()
    recorder(queued("a", 0.0, 3, n=2))
    recorder(finished("a", 1.0, 0, "abort", index=1))
    recorder(queued("a", 5.0, 3))
    recorder(finished("a", 6.0, 0, "abort"))
    found = [(s.sequence, s.arrival, s.finished_at) for s in recorder.timeline().sequences]
    assert found == [
        (SequenceId("a", 0), 0.0, None),
        (SequenceId("a", 1), 0.0, 1.0),
        (SequenceId("a", 0), 5.0, 6.0),
    ]


def test_preemption():
    (a,) = recorded(
        queued("a", 0.0, 3),
        SequencePreempted(2.0, SequenceId("a", 0), 1),
        SequencePreempted(2.0, SequenceId("unknown", 0), 0),
    ).sequences
    assert a.preemptions == (Preemption(2.0, 1),)


def test_what_was_queued_before_a_reset_is_passed_over():
    recorder = TimelineRecorder()
    events = two_requests()
    recorder(events[0])
    recorder.reset()
    for event in events[1:]:
        recorder(event)
    timeline = recorder.timeline()
    assert [s.sequence.request_id for s in timeline.sequences] == ["b"]
    assert len(timeline.rounds) == 4


def test_summary_by_hand():
    summary = summarize(recorded(*two_requests()), CAPACITY, Slo.parse("ttft:3s"))
    assert (summary.sequences, summary.complete, summary.rounds) == (2, 2, 4)
    assert summary.duration_s == 9.0
    assert (summary.prompt_tokens, summary.output_tokens) == (12, 4)
    assert summary.output_tokens_per_s == pytest.approx(4 / 9)
    assert summary.total_tokens_per_s == pytest.approx(16 / 9)
    assert summary.requests_per_s == pytest.approx(2 / 9)
    assert (summary.ttft.mean, summary.ttft.p50, summary.ttft.p90) == pytest.approx((3.0, 3.0, 3.8))
    assert (summary.itl.count, summary.itl.mean) == (2, 2.5)
    assert (summary.tpot.count, summary.tpot.mean) == (1, 2.5)
    assert (summary.good, summary.goodput_per_s) == (1, pytest.approx(1 / 9))
    assert summary.kv_mean == pytest.approx((2 + 4 + 4 + 4) / 4 / 10)
    assert summary.kv_peak == 0.4
    assert summary.hit_rate == pytest.approx(4 / 12)
    assert (summary.device.p50, summary.host.p50) == (1.0, 0.5)
    assert summary.output_rate.mean == pytest.approx((3 / 9 + 1 / 2) / 2)


def test_summary_of_nothing():
    summary = summarize(recorded(), CAPACITY, Slo.parse("ttft:1s"))
    assert (summary.sequences, summary.ttft, summary.itl, summary.tpot, summary.good) == (0, None, None, None, 0)
    assert (summary.output_tokens_per_s, summary.goodput_per_s, summary.hit_rate, summary.kv_mean) == (0, 0, 0, 0)


def test_aborted_requests_give_tokens_but_no_latency():
    events = list(two_requests())
    events[-2] = finished("a", 9.0, 3, "abort")
    summary = summarize(recorded(*events), CAPACITY, Slo.parse("ttft:100s"))
    assert (summary.complete, summary.output_tokens, summary.ttft.count, summary.good) == (1, 4, 1, 1)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30), st.floats(0, 100))
def test_total_is_ttft_and_tpot_for_every_further_token(gaps, arrival):
    events = [queued("a", arrival, 4)]
    time = arrival
    for number, gap in enumerate(gaps):
        time += gap
        work = {"prefills": [prefill(0, 4)], "entered": [0]} if number == 0 else {"decodes": [0]}
        events.append(round_of(time - gap / 2, time, {0: "a"}, **work))
    events.append(finished("a", time, len(gaps)))
    (a,) = recorded(*events).sequences
    assert a.e2e_s == pytest.approx(a.ttft_s + (len(gaps) - 1) * (a.tpot_s or 0.0))
    assert len(a.itls_s) == len(gaps) - 1
    assert (a.tpot_s is None) == (len(gaps) == 1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_numpys(values):
    found = distribution(values)
    expected = np.percentile(values, [50, 90, 99])
    assert (found.p50, found.p90, found.p99) == pytest.approx(tuple(expected))
    assert found.mean == pytest.approx(np.mean(values))


def test_objectives():
    slo = Slo.parse("ttft:200ms, itl:0.05s,tpot:5000us,e2e:3s")
    assert (slo.ttft_s, slo.itl_s, slo.tpot_s, slo.e2e_s) == pytest.approx((0.2, 0.05, 0.005, 3.0))
    a, b = recorded(*two_requests()).sequences
    assert Slo.parse("itl:3s").met_by(a)
    assert not Slo.parse("itl:2.9s").met_by(a)  # the longest gap counts, not the mean
    assert Slo.parse("tpot:2.5s").met_by(a)
    assert Slo.parse("itl:1us").met_by(b)  # a single token has no gap
    assert not Slo.parse("e2e:1.9s").met_by(b)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:5", "ttft:0ms", "ttft:-1s", "ttft:nans", "x:1s", "itl:1s,itl:2s"]
)
def test_objectives_that_are_none(text):
    with pytest.raises(ValueError, match=r"is no objective; write limits") as error:
        Slo.parse(text)
    assert str(error.value).endswith(".")


def waiting_run(**last_round):
    """A is served while B waits for long."""
    return recorded(
        queued("a", 0.0, 4),
        queued("b", 0.0, 4),
        round_of(0.25, 9.0, {0: "a"} | last_round.pop("others", {}), entered=[0], waiting=1, **last_round),
        round_of(9.5, 10.0, {0: "b"}, prefills=[prefill(0, 4)], entered=[0]),
    )


@pytest.mark.parametrize(
    ("run", "capacity", "name", "said"),
    [
        ({"prefills": [prefill(0, 4)], "others": {1: "c"}}, CAPACITY, "slots", "with all 2 slots taken"),
        ({"prefills": [prefill(0, 8)]}, CAPACITY, "token budget", "with the 8 tokens of a round used up"),
        ({"prefills": [prefill(0, 4)]}, CAPACITY, "KV pages", "with a slot free, but too few of the 10 pages"),
        ({"prefills": [prefill(0, 4)]}, Capacity(2, 10, 8, static=True), "static waves", "for the running wave to end"),
    ],
)
def test_what_requests_wait_for(run, capacity, name, said):
    found = find_bottleneck(waiting_run(**run), capacity)
    assert found.name == name
    assert found.evidence == f"requests spent 51% of their time waiting, 100% of it {said}."  # 9.75 s of 19


def busy_run(host_free: bool, *, decodes: int, gap: float = 0.0):
    events = [queued("a", 0.0, 4)]
    step = 100.0 if host_free else 0.5
    time = 0.25
    for number in range(decodes + 1):
        work = {"decodes": [0]} if number else {"prefills": [prefill(0, 4)], "entered": [0]}
        events.append(round_of(time, time + step, {0: "a"}, **work))
        time += step + 0.5 + gap
    return recorded(*events)


@pytest.mark.parametrize(
    ("timeline", "name", "said"),
    [
        (busy_run(True, decodes=3), "decode", "rounds with prefill took 25%"),
        (busy_run(True, decodes=0), "prefill", "rounds with prefill took 100%"),
        (busy_run(False, decodes=3), "host", "the device waited for scheduling and outputs on the host 50% of"),
        (busy_run(True, decodes=1, gap=300.0), "arrivals", "nothing was to do 60% of the time"),
    ],
)
def test_what_requests_spend_their_time_on(timeline, name, said):
    found = find_bottleneck(timeline, CAPACITY)
    assert found.name == name
    assert said in found.evidence


def test_rounds_keep_what_the_counters_show():
    first = recorded(*two_requests()).rounds[0]
    assert (first.decodes, first.prefill_rows, first.prefill_tokens, first.waiting, first.running) == (0, 1, 3, 0, 1)
    assert first.pages == PoolUsage(2, 0, 8)
    assert (first.device_s, first.host_s) == (1.0, 0.5)


def ahead(number: int, host: float, **work):
    """A round of 1 s, back to back with the others, that was scheduled while the one before it ran."""
    start = 10.0 + number
    return RoundFinished(
        host_start=start - 0.7 if number else start - host / 2,
        dispatched=start - 0.7 + host / 2 if number else start,
        start=start,
        end=start + 1.0,
        host_end=start + 1.0 + host / 2,
        work=StepWork((), (), tuple(work.get("prefills", ())), tuple(work.get("decodes", ()))),
        owners={0: SequenceId("a", 0)},
        waiting=0,
        running=1,
        pages=PoolUsage(1, 0, 9),
    )


def test_host_time_that_the_device_hides():
    rounds = [ahead(0, 0.2, prefills=[prefill(0, 4)]), *(ahead(i, 0.4, decodes=[0]) for i in range(1, 5))]
    summary = summarize(recorded(queued("a", 9.0, 4), *rounds), CAPACITY)
    assert summary.host.mean == pytest.approx((0.2 + 4 * 0.4) / 5)
    assert summary.host_of_decode == pytest.approx(0.4)
    # Only the first scheduling and the last outputs have nothing beside them on the device.
    assert summary.host_exposed == pytest.approx((0.1 + 0.2) / (0.3 + 5.0))
    assert summary.bottleneck.name == "decode"
    assert "it waited for the host 6% of the rounds' time" in summary.bottleneck.evidence


def test_host_time_that_nothing_hides():
    summary = summarize(recorded(*two_requests()), CAPACITY)
    rounds = summary.rounds
    assert summary.host_exposed == pytest.approx(0.5 * rounds / (summary.device.mean * rounds + 0.5 * rounds))
    assert summary.host_of_decode == pytest.approx(0.5)


@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.floats(0.01, 2), st.floats(0, 2), st.floats(0, 2), st.floats(0, 1)),
        min_size=1,
        max_size=8,
    )
)
def test_exposed_host_time_is_that_of_a_clock_that_looks_at_both(parts):
    """Rounds in any order of host and device work, against counting small steps of time."""
    rounds, free = [], 0.0
    for gap, length, before, after, overlap in parts:
        start = free + gap
        dispatched = start - overlap * min(1.0, start)
        free = start + length
        rounds.append(
            dataclasses.replace(
                ahead(0, 0.2, decodes=[0]),
                host_start=dispatched - before,
                dispatched=dispatched,
                start=start,
                end=free,
                host_end=free + after,
            )
        )
    summary = summarize(recorded(queued("a", -5.0, 4), *rounds), CAPACITY)
    times = np.arange(-5.0, free + 3.0, 0.005) + 0.0025
    busy = sum(((r.start <= times) & (times < r.end)).astype(int) for r in rounds)
    host = sum(
        ((r.host_start <= times) & (times < r.dispatched)).astype(int)
        + ((r.end <= times) & (times < r.host_end)).astype(int)
        for r in rounds
    )
    exposed = float((host * (busy == 0)).sum()) * 0.005
    device = sum(r.end - r.start for r in rounds)
    assert summary.host_exposed == pytest.approx(exposed / (exposed + device), abs=0.05)


def test_a_simulation_has_no_host():
    rounds = [ahead(0, 0.0, prefills=[prefill(0, 4)]), ahead(1, 0.0, decodes=[0])]
    rounds = [dataclasses.replace(r, host_start=r.start, dispatched=r.start) for r in rounds]
    summary = summarize(recorded(queued("a", 9.0, 4), *rounds), CAPACITY)
    assert summary.host is None
    assert "host" not in summary.bottleneck.evidence


def test_figures_of_many_rounds_take_no_time_that_grows_with_their_square():
    looks = 0

    class Rounds(tuple):
        def __iter__(self):
            nonlocal looks
            for round_ in super().__iter__():
                looks += 1
                yield round_

    work = [round_of(number + 0.5, number + 1.0, {0: "a"}, decodes=[0]) for number in range(300)]
    timeline = recorded(queued("a", 0.0, 4), *work)
    summary = summarize(dataclasses.replace(timeline, rounds=Rounds(timeline.rounds)), CAPACITY)
    assert summary.host_exposed == pytest.approx(0.5)  # 0.25 s before and after each half second
    assert looks < 50 * len(work)
