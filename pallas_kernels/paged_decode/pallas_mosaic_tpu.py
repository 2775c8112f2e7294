"""Paged decode for TPU: pages copied block by block while the block before is computed; new rows written in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu
from pallas_kernels.mosaic_tpu import Features, OnlineSoftmax, PageBlocks, Visible
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec

BLOCK_TOKENS = 4096
"""Most positions of a block. Only few and narrow heads reach it: with fewer, their blocks would be short copies."""

CORES = 2
"""Shares that a batch is divided into: v5p runs one kernel on two cores. One core takes the shares one after the other,
at the cost of one block whose copy nothing hides."""


def unsupported(
    q: Any,
    k: Any,
    v: Any,
    pages: KVPages,
    page_table: Any,
    lengths: Any,
    spec: AttentionSpec,
    *,
    sinks: Any = None,
) -> str | None:
    """Why this lowering cannot run these arguments (arrays or their shapes), in a sentence; None when it can."""
    del k, v, lengths, spec, sinks
    return mosaic_tpu.attention_reason(q, pages, page_table, BLOCK_TOKENS)


def paged_decode(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KVPages]:
    """`paged_decode` as a Mosaic TPU kernel; shapes as in the public operation.

    Where keys or values are no multiple of 128 features (d=64), queries are padded with zeros to the whole page row of
    k_dim + v_dim features, and scores and sums run over all of it: twice the arithmetic, no more memory or bandwidth.
    Scales of pages smaller than 128 positions are laid out anew by XLA around the call, which copies all of them; int8
    and float8_e4m3fn pages are best 128 positions large.
    """
    plan = _plan(q, k, pages, page_table, spec, sinks)
    batch, features = q.shape[0], plan.features
    grouped = q.reshape(batch, plan.kv_heads, plan.group, features.k_dim)
    padding = ((0, 0), (0, 0), (0, plan.rows - plan.group), (0, features.key_width - features.k_dim))
    grouped = jnp.pad(grouped, padding)
    scalars = (lengths, page_table.reshape(-1), _next_rows(lengths, plan.shares))
    inputs: list[jax.Array] = [grouped]
    if sinks is not None:
        inputs.append(mosaic_tpu.sink_rows(sinks, plan.kv_heads, 1, plan.rows))
    if k is not None:
        rows, row_scales = mosaic_tpu.join_rows(k, v, pages)
        inputs.append(rows)
        if row_scales is not None:
            inputs.append(row_scales[..., None])
    pool = mosaic_tpu.pool_arrays(pages)
    out, *written = _call(plan, scalars, inputs, pool)
    out = out[:, :, : plan.group, features.kept].reshape(batch, q.shape[1], features.v_dim)
    return out, KVPages(*written) if plan.writes else pages


@dataclass(frozen=True)
class _Plan:
    """The static shape of one call. rows: query rows of a KV head, `group` of them real, in whole register tiles."""

    batch: int
    kv_heads: int
    group: int
    rows: int
    block_pages: int
    columns: int
    write_rows: int
    writes: bool
    scaled: bool
    sinks: bool
    features: Features
    spec: AttentionSpec
    out_dtype: Any

    @property
    def shares(self) -> int:
        """Parts of the batch that may run on different cores."""
        return CORES if self.batch % CORES == 0 and self.batch >= 4 * CORES else 1


def _plan(q: Any, k: Any, pages: KVPages, page_table: Any, spec: AttentionSpec, sinks: Any) -> _Plan:
    batch, q_heads, _ = q.shape
    group, dtype = q_heads // pages.kv_heads, pages.data.dtype
    columns = page_table.shape[1]
    return _Plan(
        batch=batch,
        kv_heads=pages.kv_heads,
        group=group,
        rows=mosaic_tpu.round_up(group, 8),
        block_pages=mosaic_tpu.pages_per_block(pages, columns, BLOCK_TOKENS),
        columns=columns,
        write_rows=mosaic_tpu.write_rows(dtype, pages.page_size),
        writes=k is not None,
        scaled=pages.scales is not None,
        sinks=sinks is not None,
        features=mosaic_tpu.features_of(spec, pages.width),
        spec=spec,
        out_dtype=q.dtype,
    )


def _next_rows(lengths: jax.Array, shares: int) -> jax.Array:
    """For the start of each share and for each of its rows, the share's next non-empty row, or the batch size.

    i32[shares, rows of a share + 1], flat: entry 0 of a share is its first non-empty row, entry 1 + i the one after i.
    """
    batch = lengths.shape[0]
    rows = jnp.where(lengths > 0, jnp.arange(batch, dtype=jnp.int32), batch).reshape(shares, -1)
    following = lax.cummin(rows, axis=1, reverse=True)
    end = jnp.full((shares, 1), batch, jnp.int32)
    return jnp.concatenate([following, end], axis=1).reshape(-1)


def _call(plan: _Plan, scalars: tuple[jax.Array, ...], inputs: list[jax.Array], pool: list[jax.Array]) -> Any:
    share_rows = plan.batch // plan.shares
    data = pool[0]
    heads, page_size, width = data.shape[1:]

    def batch_block(array: Any) -> pl.BlockSpec:
        block = (1, *array.shape[1:])
        return pl.BlockSpec(block, lambda share, row, *_: (share * share_rows + row, *(0,) * (len(block) - 1)))

    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    in_pool = pl.BlockSpec(memory_space=pltpu.HBM)
    in_specs = [batch_block(inputs[0])]
    in_specs += [whole] if plan.sinks else []
    in_specs += [batch_block(array) for array in inputs[1 + plan.sinks :]]
    in_specs += [in_pool] * len(pool)
    out = jax.ShapeDtypeStruct((plan.batch, heads, plan.rows, plan.features.sum_width), plan.out_dtype)
    out_shape = [out]
    if plan.writes:
        out_shape += [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pool]
    tokens = plan.block_pages * page_size
    scratch: dict[str, Any] = {
        "buffer": pltpu.VMEM((2, plan.block_pages, heads, page_size, width), data.dtype),
        "semaphores": pltpu.SemaphoreType.DMA((2,)),
        "highest": pltpu.VMEM((heads, plan.rows, mosaic_tpu.LANES), jnp.float32),
        "total": pltpu.VMEM((heads, plan.rows, mosaic_tpu.LANES), jnp.float32),
        "sums": pltpu.VMEM((heads, plan.rows, plan.features.sum_width), jnp.float32),
        "counts": pltpu.SMEM((2,), jnp.int32),
    }
    if plan.scaled:
        scratch["scale_buffer"] = pltpu.VMEM((2, plan.block_pages, *pool[1].shape[1:]), jnp.float32)
        scratch["spread"] = pltpu.VMEM((2, heads, 1, tokens), jnp.float32)
    if plan.writes:
        scratch["changed"] = pltpu.VMEM((2, heads, plan.write_rows, width), data.dtype)
        scratch["write_semaphores"] = pltpu.SemaphoreType.DMA((2,))
    if plan.writes and plan.scaled:
        scratch["changed_scales"] = pltpu.VMEM((2, *pool[1].shape[1:]), jnp.float32)
    first_pool = len(scalars) + len(inputs)

    def kernel(*refs: Any) -> None:
        named = dict(zip(scratch, refs[len(refs) - len(scratch) :], strict=True))
        _Kernel(plan, refs[: len(refs) - len(scratch)], named).run()

    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(plan.shares, share_rows),
            in_specs=in_specs,
            out_specs=[batch_block(out)] + [in_pool] * (len(out_shape) - 1),
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={first_pool + i: 1 + i for i in range(len(pool))} if plan.writes else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT
        ),
        cost_estimate=_cost(plan, scalars, inputs, pool),
        name="paged_decode",
    )(*scalars, *inputs, *pool)


def _cost(plan: _Plan, scalars: Any, inputs: Any, pool: Any) -> pl.CostEstimate:
    """The work of a call in which every sequence fills its row of the page table (or its window)."""
    page_size = pool[0].shape[2]
    columns = plan.columns
    if plan.spec.window is not None:
        columns = min(columns, (plan.spec.window + page_size - 2) // page_size + 1)
    pages = KVPages(*pool)
    positions = plan.batch * columns * page_size
    query_heads = plan.kv_heads * plan.group
    widths = mosaic_tpu.round_up(plan.features.key_width, 128) + mosaic_tpu.round_up(plan.features.sum_width, 128)
    moved = plan.batch * columns * mosaic_tpu.page_bytes(pages)
    moved += sum(mosaic_tpu.array_bytes(array) for array in (*scalars, *inputs))
    moved += plan.batch * plan.kv_heads * plan.rows * plan.features.sum_width * np.dtype(plan.out_dtype).itemsize
    if plan.writes:
        moved += plan.batch * mosaic_tpu.write_bytes(pages)
    return pl.CostEstimate(
        flops=2 * positions * query_heads * widths, transcendentals=positions * query_heads, bytes_accessed=moved
    )


class _Kernel:
    """The kernel's body: one grid step is one sequence."""

    def __init__(self, plan: _Plan, refs: tuple[Any, ...], scratch: dict[str, Any]) -> None:
        remaining = list(refs)
        self.plan = plan
        self.lengths, table, self.next_rows = (remaining.pop(0) for _ in range(3))
        self.queries = remaining.pop(0)
        self.sinks = remaining.pop(0) if plan.sinks else None
        self.new_rows = remaining.pop(0) if plan.writes else None
        self.new_scales = remaining.pop(0) if plan.writes and plan.scaled else None
        count = 1 + plan.scaled
        pool_in, self.out = remaining[:count], remaining[count]
        # The written pool is the pool that was read: both names mean the same memory.
        pool = remaining[count + 1 :] if plan.writes else pool_in
        self.scratch = scratch
        self.softmax = OnlineSoftmax(scratch["highest"], scratch["total"], scratch["sums"])
        self.blocks = PageBlocks(
            pool=pool[0],
            scales=pool[1] if plan.scaled else None,
            buffer=scratch["buffer"],
            scale_buffer=scratch.get("scale_buffer"),
            spread=scratch.get("spread"),
            semaphores=scratch["semaphores"],
            table=table,
            columns=plan.columns,
        )
        self.counts = scratch["counts"]

    def run(self) -> None:
        """Attend for the grid step's sequence; its first block was begun by the sequence before."""
        share, step = pl.program_id(0), pl.program_id(1)
        share_rows = self.plan.batch // self.plan.shares
        row = share * share_rows + step
        chain = share * (share_rows + 1) + step

        @pl.when(step == 0)
        def _begin() -> None:
            self.counts[0] = 0
            self.counts[1] = 0
            self._start(self.next_rows[chain], 0, 0)

        self.softmax.reset(self.sinks)
        blocks = self._extent(row)[2]

        def one_block(index: Any, carry: None) -> None:
            slot = lax.rem(self.counts[0], 2)
            at_end = index + 1 == blocks
            following = jnp.where(at_end, self.next_rows[chain + 1], row)
            self._start(following, jnp.where(at_end, 0, index + 1), 1 - slot)
            self._attend(row, index, slot, at_end)
            self.counts[0] = self.counts[0] + 1
            return carry

        lax.fori_loop(0, blocks, one_block, None)
        self._finish(blocks > 0)
        if self.plan.writes:

            @pl.when(step == share_rows - 1)
            def _drain() -> None:
                for back in (2, 1):

                    @pl.when(self.counts[1] >= back)
                    def _one(back: int = back) -> None:
                        self._wait_write(lax.rem(self.counts[1] - back, 2))

    def _extent(self, row: Any) -> tuple[Any, Any, Any]:
        """First visible column of the page table, the column after the last, and the number of blocks between."""
        length = self.lengths[row]
        end = pl.cdiv(length, self.blocks.page_size)
        first = 0
        if self.plan.spec.window is not None:
            first = jnp.maximum(length - self.plan.spec.window, 0) // self.blocks.page_size
        return first, end, pl.cdiv(end - first, self.blocks.pages)

    def _start(self, row: Any, index: Any, slot: Any) -> None:
        """Start copying a block of a sequence, unless `row` says that there is none."""

        @pl.when(row < self.plan.batch)
        def _copy() -> None:
            first, end, _ = self._extent(row)
            self.blocks.start(row, first + index * self.blocks.pages, end, slot)

    def _attend(self, row: Any, index: Any, slot: Any, at_end: Any) -> None:
        blocks, length, window = self.blocks, self.lengths[row], self.plan.spec.window
        first, end, _ = self._extent(row)
        column = first + index * blocks.pages
        base = column * blocks.page_size
        blocks.wait(row, column, end, slot)
        if self.plan.writes:

            @pl.when(at_end)
            def _insert() -> None:
                self._write(row, slot, length - 1 - base, column)

        begin = 0 if window is None else jnp.maximum(length - window, 0)
        edge = (base < begin) | (base + blocks.tokens > length)

        def attend(visible: Visible | None) -> None:
            queries = self.queries.at[0]
            mosaic_tpu.attend_block(blocks, self.softmax, queries, slot, visible, self.plan.spec, self.plan.features)

        @pl.when(jnp.logical_not(edge))
        def _everything_visible() -> None:
            attend(None)

        @pl.when(edge)
        def _partly_visible() -> None:
            position = base + lax.broadcasted_iota(jnp.int32, (self.plan.rows, blocks.tokens), 1)
            attend(Visible((position >= begin) & (position < length), base, begin, length))

    def _write(self, row: Any, slot: Any, place: Any, column: Any) -> None:
        """Insert the new row at position `place` of the block in buffer `slot`, and write its tile back to the pool."""
        blocks, size = self.blocks, self.blocks.page_size
        count = self.counts[1]
        target = lax.rem(count, 2)

        @pl.when(count >= 2)
        def _free() -> None:
            self._wait_write(target)

        index, offset = place // size, lax.rem(place, size)
        rows = self.plan.write_rows
        start = pl.multiple_of(offset // rows * rows, rows)
        changed, buffer = self.scratch["changed"], blocks.buffer
        for head in range(self.plan.kv_heads):
            old = buffer[slot, index, head, pl.ds(start, rows), :].astype(jnp.float32)
            new = self.new_rows[0, head : head + 1, :].astype(jnp.float32)  # pyright: ignore[reportOptionalSubscript]
            here = lax.broadcasted_iota(jnp.int32, old.shape, 0) == offset - start
            tile = jnp.where(here, new, old).astype(buffer.dtype)
            buffer[slot, index, head, pl.ds(start, rows), :] = tile
            changed[target, head] = tile
        if self.plan.scaled:
            old = blocks.scale_buffer[slot, index]
            here = lax.broadcasted_iota(jnp.int32, old.shape, 2) == offset
            scales = jnp.where(here, self.new_scales[0], old)  # pyright: ignore[reportOptionalSubscript]
            blocks.scale_buffer[slot, index] = scales
            self.scratch["changed_scales"][target] = scales
        for copy in self._write_copies(blocks.page_id(row, column + index), start, target):
            copy.start()
        self.counts[1] = count + 1

    def _write_copies(self, page: Any, start: Any, target: Any) -> list[Any]:
        semaphore = self.scratch["write_semaphores"].at[target]
        # A whole page is named as such: a slice of it, even a full one, would have to be known to be aligned.
        whole = self.plan.write_rows == self.blocks.page_size
        rows = slice(None) if whole else pl.ds(start, self.plan.write_rows)
        copies = [
            pltpu.make_async_copy(self.scratch["changed"].at[target], self.blocks.pool.at[page, :, rows, :], semaphore)
        ]
        if self.plan.scaled:
            changed = self.scratch["changed_scales"].at[target]
            copies.append(pltpu.make_async_copy(changed, self.blocks.scales.at[page], semaphore))
        return copies

    def _wait_write(self, target: Any) -> None:
        # A wait counts bytes, and every write moves as many; which page it went to does not matter.
        for copy in self._write_copies(0, 0, target):
            copy.wait()

    def _finish(self, any_block: Any) -> None:
        @pl.when(any_block)
        def _result() -> None:
            def one_head(head: Any) -> None:
                self.out[0, head] = self.softmax.result(head).astype(self.out.dtype)

            mosaic_tpu.for_each_head(self.plan.kv_heads, self.plan.rows, one_head)

        @pl.when(jnp.logical_not(any_block))
        def _empty() -> None:
            self.out[...] = jnp.zeros_like(self.out)
