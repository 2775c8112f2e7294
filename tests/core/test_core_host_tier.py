"""Slots of host memory: who has which, who makes room, and what a round may rely on."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core.host_tier import HostTier


def test_the_page_used_longest_ago_makes_room_and_pages_in_use_do_not():
    tier = HostTier(2)
    first, second = tier.put(b"a"), tier.put(b"b")
    assert sorted([first, second]) == [0, 1]
    assert tier.put(b"a") is None  # held already, and used now
    assert tier.put(b"c") == second
    assert (tier.find(b"a"), tier.find(b"b"), tier.find(b"c")) == (first, None, second)
    assert tier.take(b"a") == first
    assert tier.put(b"d") == second
    assert tier.take(b"d") == second
    assert tier.put(b"e") is None  # both are read in this round
    assert tier.used_slots == 2
    tier.begin_round()
    assert tier.put(b"e") == first
    tier.check_integrity()


def test_forgotten_pages_leave_their_slots():
    tier = HostTier(2)
    slot = tier.put(b"a")
    tier.forget(b"a")
    tier.forget(b"never there")
    assert tier.find(b"a") is None
    assert {tier.put(b"b"), tier.put(b"c")} == {0, 1}
    assert slot in (0, 1)
    tier.reset()
    assert (tier.find(b"b"), tier.used_slots) == (None, 0)
    tier.check_integrity()


def test_without_slots_nothing_is_kept():
    tier = HostTier(0)
    assert tier.put(b"a") is None
    assert tier.find(b"a") is None
    with pytest.raises(ValueError, match="at least 0 pages"):
        HostTier(-1)


def test_integrity_check_sees_a_lost_and_a_doubled_slot():
    tier = HostTier(3)
    tier.put(b"a")
    tier._free.pop()
    with pytest.raises(RuntimeError, match="lost"):
        tier.check_integrity()
    tier = HostTier(3)
    tier._slots[b"x"] = tier._slots[b"y"] = tier._free.pop()
    with pytest.raises(RuntimeError, match="two pages"):
        tier.check_integrity()


@given(st.integers(0, 4), st.lists(st.tuples(st.sampled_from(["put", "take", "forget", "round"]), st.integers(0, 6))))
def test_random_use_gives_back_what_was_put_last(size, actions):
    """Against a list in the order of use: contents follow the names, and what a round reads stays."""
    tier = HostTier(size)
    order: OrderedDict[int, None] = OrderedDict()
    memory: dict[int, int] = {}
    taken: set[int] = set()
    for action, number in actions:
        name = bytes([number])
        if action == "put":
            slot = tier.put(name)
            if number in order:
                assert slot is None
                order.move_to_end(number)
            elif len(order) < size or (order and next(iter(order)) not in taken):
                if len(order) == size:
                    order.popitem(last=False)
                order[number] = None
                memory[slot] = number
            else:
                assert slot is None
        elif action == "take" and number in order:
            assert memory[tier.take(name)] == number
            order.move_to_end(number)
            taken.add(number)
        elif action == "forget" and number not in taken:
            tier.forget(name)
            order.pop(number, None)
        elif action == "round":
            tier.begin_round()
            taken.clear()
        tier.check_integrity()
        assert tier.used_slots == len(order)
        for known in range(7):
            slot = tier.find(bytes([known]))
            assert (slot is not None) == (known in order)
            assert slot is None or memory[slot] == known
