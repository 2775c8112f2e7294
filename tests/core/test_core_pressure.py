"""More work than pages: preemption, priority, deadlines, failures of one, and rounds without chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxinfer.core.observer import SequenceFinished, SequencePreempted
from jaxinfer.core.request import DEADLINE, NON_FINITE, Request, RequestRefused
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import Scheduler, SchedulerConfig
from jaxinfer.core.step import SampledToken, SlotSetup, StepResult

CONFIG = SchedulerConfig(
    max_slots=4, page_size=4, num_pages=7, max_context=64, max_batched_tokens=16, enable_prefix_caching=False
)


def request(name, prompt=8, max_tokens=9, n=1, prompt_logprobs=None, **state):
    params = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=prompt_logprobs)
    ids = tuple(range(100 * ord(name[0]), 100 * ord(name[0]) + prompt))
    return Request(name, ids, params, 7, (), 0.0, **state)


def run_round(scheduler, token=5, failed=()):
    work = scheduler.schedule()
    slots = [*work.decodes, *(row.slot for row in work.prefills if row.sample)]
    progress = scheduler.commit(work, StepResult({slot: SampledToken(token) for slot in slots}, {}, frozenset(failed)))
    scheduler.check_integrity()
    return work, progress


def run_all(scheduler):
    """The order in which requests end."""
    ended = []
    rounds = 0
    while scheduler.has_unfinished:
        _, progress = run_round(scheduler)
        ended += [item.sequence.request.request_id for item in progress if item.sequence.finish_reason]
        rounds += 1
        assert rounds < 1000
    return ended


def names(sequences):
    return [sequence.request.request_id for sequence in sequences]


def test_admission_looks_at_what_is_free_now_and_leaves_a_page_for_each_that_runs():
    scheduler = Scheduler(CONFIG)  # 6 pages; each request comes to need 4
    for name in "abc":
        scheduler.add(request(name))
    run_round(scheduler)
    assert names(scheduler.running) == ["a", "b"]  # 2 + 2 pages; c would leave none
    scheduler = Scheduler(replace(CONFIG, num_pages=6))
    for name in "ab":
        scheduler.add(request(name))
    run_round(scheduler)
    assert names(scheduler.running) == ["a", "b"]  # 5 pages are just enough
    scheduler = Scheduler(replace(CONFIG, num_pages=5))
    for name in "ab":
        scheduler.add(request(name))
    run_round(scheduler)
    assert names(scheduler.running) == ["a"]


def test_the_youngest_is_preempted_and_computed_again_with_all_it_said():
    events = []
    scheduler = Scheduler(CONFIG, observer=events.append)
    first, second = request("a"), request("b")
    for added in (first, second):
        scheduler.add(added)
    setups, preempted_at = [], []
    for round_number in range(40):
        if not scheduler.has_unfinished:
            break
        work, _ = run_round(scheduler, token=50 + round_number)
        setups += [(setup, row) for setup in work.slot_setups for row in work.prefills if row.slot == setup.slot]
        preempted_at += [round_number] if first.sequences[0].num_preemptions else []
    # Both need a third page at the 9th position and a fourth at the 13th, when 6 pages are taken: a gets b's.
    assert (first.sequences[0].num_preemptions, second.sequences[0].num_preemptions) == (0, 1)
    assert scheduler.counts.preemptions == 1
    assert [type(event) for event in events].count(SequencePreempted) == 1
    setup, row = setups[2]
    said = tuple(second.sequences[0].output_ids[:5])
    assert setup == SlotSetup(setup.slot, second.params, 7, second.prompt_ids, said, ())
    assert (row.start, row.token_ids, row.sample) == (0, (*second.prompt_ids, *said), True)
    assert [len(added.sequences[0].output_ids) for added in (first, second)] == [9, 9]
    assert first.sequences[0].first_token_at <= second.sequences[0].first_token_at < first.sequences[0].finished_at


def test_one_and_a_half_requests_of_room_and_eight_waiting():
    for caching in (False, True):
        scheduler = Scheduler(replace(CONFIG, enable_prefix_caching=caching))
        for name in "abcdefgh":
            scheduler.add(request(name))
        assert run_all(scheduler) == list("abcdefgh")
        assert scheduler.counts.preemptions > 0
        assert scheduler.pool.free_pages == 6


def test_a_preempted_sequence_finds_its_own_pages_again():
    scheduler = Scheduler(replace(CONFIG, enable_prefix_caching=True))
    for name in "ab":
        scheduler.add(request(name))
    resumed = []
    while scheduler.has_unfinished:
        work, _ = run_round(scheduler)
        again = {setup.slot for setup in work.slot_setups if setup.output_ids}
        resumed += [row.start for row in work.prefills if row.slot in again]
    assert len(resumed) == 1
    assert resumed[0] > 0


def test_full_reservation_never_preempts():
    scheduler = Scheduler(replace(CONFIG, reserve_full=True))
    for name in "abcd":
        scheduler.add(request(name))
    run_round(scheduler)
    assert names(scheduler.running) == ["a"]
    assert scheduler.reserved_pages == 2
    run_all(scheduler)
    assert scheduler.counts.preemptions == 0


@pytest.mark.parametrize("preempted_in_round", [1, 2, 3, 5])
def test_prompt_reports_are_given_once(preempted_in_round):
    """Preempted amid its prompt or after it: every prompt token is reported once."""
    scheduler = Scheduler(replace(CONFIG, max_batched_tokens=5))
    scheduler.add(request("b", prompt=13, max_tokens=9, prompt_logprobs=1))
    reported, rounds = [], 0
    while scheduler.has_unfinished:
        if rounds == preempted_in_round:
            scheduler._preempt()
        work = scheduler.schedule()
        entries = {}
        for row in work.prefills:
            if row.prompt_logprobs is not None:
                following = (*row.token_ids[1:], *(() if row.next_token is None else (row.next_token,)))
                entries[row.slot] = [SampledToken(token, 0.0) for token in following]
        slots = [*work.decodes, *(row.slot for row in work.prefills if row.sample)]
        result = StepResult({slot: SampledToken(5) for slot in slots}, entries)
        for item in scheduler.commit(work, result):
            reported += [entry.id for entry in item.prompt_logprobs]
        scheduler.check_integrity()
        rounds += 1
    assert reported == [100 * ord("b") + i for i in range(1, 13)]


# Priority


def test_priority_decides_who_is_admitted_and_who_loses_pages():
    scheduler = Scheduler(replace(CONFIG, policy="priority", max_slots=1))
    for name, priority in (("a", 1), ("b", 1), ("c", -1), ("d", 0)):
        scheduler.add(request(name, priority=priority))
    assert run_all(scheduler) == ["c", "d", "a", "b"]

    scheduler = Scheduler(replace(CONFIG, policy="priority"))
    low, high = request("a", priority=1), request("b", priority=0)
    scheduler.add(low)
    run_round(scheduler)
    scheduler.add(high)
    assert run_all(scheduler) == ["b", "a"]
    assert (low.sequences[0].num_preemptions, high.sequences[0].num_preemptions) == (1, 0)


def test_priority_needs_its_policy():
    scheduler = Scheduler(CONFIG)
    with pytest.raises(RequestRefused, match="has priority 1, but the policy is 'fcfs'"):
        scheduler.add(request("a", priority=1))
    assert not scheduler.has_unfinished


# Deadlines and failures


def test_a_deadline_ends_its_request_waiting_or_running_and_no_other():
    now = [0.0]
    scheduler = Scheduler(replace(CONFIG, max_slots=1), lambda: now[0])
    running, waiting, other = request("a", timeout_s=5.0), request("b", timeout_s=5.0), request("c", timeout_s=6.0)
    for added in (running, waiting, other):
        scheduler.add(added)
    run_round(scheduler)
    assert scheduler.expire() == []
    now[0] = 5.0
    assert scheduler.expire() == [running, waiting]
    scheduler.check_integrity()
    for ended in (running, waiting):
        assert (ended.sequences[0].finish_reason, ended.sequences[0].stop_reason) == ("abort", DEADLINE)
    assert run_all(scheduler) == ["c"]
    now[0] = 9.0
    assert scheduler.expire() == []  # it ended in time


def test_a_deadline_leaves_completions_that_ended_as_they_are():
    now = [0.0]
    scheduler = Scheduler(replace(CONFIG, max_slots=1), lambda: now[0])
    added = request("a", prompt=2, max_tokens=1, n=2, timeout_s=1.0)
    scheduler.add(added)
    run_round(scheduler)
    now[0] = 1.0
    scheduler.expire()
    assert [(s.finish_reason, s.stop_reason) for s in added.sequences] == [("length", None), ("abort", DEADLINE)]


def test_a_sequence_with_logits_that_are_no_numbers_ends_alone():
    events = []
    scheduler = Scheduler(replace(CONFIG, num_pages=33, enable_prefix_caching=True), observer=events.append)
    bad, good = request("a"), request("b")
    scheduler.add(bad)
    scheduler.add(good)
    run_round(scheduler)
    _, progress = run_round(scheduler, failed=[bad.sequences[0].slot])
    assert [(item.sequence.request.request_id, item.token is None) for item in progress] == [("a", True), ("b", False)]
    assert (bad.sequences[0].finish_reason, bad.sequences[0].stop_reason) == ("abort", NON_FINITE)
    assert scheduler.pool.usage == (3, 0, 29)  # what it computed is not kept for others
    assert [event.reason for event in events if isinstance(event, SequenceFinished)] == ["abort"]
    assert run_all(scheduler) == ["b"]


# Rounds without chunks


def test_without_chunks_a_prompt_is_computed_whole_and_decodes_wait():
    scheduler = Scheduler(replace(CONFIG, num_pages=33, enable_chunked_prefill=False))
    scheduler.add(request("a", prompt=6))
    rounds = [run_round(scheduler)[0] for _ in range(2)]
    for name, prompt in (("b", 9), ("c", 9)):
        scheduler.add(request(name, prompt=prompt))
    rounds += [run_round(scheduler)[0] for _ in range(4)]
    shapes = [(len(work.decodes), [len(row.token_ids) for row in work.prefills]) for work in rounds]
    assert shapes == [(0, [6]), (1, []), (0, [9]), (0, [9]), (3, []), (3, [])]
    chunked = Scheduler(replace(CONFIG, num_pages=33))
    for name, prompt in (("b", 9), ("c", 9)):
        chunked.add(request(name, prompt=prompt))
    assert [len(row.token_ids) for row in run_round(chunked)[0].prefills] == [9, 7]


def test_without_chunks_a_prompt_longer_than_a_round_is_refused():
    scheduler = Scheduler(replace(CONFIG, num_pages=33, enable_chunked_prefill=False))
    with pytest.raises(
        RequestRefused, match=r"has 17 tokens, but without chunked prefill a round computes at most 16;"
    ):
        scheduler.add(request("a", prompt=17))
    scheduler.add(request("a", prompt=16))


def test_without_chunks_what_was_preempted_and_outgrew_a_round_is_computed_in_pieces():
    scheduler = Scheduler(replace(CONFIG, enable_chunked_prefill=False, max_batched_tokens=8))
    for name in "ab":
        scheduler.add(request(name))
    assert run_all(scheduler) == ["a", "b"]
    assert scheduler.counts.preemptions == 1


def test_a_preempted_sequence_waits_for_the_token_that_is_on_its_way():
    scheduler = Scheduler(replace(CONFIG, num_pages=6, max_rounds_in_flight=7))  # 5 pages; each comes to need 4
    for name in "ab":
        scheduler.add(request(name))
    works = [scheduler.schedule() for _ in range(6)]
    assert names(scheduler.running) == ["a"]  # it took the pages of b, whose first token is still on its way
    scheduler.cancel("a")
    assert scheduler.schedule().is_empty  # there is room, but what b must compute is not known yet
    scheduler.commit(works[0], StepResult({slot: SampledToken(50 + slot) for slot in (0, 1)}))
    (again,) = scheduler.schedule().prefills
    assert again.token_ids[-1] == 51
    for work in works[1:]:
        scheduler.commit(work, StepResult({}))
    scheduler.check_integrity()
