"""Writing new keys and values into their pages on TPU: groups of rows are read, changed and written back in place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu
from pallas_kernels.pages import KVPages

GROUP_ROWS = 32
"""Rows of a page that are read and written together, where pages have no scales: whole tiles of every type."""

SLOTS = 4
"""Groups under way at a time: two being read, one being changed, one or two being written."""

AHEAD = 2
"""How many groups ahead of the one being changed the reads run."""

SOURCE_ROWS = 32
"""New rows are copied from a multiple of this many rows: whole tiles of every type."""

MAX_TOKENS = 1 << 15
"""Tokens whose five numbers each fit into scalar memory (1 MiB a core): 640 KiB."""


def unsupported(k: Any, v: Any, pages: KVPages, page_ids: Any, offsets: Any) -> str | None:
    """Why this lowering cannot run these arguments (arrays or their shapes), in a sentence; None when it can."""
    del v, page_ids, offsets
    if k.shape[0] > MAX_TOKENS:
        return f"A call writes {k.shape[0]} tokens, but the scalar memory of a TPU core holds {MAX_TOKENS}: split it."
    reason = mosaic_tpu.pages_reason(pages)
    if reason is not None:
        return reason
    needed = _plan(k.shape[0], pages).vmem_bytes
    if needed > mosaic_tpu.VMEM_LIMIT // 2:
        limit = mosaic_tpu.VMEM_LIMIT >> 21
        return f"The groups under way need {needed >> 20} MiB of vector memory, but the limit is {limit} MiB."
    return None


def kv_write(k: jax.Array, v: jax.Array | None, pages: KVPages, page_ids: jax.Array, offsets: jax.Array) -> KVPages:
    """`kv_write` as a Mosaic TPU kernel; shapes as in the public operation.

    Consecutive tokens in consecutive positions are written together, as a run, up to a group of rows. Lone tokens are
    right too, but each moves its whole group twice; decode writes its rows inside `paged_decode` instead.
    """
    if k.shape[0] == 0:
        return pages
    plan = _plan(k.shape[0], pages)
    rows, row_scales = mosaic_tpu.join_rows(k, v, pages)
    sources = [jnp.pad(rows.transpose(1, 0, 2), ((0, 0), (0, plan.padded_tokens - plan.tokens), (0, 0)))]
    if row_scales is not None:
        lanes = plan.padded_scale_lanes - plan.tokens
        sources.append(jnp.pad(row_scales.transpose(1, 2, 0), ((0, 0), (0, 0), (0, lanes))))
    return KVPages(*_call(plan, _runs(plan, page_ids, offsets), sources, pages))


@dataclass(frozen=True)
class _Plan:
    """The static shape of one call. group: rows of a page that are read and written together."""

    tokens: int
    kv_heads: int
    page_size: int
    width: int
    group: int
    scaled: bool
    dtype: Any

    @property
    def window(self) -> int:
        """New rows copied for a run: they hold it wherever it starts in the first SOURCE_ROWS of them."""
        return mosaic_tpu.round_up(self.group, SOURCE_ROWS) + SOURCE_ROWS

    @property
    def padded_tokens(self) -> int:
        """Rows of the source, so that every window lies inside."""
        return mosaic_tpu.round_up(self.tokens, SOURCE_ROWS) + self.window

    @property
    def padded_scale_lanes(self) -> int:
        """Lanes of the scales' source, so that every window of two lane tiles lies inside."""
        return mosaic_tpu.round_up(self.tokens, mosaic_tpu.LANES) + mosaic_tpu.LANES

    @property
    def scratch(self) -> dict[str, Any]:
        """Buffers and semaphores of the kernel."""
        rows = (SLOTS, self.kv_heads)
        scratch: dict[str, Any] = {
            "group": pltpu.VMEM((*rows, self.group, self.width), self.dtype),
            "source": pltpu.VMEM((*rows, self.window, self.width), self.dtype),
            "read_semaphores": pltpu.SemaphoreType.DMA((SLOTS,)),
            "write_semaphores": pltpu.SemaphoreType.DMA((SLOTS,)),
            "finished": pltpu.SMEM((1,), jnp.int32),
        }
        if self.scaled:
            scratch["scales"] = pltpu.VMEM((SLOTS, 2, self.kv_heads, self.group), jnp.float32)
            scratch["source_scales"] = pltpu.VMEM((SLOTS, 2, self.kv_heads, 2 * mosaic_tpu.LANES), jnp.float32)
        return scratch

    @property
    def vmem_bytes(self) -> int:
        """Bytes of vector memory that groups and windows take."""
        width = mosaic_tpu.round_up(self.width, mosaic_tpu.LANES) * np.dtype(self.dtype).itemsize
        return SLOTS * self.kv_heads * (self.group + self.window) * width


def _plan(tokens: int, pages: KVPages) -> _Plan:
    size, scaled = pages.page_size, pages.scales is not None
    group = math.gcd(size, GROUP_ROWS)
    if scaled:
        # Scales have positions on lanes: what is written together are whole lane tiles, or the page if it is smaller.
        group = mosaic_tpu.LANES if size % mosaic_tpu.LANES == 0 else size
    return _Plan(tokens, pages.kv_heads, size, pages.width, group, scaled, pages.data.dtype)


def _runs(plan: _Plan, page_ids: jax.Array, offsets: jax.Array) -> tuple[jax.Array, ...]:
    """Runs of tokens that go to consecutive rows of one group, in the tokens' order, padding left out.

    i32[1] number of runs; i32[T] each: first token, tokens, page and offset of each run, and whether its group is also
    among those of the SLOTS runs before it, so that it must not be read before they are written.
    """
    index = jnp.arange(plan.tokens, dtype=jnp.int32)
    valid = page_ids != 0
    groups = jnp.where(valid, page_ids * (plan.page_size // plan.group) + offsets // plan.group, -1)
    follows = (groups[1:] == groups[:-1]) & (offsets[1:] == offsets[:-1] + 1)
    begins = jnp.concatenate([jnp.ones(1, bool), ~follows])
    # The first index at or after each token that begins something new, so that a run ends where the next begins.
    following = lax.cummin(jnp.where(begins, index, plan.tokens), reverse=True)
    following = jnp.append(following[1:], plan.tokens)
    count = jnp.sum(begins & valid, dtype=jnp.int32).reshape(1)
    # Sorting the tokens that begin a run to the front keeps their order; a gather of single numbers would be slower.
    key = jnp.where(begins & valid, index, plan.tokens)
    columns = lax.sort((key, following - index, groups, page_ids, offsets), num_keys=1)
    first, lengths, run_groups, run_pages, run_offsets = (column.astype(jnp.int32) for column in columns)
    again = jnp.zeros(plan.tokens, bool)
    for back in range(1, min(SLOTS + 1, plan.tokens)):
        again |= jnp.pad(run_groups[back:] == run_groups[:-back], (back, 0))
    return count, first, lengths, run_pages, run_offsets, again.astype(jnp.int32)


def _call(plan: _Plan, runs: tuple[jax.Array, ...], sources: list[jax.Array], pages: KVPages) -> Any:
    pool = mosaic_tpu.pool_arrays(pages)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    scratch = plan.scratch
    copied = plan.tokens * mosaic_tpu.write_bytes(pages) // mosaic_tpu.write_rows(plan.dtype, plan.page_size)

    def kernel(*refs: Any) -> None:
        named = dict(zip(scratch, refs[len(refs) - len(scratch) :], strict=True))
        inputs = refs[len(runs) : len(runs) + len(sources)]
        outputs = refs[len(refs) - len(scratch) - len(pool) : len(refs) - len(scratch)]
        _Kernel(plan, refs[: len(runs)], inputs, outputs, named).run()

    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pool],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(runs),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(sources) + [in_hbm] * len(pool),
            out_specs=[in_hbm] * len(pool),
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={len(runs) + len(sources) + i: i for i in range(len(pool))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            # Full groups, as in a long prefill: new rows are read in windows twice as long, groups written once.
            bytes_accessed=copied * (plan.window + plan.group) // plan.group,
        ),
        name="kv_write",
    )(*runs, *sources, *pool)


class _Kernel:
    """The kernel's body: one loop over the runs, reads ahead of it and writes behind it."""

    def __init__(self, plan: _Plan, runs: Any, sources: Any, pool: Any, scratch: dict[str, Any]) -> None:
        self.plan = plan
        self.count, self.first, self.tokens, self.page, self.offset, self.again = runs
        self.sources, self.pool, self.scratch = sources, pool, scratch
        self.finished = scratch["finished"]

    def run(self) -> None:
        """Write every run."""
        count = self.count[0]
        self.finished[0] = 0

        def prefetch(run: Any) -> None:
            @pl.when((run < count) & (self.again[jnp.minimum(run, self.plan.tokens - 1)] == 0))
            def _start() -> None:
                self._read(run, lambda copy: copy.start())

        def one_run(run: Any, carry: None) -> None:
            # The slot that the read ahead goes to must be free.
            self._finish_writes(run + AHEAD - SLOTS + 1)
            prefetch(run + AHEAD)

            @pl.when(self.again[run] != 0)
            def _late_read() -> None:
                self._finish_writes(run)
                self._read(run, lambda copy: copy.start())

            self._read(run, lambda copy: copy.wait())
            self._change(run)
            for copy in self._writes(run):
                copy.start()
            return carry

        for run in range(min(AHEAD, self.plan.tokens)):
            prefetch(run)
        lax.fori_loop(0, count, one_run, None)
        self._finish_writes(count)

    def _place(self, run: Any) -> tuple[Any, Any]:
        """First row of the run's group in its page, and the run's first row in the group."""
        group = self.plan.group
        start = self.offset[run] // group * group
        return pl.multiple_of(start, group), self.offset[run] - start

    def _groups(self, run: Any) -> list[tuple[Any, Any]]:
        """(in the pool, in vector memory) of the run's group, and of its scales."""
        slot, page = lax.rem(run, SLOTS), self.page[run]
        # A whole page is named as such: a slice of it, even a full one, would have to be known to be aligned.
        whole = self.plan.group == self.plan.page_size
        rows = slice(None) if whole else pl.ds(self._place(run)[0], self.plan.group)
        pairs = [(self.pool[0].at[page, :, rows, :], self.scratch["group"].at[slot])]
        if self.plan.scaled:
            pairs.append((self.pool[1].at[page, :, :, rows], self.scratch["scales"].at[slot]))
        return pairs

    def _read(self, run: Any, act: Any) -> None:
        """`act` on the copies that bring the run's new rows and, unless it fills its group, what the group holds."""
        slot = lax.rem(run, SLOTS)
        semaphore = self.scratch["read_semaphores"].at[slot]
        first = pl.multiple_of(self.first[run] // SOURCE_ROWS * SOURCE_ROWS, SOURCE_ROWS)
        rows = self.sources[0].at[:, pl.ds(first, self.plan.window), :]
        act(pltpu.make_async_copy(rows, self.scratch["source"].at[slot], semaphore))
        if self.plan.scaled:
            lane = pl.multiple_of(self.first[run] // mosaic_tpu.LANES * mosaic_tpu.LANES, mosaic_tpu.LANES)
            scales = self.sources[1].at[:, :, pl.ds(lane, 2 * mosaic_tpu.LANES)]
            act(pltpu.make_async_copy(scales, self.scratch["source_scales"].at[slot], semaphore))

        @pl.when(self.tokens[run] < self.plan.group)
        def _partial() -> None:
            for stored, here in self._groups(run):
                act(pltpu.make_async_copy(stored, here, semaphore))

    def _writes(self, run: Any) -> list[Any]:
        semaphore = self.scratch["write_semaphores"].at[lax.rem(run, SLOTS)]
        return [pltpu.make_async_copy(here, stored, semaphore) for stored, here in self._groups(run)]

    def _finish_writes(self, end: Any) -> None:
        """Wait until the runs before `end` are written."""

        def wait(run: Any, carry: None) -> None:
            for copy in self._writes(run):
                copy.wait()
            return carry

        end = jnp.maximum(end, self.finished[0])
        lax.fori_loop(self.finished[0], end, wait, None)
        self.finished[0] = end

    def _change(self, run: Any) -> None:
        """Put the new rows and scales into the group in vector memory."""
        slot, (_, begin) = lax.rem(run, SLOTS), self._place(run)
        end = begin + self.tokens[run]
        group, source = self.scratch["group"], self.scratch["source"]
        # Rolling moves the run from where it lies in the window to where it belongs in the group.
        shift = lax.rem(begin - lax.rem(self.first[run], SOURCE_ROWS) + self.plan.window, self.plan.window)

        def one_head(head: Any) -> None:
            new = pltpu.roll(source[slot, head].astype(jnp.float32), shift, 0)[: self.plan.group]
            old = group[slot, head].astype(jnp.float32)
            row = lax.broadcasted_iota(jnp.int32, old.shape, 0)
            group[slot, head] = jnp.where((row >= begin) & (row < end), new, old).astype(group.dtype)

        mosaic_tpu.for_each_head(self.plan.kv_heads, self.plan.group, one_head)
        if self.plan.scaled:
            window = 2 * mosaic_tpu.LANES
            shift = lax.rem(begin - lax.rem(self.first[run], mosaic_tpu.LANES) + window, window)
            for which in range(2):
                new = pltpu.roll(self.scratch["source_scales"][slot, which], shift, 1)[:, : self.plan.group]
                old = self.scratch["scales"][slot, which]
                lane = lax.broadcasted_iota(jnp.int32, old.shape, 1)
                self.scratch["scales"][slot, which] = jnp.where((lane >= begin) & (lane < end), new, old)
