"""Whole pages that are copied inside the pool or moved to host memory and back: every bit of them, in place."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.step import PageCopy, PageIn, PageOut
from jaxinfer.runtime.page_moves import (
    PAGES_PER_CALL,
    TRANSFERS_IN_FLIGHT,
    HostPages,
    PageMover,
    calls_of,
    copy_pages,
    gather_pages,
    scatter_pages,
)
from pallas_kernels import empty_pages

NUM_PAGES, HEADS, SIZE, WIDTH, LAYERS = 40, 2, 8, 8, 3


def pool(dtype, seed=0, num_pages=NUM_PAGES):
    """A pool of random bits, its scales too, and the same on the host."""
    numbers = np.random.default_rng(seed)

    def filled(array):
        return jnp.asarray(numbers.integers(0, 100, array.shape).astype(array.dtype))

    kv = tuple(jax.tree.map(filled, empty_pages(num_pages, HEADS, SIZE, WIDTH, dtype)) for _ in range(LAYERS))
    return kv, [np.array(leaf) for leaf in jax.tree.leaves(kv)]


@cache
def programs(dtype):
    kv, _ = pool(dtype)
    pages = jnp.zeros(PAGES_PER_CALL, jnp.int32)
    blocks = gather_pages(kv, pages)
    copy = jax.jit(copy_pages, donate_argnums=0).lower(kv, pages, pages, jnp.int32(0)).compile()
    gather = jax.jit(gather_pages).lower(kv, pages).compile()
    return copy, gather, jax.jit(scatter_pages, donate_argnums=0).lower(kv, blocks, pages).compile()


def mover(kv, slots):
    return PageMover(*programs(kv[0].data.dtype.name), HostPages(kv, slots))


def assert_pool(kv, expected):
    for leaf, wanted in zip(jax.tree.leaves(kv), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[1:], wanted[1:])  # page 0 takes the padding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("count", [1, PAGES_PER_CALL, 2 * PAGES_PER_CALL + 3])
def test_pages_go_out_come_in_and_are_copied_bit_by_bit(dtype, count):
    kv, before = pool(dtype)
    assert len(before) == LAYERS * (2 if dtype in ("int8", "float8_e4m3fn") else 1)
    moves = mover(kv, 64)
    numbers = np.random.default_rng(count)
    pages = numbers.permutation(np.arange(1, NUM_PAGES)).tolist()
    out, into = pages[:count], pages[count : 2 * count]
    slots = numbers.permutation(64)[:count].tolist()
    outs = [PageOut(page, slot) for page, slot in zip(out, slots, strict=True)]
    # All go out and are overwritten by copies of one other in the same round.
    victim = pages[-1]
    expected = [leaf.copy() for leaf in before]
    for leaf in expected:
        leaf[out] = leaf[victim]
    kv = moves.move(kv, outs, [PageCopy(victim, page) for page in out], ())
    assert_pool(kv, expected)
    # They come back elsewhere; what was there is copied first.
    ins = [PageIn(slot, page) for page, slot in zip(into, slots, strict=True)]
    kv = moves.move(kv, (), [PageCopy(page, old) for page, old in zip(into, out, strict=True)], ins)
    for leaf, first in zip(expected, before, strict=True):
        leaf[out], leaf[into] = first[into], first[out]
    assert_pool(kv, expected)


def test_a_page_may_come_back_in_the_round_it_goes_out():
    kv, before = pool("float32")
    moves = mover(kv, 4)
    kv = moves.move(kv, [PageOut(3, 2), PageOut(5, 0)], [PageCopy(5, 7)], [PageIn(2, 5), PageIn(0, 3)])
    expected = [leaf.copy() for leaf in before]
    for leaf, first in zip(expected, before, strict=True):
        leaf[5], leaf[3], leaf[7] = first[3], first[5], first[5]
    assert_pool(kv, expected)


def test_the_last_page_moved_to_a_slot_is_the_one_that_comes_back():
    """A slot is used again while its earlier page is still on its way; more calls than may be on the way at once."""
    kv, before = pool("int8")
    moves = mover(kv, 3)
    for page in range(1, 4 * TRANSFERS_IN_FLIGHT):
        kv = moves.move(kv, [PageOut(page, page % 3)], (), ())
    last = 4 * TRANSFERS_IN_FLIGHT - 1
    kv = moves.move(kv, (), (), [PageIn(last % 3, 30), PageIn((last - 1) % 3, 31)])
    expected = [leaf.copy() for leaf in before]
    for leaf, first in zip(expected, before, strict=True):
        leaf[30], leaf[31] = first[last], first[last - 1]
    assert_pool(kv, expected)


class Slow:
    """An array that has not arrived on the host until somebody waits for it."""

    def __init__(self, value):
        self.value, self.ready, self.began = value, False, False

    def copy_to_host_async(self):
        self.began = True

    def is_ready(self):
        return self.ready

    def __array__(self, dtype=None, copy=None):
        assert self.began
        self.ready = True
        return self.value


def test_pages_on_their_way_are_waited_for_only_when_needed_and_in_order():
    kv, _ = pool("float32")
    host = HostPages(kv, 8)
    shape = (PAGES_PER_CALL, LAYERS, HEADS, SIZE, WIDTH)
    sent = [Slow(np.full(shape, number, np.float32)) for number in range(TRANSFERS_IN_FLIGHT + 4)]
    for number in range(TRANSFERS_IN_FLIGHT):
        host.receive((sent[number],), [number % 3])
    assert not any(block.ready for block in sent)
    assert host.read([7])[0].max() == 0  # nothing goes there
    assert not any(block.ready for block in sent)
    assert host.read([1])[0][0].min() == 1  # sent second: the first is taken in too, the others not waited for
    assert [block.ready for block in sent[:3]] == [True, True, False]
    for number in range(TRANSFERS_IN_FLIGHT, TRANSFERS_IN_FLIGHT + 4):
        host.receive((sent[number],), [number % 3])
    assert [block.ready for block in sent] == [True] * 4 + [False] * TRANSFERS_IN_FLIGHT
    last = len(sent) - 1
    found = host.read([last % 3, (last - 1) % 3, (last - 2) % 3])[0]
    assert [found[row].min() for row in range(3)] == [last, last - 1, last - 2]
    host.receive((Slow(np.full(shape, 99, np.float32)),), [5])
    host.forget_arriving()
    assert host.read([5])[0].max() == 0


def test_host_memory_is_reserved_once_and_has_the_size_of_its_pages():
    kv, _ = pool("int8")
    host = HostPages(kv, 10)
    assert host.nbytes == 10 * LAYERS * (HEADS * SIZE * WIDTH + 2 * HEADS * SIZE * 4)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kv)) // NUM_PAGES * 10 == host.nbytes


def test_moves_are_in_place_and_calls_are_padded():
    kv, _ = pool("float32", num_pages=4000)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(kv))
    pages = jnp.zeros(PAGES_PER_CALL, jnp.int32)
    blocks = gather_pages(kv, pages)
    for program in (
        jax.jit(copy_pages, donate_argnums=0).lower(kv, pages, pages, jnp.int32(0)).compile(),
        jax.jit(scatter_pages, donate_argnums=0).lower(kv, blocks, pages).compile(),
    ):
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < 0.05 * size
    groups = list(calls_of([PageCopy(i, 100 + i) for i in range(1, PAGES_PER_CALL + 2)]))
    assert [len(some) for some, _ in groups] == [PAGES_PER_CALL, 1]
    assert groups[1][1].tolist() == [[PAGES_PER_CALL + 1, *[0] * 7], [101 + PAGES_PER_CALL, *[0] * 7]]


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding
from jaxinfer.runtime.page_moves import PAGES_PER_CALL, HostPages, PageMover, copy_pages, gather_pages, scatter_pages
from jaxinfer.core.step import PageCopy, PageIn, PageOut
from jaxinfer.runtime.parallel import MODEL_AXIS, state_specs
from jaxinfer.runtime.state import EngineState
from pallas_kernels import empty_pages

numbers = np.random.default_rng(0)
fill = lambda array: jnp.asarray(numbers.integers(0, 100, array.shape).astype(array.dtype))
kv = tuple(jax.tree.map(fill, empty_pages(12, 4, 8, 8, "int8")) for _ in range(2))
expected = [np.array(leaf) for leaf in jax.tree.leaves(kv)]
mesh = jax.make_mesh((4,), (MODEL_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
with jax.set_mesh(mesh):
    specs = state_specs(EngineState(kv, None, None)).kv
    kv = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), kv, specs)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(kv)]
    copy, gather, scatter = (jax.jit(f, donate_argnums=d)
                             for f, d in ((copy_pages, 0), (gather_pages, ()), (scatter_pages, 0)))
    mover = PageMover(copy, gather, scatter, HostPages(kv, 4))
    kv = mover.move(kv, [PageOut(3, 1)], [PageCopy(5, 3)], ())
    kv = mover.move(kv, (), (), [PageIn(1, 7)])
for leaf in expected:
    leaf[7] = leaf[3]
    leaf[3] = leaf[5]
for leaf, wanted, sharding in zip(jax.tree.leaves(kv), expected, shardings, strict=True):
    np.testing.assert_array_equal(np.asarray(leaf)[1:], wanted[1:])
    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.sharding, sharding)
    assert not leaf.sharding.is_fully_replicated
print("equal")
"""


def test_pages_of_a_pool_cut_over_devices_move_too():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
