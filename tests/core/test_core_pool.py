from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core.pool import BlockPool


def test_every_page_but_the_padding_page_is_handed_out_once():
    pool = BlockPool(6, 4)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="1 pages were asked of the pool, but only 0 are free"):
        pool.allocate(1)
    pool.check_integrity()


def test_refused_allocation_takes_nothing():
    pool = BlockPool(4, 4)
    with pytest.raises(RuntimeError):
        pool.allocate(4)
    assert pool.free_pages == 3


def test_shared_page_is_free_only_after_its_last_release():
    pool = BlockPool(3, 4)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.free_pages == 1
    pool.release(pages)
    assert pool.free_pages == 2
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(pages)
    with pytest.raises(RuntimeError, match="is free and cannot be shared"):
        pool.retain(pages)
    pool.check_integrity()


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_for(positions, pages):
    assert BlockPool(2, 4).pages_for(positions) == pages


@pytest.mark.parametrize(("pages", "size"), [(1, 4), (2, 0)])
def test_impossible_pools_are_refused(pages, size):
    with pytest.raises(ValueError, match="at least"):
        BlockPool(pages, size)


def test_integrity_check_sees_a_lost_and_a_doubled_page():
    pool = BlockPool(4, 4)
    pool._free.append(2)
    with pytest.raises(RuntimeError, match="twice"):
        pool.check_integrity()
    pool = BlockPool(4, 4)
    pool._free.popleft()
    with pytest.raises(RuntimeError, match="Page 1"):
        pool.check_integrity()


@given(st.data())
def test_random_use_keeps_integrity(data):
    pool = BlockPool(9, 4)
    holds: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["allocate", "retain", "release"]))
        if action == "allocate":
            count = data.draw(st.integers(0, pool.free_pages))
            holds.append(pool.allocate(count))
        elif holds:
            chosen = data.draw(st.integers(0, len(holds) - 1))
            if action == "retain":
                pool.retain(holds[chosen])
                holds.append(list(holds[chosen]))
            else:
                pool.release(holds.pop(chosen))
        pool.check_integrity()
        held = [page for pages in holds for page in pages]
        assert all(pool.reference_count(page) == held.count(page) for page in range(9))
        assert pool.free_pages == 8 - len(set(held))
