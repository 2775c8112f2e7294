"""Runs of tokens in pages: the longest agreement is found, as by looking at all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core.page_runs import PageRuns
from jaxinfer.core.pool import BlockPool

RUNS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
PARENTS = st.sampled_from([b"a", b"b"])


def equal(first, second):
    return next((i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), None)


@given(st.lists(st.tuples(st.integers(1, 8), PARENTS, RUNS, st.booleans()), max_size=30), PARENTS, RUNS)
def test_the_longest_run_is_found_as_by_looking_at_all(changes, parent, wanted):
    runs, held = PageRuns(), {}
    for page, name, ids, remove in changes:
        held.pop(page, None)
        if remove:
            runs.discard(page)
        else:
            runs.add(page, name, ids)
            if not any(other == name and run[: len(ids)] == ids for other, run in held.values()):
                held[page] = (name, ids)
        assert {page for page in range(1, 9) if page in runs} == set(held)
        runs.check_integrity()
    agreements = {}
    for page, (name, run) in held.items():
        if name == parent:
            differs = equal(run, wanted)
            agreements[page] = min(len(run), len(wanted)) if differs is None else differs
    page, count = runs.longest(parent, wanted)
    assert count == max(agreements.values(), default=0)
    if count:
        assert agreements[page] == count


def test_integrity_check_sees_runs_of_free_pages():
    pool = BlockPool(4, 4)
    pages = pool.allocate(2)
    pool.offer(pages[0], b"root", [1, 2])
    pool.check_integrity()
    pool._runs.add(3, b"root", [5])
    with pytest.raises(RuntimeError, match="Page 3 is kept as cache without a name"):
        pool.check_integrity()
    pool._runs.discard(3)
    pool._runs._of[pages[0]] = (b"root", (1,))
    with pytest.raises(RuntimeError, match="listed wrongly"):
        pool.check_integrity()


def test_an_offered_page_is_kept_until_its_room_is_needed():
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2)
    pool.offer(first, b"root", [1, 2])
    pool.offer(second, b"root", [1])  # the other holds it too
    pool.release([first, second])
    assert pool.usage == (0, 1, 2)
    assert pool.longest_run(b"root", [1, 2, 3]) == (first, 2)
    assert pool.longest_run(b"other", [1, 2, 3])[1] == 0
    pool.retain([first])
    pool.offer(first, b"root", [1, 2, 3])
    assert pool.longest_run(b"root", [1, 2, 3]) == (first, 3)
    pool.forget([first])
    assert pool.longest_run(b"root", [1, 2, 3])[1] == 0
    pool.release([first])
    assert pool.usage == (0, 0, 3)
    with pytest.raises(RuntimeError, match="nothing to offer"):
        pool.offer(first, b"root", [1])
    pool.check_integrity()


def test_a_page_that_is_only_kept_may_be_forgotten():
    pool = BlockPool(4, 4)
    (page,) = pool.allocate(1)
    pool.register(page, b"n")
    pool.release([page])
    pool.offer(page, b"root", [1, 2, 3, 4])
    assert pool.run_of(page) == (1, 2, 3, 4)
    assert (pool.page_named(b"n"), pool.usage) == (page, (0, 1, 2))
    pool.forget([page])
    assert (pool.page_named(b"n"), pool.run_of(page), pool.usage) == (None, (), (0, 0, 3))
    pool.check_integrity()


def test_an_evicted_page_offers_nothing_and_its_name_is_told():
    told = []
    pool = BlockPool(3, 4, on_evict=lambda page, name: told.append((page, name)))
    named, offered = pool.allocate(2)
    pool.register(named, b"n")
    pool.offer(named, b"root", [1, 2, 3, 4])
    pool.offer(offered, b"n", [5])
    pool.release([named, offered])
    pool.allocate(2)
    assert told == [(named, b"n")]
    assert pool.longest_run(b"root", [1, 2])[1] == pool.longest_run(b"n", [5])[1] == 0
    pool.check_integrity()
