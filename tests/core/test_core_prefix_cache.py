"""Cached prefixes: what is found, what never may be, and when pages are evicted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jaxinfer.core.pool import BlockPool
from jaxinfer.core.prefix_hashes import page_hashes, root_hash
from jaxinfer.core.request import Request
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import Scheduler, SchedulerConfig
from jaxinfer.core.step import SampledToken, StepResult

CONFIG = SchedulerConfig(max_slots=4, page_size=4, num_pages=33, max_context=64, max_batched_tokens=32)
PROMPT = tuple(range(10, 22))  # three pages of 4
NUMBERS = itertools.count()


def request(prompt=PROMPT, max_tokens=1, salt="", **params):
    chosen = SamplingParams(max_tokens=max_tokens, **params)
    return Request(f"r{next(NUMBERS)}", tuple(prompt), chosen, 7, (), 0.0, cache_salt=salt)


def run_round(scheduler, token=5, failed=()):
    work = scheduler.schedule()
    slots = [*work.decodes, *(row.slot for row in work.prefills if row.sample)]
    reports = {row.slot: [SampledToken(0, 0.0)] * len(row.token_ids) for row in work.prefills if row.prompt_logprobs}
    scheduler.commit(work, StepResult({slot: SampledToken(token) for slot in slots}, reports, frozenset(failed)))
    scheduler.check_integrity()
    return work


def serve(scheduler, *requests, token=5):
    """Run all requests to their end; the starts of all prefill rows, round by round."""
    for added in requests:
        scheduler.add(added)
    starts = []
    while scheduler.has_unfinished:
        starts.append([row.start for row in run_round(scheduler, token).prefills])
    return starts


def test_names_depend_on_tokens_order_everything_before_and_the_root():
    chain = page_hashes(b"root", [1, 2, 3, 4, 5], 2)
    assert len(chain) == 3
    assert chain == page_hashes(b"root", [1, 2, 3, 4, 9], 2)
    others = [page_hashes(root, ids, 2) for root, ids in ((b"root", [2, 1, 3, 4]), (b"toor", [1, 2, 3, 4]))]
    assert all(name not in chain for other in others for name in other[1:])
    assert page_hashes(b"root", [1, 2, 1, 2], 2)[1] != page_hashes(b"root", [1, 2, 1, 2], 2)[2]
    roots = [root_hash("a", "bc"), root_hash("ab", "c"), root_hash("abc", ""), root_hash("", "abc")]
    assert len(set(roots)) == 4


def test_pages_that_a_round_on_the_device_fills_are_waited_for():
    scheduler = Scheduler(replace(CONFIG, max_rounds_in_flight=2))
    first, second = request(PROMPT, 4), request(PROMPT, 4)
    scheduler.add(first)
    filling = scheduler.schedule()
    scheduler.add(second)
    assert scheduler.schedule().prefills == ()  # it would compute again what is on its way
    scheduler.commit(filling, StepResult({0: SampledToken(5)}))
    assert [row.start for row in scheduler.schedule().prefills] == [len(PROMPT) - 1]
    scheduler.check_integrity()


def test_a_prompt_sent_three_times_computes_only_its_last_token_and_hits_do_not_shrink():
    scheduler = Scheduler(CONFIG)
    requests = [request(PROMPT[:8]) for _ in range(3)]
    assert [serve(scheduler, added) for added in requests] == [[[0]], [[7]], [[7]]]
    assert [added.sequences[0].prefix_tokens for added in requests] == [0, 7, 7]
    assert (scheduler.counts.prefix_queries, scheduler.counts.prefix_hits) == (24, 14)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12])
def test_at_least_one_token_is_computed_and_only_full_pages_are_shared(length):
    scheduler = Scheduler(CONFIG)
    serve(scheduler, request())
    scheduler.add(request(PROMPT[:length], max_tokens=2))
    work = run_round(scheduler)
    assert [row.start for row in work.prefills] == [length - 1]
    shared, copied = divmod(length - 1, 4)
    pages = scheduler.running[0].pages
    assert [page for page in pages if scheduler.pool.name_of(page)][:shared] == pages[:shared]
    assert [copy.target for copy in work.page_copies] == (pages[shared:] if copied else [])


def test_only_the_leading_equal_pages_match():
    scheduler = Scheduler(CONFIG)
    serve(scheduler, request())
    assert serve(scheduler, request((*PROMPT[:4], 99, *PROMPT[5:]))) == [[4]]
    assert serve(scheduler, request((*PROMPT[:6], 99, *PROMPT[7:]))) == [[6]]
    assert serve(scheduler, request((99, *PROMPT[1:]))) == [[0]]
    assert serve(scheduler, request(PROMPT[4:])) == [[0]]


def test_salts_and_model_versions_are_kept_apart():
    scheduler = Scheduler(CONFIG)
    serve(scheduler, request(salt="a"))
    assert serve(scheduler, request(salt="b")) == [[0]]
    assert serve(scheduler, request(salt="a")) == [[11]]
    other = Scheduler(CONFIG, model_version="other")
    other.cache.pool = scheduler.pool
    assert serve(other, request(salt="a")) == [[0]]


def test_without_prefix_caching_nothing_is_found_or_kept():
    scheduler = Scheduler(replace(CONFIG, enable_prefix_caching=False))
    assert [serve(scheduler, request()) for _ in range(2)] == [[[0]]] * 2
    assert scheduler.pool.usage == (0, 0, 32)
    assert scheduler.counts.prefix_queries == 0


def test_pages_of_generated_tokens_are_found_by_the_next_turn():
    scheduler = Scheduler(CONFIG)
    first = request(PROMPT[:6], max_tokens=7)  # caches 12 positions
    serve(scheduler, first)
    turn = (*PROMPT[:6], *first.sequences[0].output_ids, 30)
    assert serve(scheduler, request(turn)) == [[12]]


def test_a_page_is_not_found_before_it_is_computed():
    """Two equal prompts wait for each other; a third of another kind comes behind them."""
    scheduler = Scheduler(CONFIG)
    assert serve(scheduler, request(), request(), request()) == [[0], [11, 11]]
    scheduler = Scheduler(replace(CONFIG, mode="static"))
    assert serve(scheduler, request(), request()) == [[0, 0]]  # a wave does not wait for itself
    assert scheduler.pool.usage.cached == 3  # of two equal pages one is kept


def test_pages_of_a_cancelled_round_are_never_found():
    scheduler = Scheduler(CONFIG)
    first = request()
    scheduler.add(first)
    work = scheduler.schedule()
    scheduler.cancel(first.request_id)
    scheduler.commit(work, StepResult({0: SampledToken(5)}))
    assert scheduler.pool.usage == (0, 0, 32)
    assert serve(scheduler, request()) == [[0]]
    scheduler.add(request([*range(40, 50)]))
    scheduler.schedule()
    scheduler.abandon()
    scheduler.check_integrity()
    assert serve(scheduler, request([*range(40, 50)])) == [[0]]


def test_n_completions_share_the_pages_of_their_prompt():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request((*PROMPT, 1), max_tokens=3, n=3))
    rows = [run_round(scheduler).prefills for _ in range(2)]
    assert [[row.start for row in some] for some in rows] == [[0], [12, 12]]
    shared = [sequence.pages[:3] for sequence in scheduler.running]
    assert shared[0] == shared[1] == shared[2]
    assert len({sequence.pages[3] for sequence in scheduler.running}) == 3  # the partial tail is each one's own
    assert all(scheduler.pool.reference_count(page) == 3 for page in shared[0])


def test_a_waiter_in_a_chunked_prompt_follows_behind_it():
    scheduler = Scheduler(replace(CONFIG, max_batched_tokens=6))
    prompt = range(100, 120)
    starts = serve(scheduler, request(prompt), request(prompt))
    assert starts == [[0], [6], [12], [18, 16]]


def test_prompt_logprobs_are_computed_in_full():
    scheduler = Scheduler(CONFIG)
    serve(scheduler, request())
    assert serve(scheduler, request(prompt_logprobs=1)) == [[0]]
    assert serve(scheduler, request()) == [[11]]


def test_pages_are_evicted_only_when_needed_and_the_longest_unused_first():
    scheduler = Scheduler(replace(CONFIG, num_pages=10))  # 9 pages
    first, second = range(100, 116), range(200, 216)
    for prompt in (first, second):
        serve(scheduler, request(prompt))
    assert scheduler.pool.usage == (0, 8, 1)
    serve(scheduler, request((*first, 1)))  # uses its four pages again, and the one that was free
    assert scheduler.pool.num_evictions == 0
    assert scheduler.pool.usage == (0, 9, 0)  # a page that is not full is kept too
    serve(scheduler, request(range(300, 308)))  # takes two pages of the second prompt: its last
    assert scheduler.pool.num_evictions == 2
    assert serve(scheduler, request((*first, 1))) == [[16]]  # takes one more
    assert serve(scheduler, request((*second, 1))) == [[4]]


def test_admission_does_not_count_pages_that_others_hold_but_those_only_cached():
    """13 tokens are 4 pages, 3 of them shared."""
    prompt = (*PROMPT, 1)
    scheduler = Scheduler(replace(CONFIG, num_pages=7))  # 6 pages
    for _ in range(2):
        scheduler.add(request(prompt, max_tokens=3))
        run_round(scheduler)
    assert len(scheduler.running) == 2  # 1 of the 2 free pages is enough, and 1 is left for the first

    scheduler = Scheduler(replace(CONFIG, num_pages=6))  # 5 pages
    serve(scheduler, request(prompt))
    scheduler.add(request((50, 51), max_tokens=2))
    run_round(scheduler)
    scheduler.add(request(prompt))
    assert scheduler.pool.usage == (1, 4, 0)
    assert run_round(scheduler).slot_setups == ()  # it would take all 4, and none would be left
    assert [row.start for row in run_round(scheduler).prefills] == [12]


def test_a_page_in_use_is_never_evicted():
    pool = BlockPool(4, 4)
    used, idle = pool.allocate(2)
    pool.register(used, b"used")
    pool.register(idle, b"idle")
    pool.release([idle])
    assert pool.usage == (1, 1, 1)
    assert idle in pool.allocate(2)
    assert pool.page_named(b"used") == used
    assert pool.page_named(b"idle") is None
    with pytest.raises(RuntimeError, match="only 0 are free"):
        pool.allocate(1)
    pool.check_integrity()


def test_names_of_free_pages_and_doubled_names():
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2)
    pool.register(first, b"x")
    pool.register(second, b"x")
    assert pool.page_named(b"x") == first
    pool.release([first, second])
    assert pool.usage == (0, 1, 2)
    for action in (lambda: pool.register(second, b"y"), lambda: pool.forget([second])):
        with pytest.raises(RuntimeError, match=r"named|not held"):
            action()
    pool.retain([first])
    pool.forget([first])
    pool.release([first])
    assert pool.usage == (0, 0, 3)
    pool.check_integrity()


def test_integrity_check_sees_wrong_names():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request((*PROMPT, 1), max_tokens=5))
    run_round(scheduler)
    sequence = scheduler.running[0]
    scheduler.pool.register(sequence.pages[3], b"too early")
    with pytest.raises(RuntimeError, match="still written"):
        scheduler.check_integrity()
    scheduler.pool.forget([sequence.pages[3]])
    sequence.page_hashes[2] = b"wrong"
    with pytest.raises(RuntimeError, match="named after other tokens"):
        scheduler.check_integrity()
    scheduler.pool._page_named.pop(scheduler.pool.name_of(sequence.pages[0]))
    with pytest.raises(RuntimeError, match="cannot be found by its name"):
        scheduler.pool.check_integrity()
