"""Moving whole pages: copies inside the pool, and to host memory and back, by programs compiled at start-up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.step import PageCopy, PageIn, PageOut
from pallas_kernels import KVPages

PAGES_PER_CALL = 8
"""Pages that one call of a program here moves; fewer are padded with the padding page."""
TRANSFERS_IN_FLIGHT = 4
"""Calls whose pages may be on their way to the host at once: they hold device memory until they have arrived."""

KV = tuple[KVPages, ...]
Blocks = tuple[jax.Array, ...]
"""The content of some pages over all layers: for each kind of array in the pool [pages, arrays of the kind, ...]."""
_Move = TypeVar("_Move", bound=tuple[int, int])


def copy_pages(kv: KV, sources: jax.Array, targets: jax.Array, count: jax.Array) -> KV:
    """The first `count` of pages targets i32[P] become, one after the other, copies of pages sources i32[P]; donate kv.

    A loop, since a scatter into scales would lay out all of them anew on TPU.
    """

    def copy(index: jax.Array, kv: KV) -> KV:
        return jax.tree.map(lambda pool: _with_page(pool, pool[sources[index]], targets[index]), kv)

    return jax.lax.fori_loop(0, count, copy, kv)


def _with_page(pool: jax.Array, content: jax.Array, page: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(pool, content[None], page, 0)


def gather_pages(kv: KV, pages: jax.Array) -> Blocks:
    """The content of pages i32[P]."""
    pools = jax.tree.leaves(kv)
    return tuple(jnp.stack([pools[index][pages] for index in kind], axis=1) for kind in _kinds(pools))


def scatter_pages(kv: KV, blocks: Blocks, pages: jax.Array) -> KV:
    """Pages i32[P] with the content that `gather_pages` gave of others; donate kv."""
    pools, structure = jax.tree.flatten(kv)
    for kind, block in zip(_kinds(pools), blocks, strict=True):
        for position, index in enumerate(kind):
            pools[index] = pools[index].at[pages].set(block[:, position])
    return jax.tree.unflatten(structure, pools)


def _kinds(pools: Sequence[Any]) -> list[list[int]]:
    """The numbers of the arrays that are alike in shape and type, so that each kind needs one transfer."""
    kinds: dict[Any, list[int]] = {}
    for index, pool in enumerate(pools):
        kinds.setdefault((pool.shape, pool.dtype), []).append(index)
    return list(kinds.values())


def calls_of(moves: Sequence[_Move]) -> Iterator[tuple[Sequence[_Move], np.ndarray]]:
    """Moves in groups of PAGES_PER_CALL, each with its two columns i32[2, PAGES_PER_CALL], padded with zeros."""
    rest = iter(moves)
    while some := list(islice(rest, PAGES_PER_CALL)):
        columns = np.zeros((2, PAGES_PER_CALL), np.int32)
        columns[:, : len(some)] = np.array(some, np.int32).T
        yield some, columns


class HostPages:
    """Host memory for pages, all of it reserved at once.

    Pages on their way from the device are not waited for before somebody asks for them, or too many are on the way.

    kv: the pool, arrays or their shapes. num_slots: pages to hold.
    """

    def __init__(self, kv: KV, num_slots: int) -> None:
        blocks = jax.eval_shape(gather_pages, kv, jax.ShapeDtypeStruct((PAGES_PER_CALL,), jnp.int32))
        self._blocks = [np.zeros((num_slots, *block.shape[1:]), block.dtype) for block in blocks]
        self._arriving: deque[tuple[Blocks, list[int]]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(block.nbytes for block in self._blocks)

    def receive(self, blocks: Blocks, slots: list[int]) -> None:
        """Begin to copy the first pages of `blocks` into these slots."""
        for block in blocks:
            block.copy_to_host_async()
        self._arriving.append((blocks, slots))
        while self._arriving and (len(self._arriving) > TRANSFERS_IN_FLIGHT or _are_ready(self._arriving[0][0])):
            self._store_oldest()

    def read(self, slots: Sequence[int]) -> tuple[np.ndarray, ...]:
        """The content of up to PAGES_PER_CALL slots, padded to as many pages; waits for those still on their way."""
        while any(not set(slots).isdisjoint(arriving) for _, arriving in self._arriving):
            self._store_oldest()
        padded = [*slots, *([slots[0]] * (PAGES_PER_CALL - len(slots)))]
        return tuple(block[padded] for block in self._blocks)

    def forget_arriving(self) -> None:
        """Give up what is still on its way, after a failure of the device."""
        self._arriving.clear()

    def _store_oldest(self) -> None:
        blocks, slots = self._arriving.popleft()
        for kept, block in zip(self._blocks, blocks, strict=True):
            kept[slots] = np.asarray(block)[: len(slots)]


def _are_ready(blocks: Blocks) -> bool:
    return all(block.is_ready() for block in blocks)  # pyright: ignore[reportAttributeAccessIssue]


class PageMover:
    """Carries out a round's page moves.

    copy, gather, scatter: the compiled programs of this module; the latter two are not needed without host memory.
    host: None without host memory.
    """

    def __init__(self, copy: Any, gather: Any = None, scatter: Any = None, host: HostPages | None = None) -> None:
        self._copy, self._gather, self._scatter = copy, gather, scatter
        self._host = host

    def move(self, kv: KV, outs: Sequence[PageOut], copies: Sequence[PageCopy], ins: Sequence[PageIn]) -> KV:
        """Read `outs` from the pool, copy inside, then write `ins` to it; returns the pool, the given one is donated.

        Nothing is waited for, unless a page comes back while it is still on its way out.
        """
        host = self._host
        if host is not None:
            for some, (pages, _) in calls_of(outs):
                host.receive(self._gather(kv, pages), [move.host_slot for move in some])
        for some, (sources, targets) in calls_of(copies):
            kv = self._copy(kv, sources, targets, np.int32(len(some)))
        if host is not None:
            for some, (_, pages) in calls_of(ins):
                kv = self._scatter(kv, host.read([move.host_slot for move in some]), pages)
        return kv

    def reset(self) -> None:
        """After a failure: pages that are on their way to the host may never arrive."""
        if self._host is not None:
            self._host.forget_arriving()
