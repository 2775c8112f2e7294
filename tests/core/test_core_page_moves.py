"""Pages that are copied, that move to host memory and back, and that fall behind the window."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from test_core_prefix_cache import run_round

from jaxinfer.core.request import Request, RequestRefused
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import Scheduler, SchedulerConfig
from jaxinfer.core.step import PageCopy, SampledToken, StepResult

CONFIG = SchedulerConfig(max_slots=4, page_size=8, num_pages=33, max_context=256, max_batched_tokens=64)
NUMBERS = itertools.count()


def request(prompt, max_tokens=1, **params):
    chosen = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    return Request(f"r{next(NUMBERS)}", tuple(prompt), chosen, 7, (), 0.0)


def serve(scheduler, *requests, token=5):
    """Run all requests to their end; every round's work."""
    for added in requests:
        scheduler.add(added)
    works = []
    while scheduler.has_unfinished:
        works.append(run_round(scheduler, token))
    return works


def starts(works):
    return [row.start for work in works for row in work.prefills]


# Copies of a page's start


def test_a_conversation_goes_on_behind_its_last_token_but_one():
    scheduler = Scheduler(CONFIG)
    first = request(range(100, 112), max_tokens=9)  # 20 positions: two pages and 4 in the third
    serve(scheduler, first)
    turn = [*first.prompt_ids, *first.sequences[0].output_ids, 30, 31]
    works = serve(scheduler, request(turn, max_tokens=3))
    assert starts(works) == [20]
    assert [len(work.page_copies) for work in works] == [1, 0, 0]
    assert scheduler.counts.page_copies == 1
    assert scheduler.counts.prefix_hits == 20


def test_completions_of_one_prompt_copy_its_last_page_and_compute_one_token():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request(range(100, 120), max_tokens=4, n=3))
    rounds = [run_round(scheduler) for _ in range(2)]
    assert [[row.start for row in work.prefills] for work in rounds] == [[0], [19, 19]]
    pages = [sequence.pages for sequence in scheduler.running]
    assert pages[0][:2] == pages[1][:2] == pages[2][:2]
    assert rounds[1].page_copies == (PageCopy(pages[0][2], pages[1][2]), PageCopy(pages[0][2], pages[2][2]))
    assert all(scheduler.pool.reference_count(own[2]) == 1 for own in pages)


@pytest.mark.parametrize(("common", "start"), [(1, 0), (7, 7), (8, 8), (9, 8), (10, 10), (15, 15), (16, 16), (17, 16)])
def test_only_runs_worth_a_copy_are_copied(common, start):
    """Of pages of 8, from 2 tokens on."""
    scheduler = Scheduler(CONFIG)
    prompt = [*range(100, 120)]
    serve(scheduler, request(prompt))
    works = serve(scheduler, request([*prompt[:common], *range(200, 205)]))
    assert starts(works) == [start]
    assert sum(len(work.page_copies) for work in works) == (start % 8 > 0)


def test_the_longest_run_is_copied_whoever_has_it():
    scheduler = Scheduler(CONFIG)
    base = [*range(100, 108)]
    for tail in ([1, 2, 3], [1, 2, 4, 5, 6], [1, 2, 4, 5, 7, 8]):
        serve(scheduler, request([*base, *tail]))
    assert starts(serve(scheduler, request([*base, 1, 2, 4, 5, 7, 9, 9]))) == [13]
    assert starts(serve(scheduler, request([*base, 1, 2, 4, 5, 6, 9, 9]))) == [13]
    assert starts(serve(scheduler, request([*base, 2, 2, 4]))) == [8]


def test_a_preempted_sequence_gets_its_partial_page_back():
    scheduler = Scheduler(CONFIG)
    added = request(range(100, 112), max_tokens=9)
    scheduler.add(added)
    for _ in range(3):
        run_round(scheduler)
    scheduler._preempt()
    scheduler.check_integrity()
    work = run_round(scheduler)
    assert [(row.start, len(row.token_ids)) for row in work.prefills] == [(14, 1)]


def test_what_a_failed_sequence_had_is_not_copied():
    scheduler = Scheduler(CONFIG)
    prompt = [*range(100, 112)]
    bad = request(prompt, max_tokens=9)
    scheduler.add(bad)
    run_round(scheduler)
    run_round(scheduler, failed=[bad.sequences[0].slot])
    assert scheduler.pool.usage == (0, 0, 32)
    assert starts(serve(scheduler, request(prompt))) == [0]


def test_positions_of_a_round_that_was_not_committed_are_not_copied():
    scheduler = Scheduler(replace(CONFIG, max_rounds_in_flight=2))
    prompt = [*range(100, 106)]
    first = request(prompt, max_tokens=9)
    scheduler.add(first)
    work = scheduler.schedule()
    scheduler.cancel(first.request_id)
    scheduler.commit(work, StepResult({0: SampledToken(5)}))
    scheduler.check_integrity()
    assert starts(serve(scheduler, request(prompt))) == [0]
    # The same while decoding: the prompt was committed, the position after it was not.
    second = request(range(200, 204), max_tokens=9)
    scheduler.add(second)
    run_round(scheduler)
    work = scheduler.schedule()
    scheduler.cancel(second.request_id)
    scheduler.commit(work, StepResult({}, {}, frozenset(work.decodes)))
    assert starts(serve(scheduler, request([*range(200, 204), 5, 6]))) == [4]


def test_a_start_too_short_to_be_copied_is_not_kept():
    scheduler = Scheduler(CONFIG)
    serve(scheduler, request(range(100, 109)))
    assert scheduler.pool.usage.cached == 1
    serve(scheduler, request(range(200, 210)))
    assert scheduler.pool.usage.cached == 3


# Host memory


def host(num_pages=6, host_pages=8, **others):
    return Scheduler(replace(CONFIG, num_pages=num_pages, host_pages=host_pages, max_slots=2, **others))


def test_evicted_pages_go_out_and_come_back_where_they_match():
    scheduler = host()  # 5 pages
    first, second = [*range(100, 132)], [*range(200, 232)]  # 4 pages each
    assert serve(scheduler, request(first))[0].page_outs == ()
    pages = [scheduler.pool.page_named(name) for name in request_names(scheduler, first)]
    works = serve(scheduler, request(second))
    # One page was free; the first prompt's last three went out, the last of all first.
    assert [(out.page, out.host_slot) for out in works[0].page_outs] == [(pages[3], 0), (pages[2], 1), (pages[1], 2)]
    assert scheduler.cache.host.used_slots == 3
    (work,) = serve(scheduler, request(first))
    assert starts([work]) == [24]  # the last page is not shared, and only copied when it is here
    assert [move.host_slot for move in work.page_ins] == [2, 1]
    assert scheduler.counts.pages_in == 2


def request_names(scheduler, prompt):
    return scheduler.cache.prompt_names(request(prompt))[1:]


def test_a_page_that_came_back_need_not_go_out_again():
    scheduler = host()
    prompts = [[*range(start, start + 32)] for start in (100, 200)]
    for _ in range(5):
        for prompt in prompts:
            serve(scheduler, request(prompt))
    assert scheduler.counts.pages_out <= 8  # each of the eight pages at most once
    assert scheduler.counts.pages_in > 8


def test_host_memory_is_bounded():
    scheduler = host(host_pages=3)
    for start in range(100, 1000, 100):
        serve(scheduler, request(range(start, start + 32)))
        assert scheduler.cache.host.used_slots <= 3
    assert scheduler.cache.host.used_slots == 3
    without = host(host_pages=0)
    for start in range(100, 1000, 100):
        assert all(not work.page_outs for work in serve(without, request(range(start, start + 32))))


def test_a_preempted_sequence_is_swapped_in_instead_of_computed():
    def computed(host_pages):
        scheduler = Scheduler(replace(CONFIG, num_pages=8, max_slots=3, host_pages=host_pages))  # 7 pages
        requests = [request(range(start, start + 20), max_tokens=26) for start in (100, 200, 300)]  # 6 pages each
        works = serve(scheduler, *requests)
        assert scheduler.counts.preemptions > 0
        assert all(len(added.sequences[0].output_ids) == 26 for added in requests)
        return sum(work.num_tokens for work in works)

    least = 3 * (20 + 25)
    assert least <= computed(100) < computed(0)


def test_abandoned_rounds_leave_nothing_in_doubt():
    scheduler = host()
    first, second, third = ([*range(start, start + 32)] for start in (100, 200, 300))
    serve(scheduler, request(first))
    serve(scheduler, request(second))
    scheduler.add(request([*first, 1]))
    work = scheduler.schedule()
    assert work.page_ins
    scheduler.abandon()
    scheduler.check_integrity()
    assert scheduler.cache.host.used_slots == 0
    assert starts(serve(scheduler, request([*first, 1]))) == [8]  # the page that never left
    serve(scheduler, request(third))
    scheduler.reset()
    assert scheduler.cache.host.used_slots == 0
    assert starts(serve(scheduler, request(third))) == [0]


def test_a_failed_sequence_takes_its_pages_out_of_host_memory():
    scheduler = host()
    first = [*range(100, 132)]
    for prompt in (first, range(200, 232), range(300, 332)):
        serve(scheduler, request(prompt))
    bad = request([*first, 1], max_tokens=5)
    scheduler.add(bad)
    assert len(run_round(scheduler, failed=[0]).page_ins) == 4
    assert starts(serve(scheduler, request([*first, 1]))) == [0]


# Pages behind the window


def test_a_long_sequence_holds_its_window_and_what_is_computed():
    scheduler = Scheduler(replace(CONFIG, window=20, max_batched_tokens=16))
    held = []
    scheduler.add(request(range(1000, 1100), max_tokens=100))
    while scheduler.has_unfinished:
        run_round(scheduler)
        for sequence in scheduler.running:
            held.append(scheduler.cache.pages_held(sequence))
            assert all(sequence.pages[max(0, sequence.num_cached - 1 - 19) // 8 :])  # what its last position saw
    assert max(held) == 5  # 20 + 16 positions
    assert max(held[10:]) == 4  # decoding: 20 positions over up to 4 pages
    assert scheduler.pool.usage.active == 0
    assert scheduler.counts.preemptions == 0


def test_pages_behind_the_window_stay_findable_and_need_not_come_back():
    prompt = [*range(1000, 1096)]
    scheduler = Scheduler(replace(CONFIG, window=20, max_batched_tokens=16))
    serve(scheduler, request(prompt))
    scheduler.add(request([*prompt, 1, 2], max_tokens=9))
    work = run_round(scheduler)
    assert starts([work]) == [96]
    (sequence,) = scheduler.running
    assert sequence.pages[:9] == [0] * 9  # position 96 sees from 77 on
    assert all(sequence.pages[9:])
    assert [update.column for update in work.table_updates] == [9, 10, 11, 12]
    assert starts(serve(scheduler, request([*prompt[:40], 1, 2]))) == [40]
    # The beginning may be lost: what the window sees is enough.
    names = request_names(scheduler, prompt)
    for name in names[:6]:
        scheduler.pool.forget([scheduler.pool.page_named(name)])
    assert starts(serve(scheduler, request([*prompt, 1, 3]))) == [96]
    assert starts(serve(scheduler, request([*prompt[:40], 1, 3]))) == [0, 16, 32]


def test_requests_are_measured_by_their_window():
    config = replace(CONFIG, num_pages=6, window=20, max_batched_tokens=16, max_slots=2)  # 5 pages, 40 positions
    with pytest.raises(RequestRefused, match="needs 100 cache positions"):
        Scheduler(replace(config, window=None)).add(request(range(100)))
    with pytest.raises(RequestRefused, match="needs 100 cache positions"):
        Scheduler(replace(config, num_pages=4)).add(request(range(100)))  # 3 pages do not hold a window
    for pages in (5, 6):
        for reserve in (False, True):
            scheduler = Scheduler(replace(config, num_pages=pages, reserve_full=reserve))
            added = [request(range(start, start + 100), max_tokens=60) for start in (100, 300)]
            serve(scheduler, *added)
            assert [len(each.sequences[0].output_ids) for each in added] == [60, 60]
            assert scheduler.counts.preemptions == 0 or not reserve
    unbounded = Scheduler(config)
    unbounded.add(request(range(100), max_tokens=None))
    assert next(iter(unbounded.requests.values())).max_new_tokens == 156  # as long as the context


def test_shared_pages_that_one_leaves_behind_do_not_break_a_reservation():
    """Two share a prompt's pages; the first drops them while the second holds them, and needs others in their place."""
    scheduler = Scheduler(replace(CONFIG, num_pages=9, window=16, max_batched_tokens=16, reserve_full=True))
    prompt = [*range(100, 124)]
    scheduler.add(request(prompt, max_tokens=40))
    for _ in range(3):
        run_round(scheduler)
    works = serve(scheduler, request([*prompt, 1], max_tokens=40), request([*prompt, 2], max_tokens=40))
    assert scheduler.counts.preemptions == 0
    assert sum(len(work.decodes) for work in works) > 100


@pytest.mark.parametrize("values", [{"window": 0}, {"host_pages": -1}])
def test_impossible_sizes_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        replace(CONFIG, **values)


def test_integrity_check_sees_wrong_offers_and_a_held_padding_page():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request(range(100, 112), max_tokens=9))
    run_round(scheduler)
    (sequence,) = scheduler.running
    scheduler.pool.offer(sequence.pages[1], sequence.page_hashes[1], [1, 2, 3])
    with pytest.raises(RuntimeError, match="offers other tokens"):
        scheduler.check_integrity()
    scheduler.pool.forget([sequence.pages[1]])
    sequence.pages[1] = 0
    with pytest.raises(RuntimeError, match="or the padding page"):
        scheduler.check_integrity()
