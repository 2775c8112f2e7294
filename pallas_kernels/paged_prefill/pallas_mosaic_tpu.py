"""Paged prefill for TPU: ragged chunks in tiles of queries, the next block of pages copied while one is computed."""

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
from pallas_kernels.kv_write import pallas_mosaic_tpu as kv_write_tpu
from pallas_kernels.mosaic_tpu import Features, OnlineSoftmax, PageBlocks, Visible
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec

TILE_ROWS = 256
"""Most query rows of a KV head in a tile. By the compiler's schedule for v6e, 256 rows over 512 positions take 1,045
cycles, and each of 1,024 rows takes a third more: the scores then spill. A tile of 64 tokens of 4 query heads a KV head
uses a block of pages for four times as long as the block's copy takes."""

BLOCK_TOKENS = 512
"""Most positions of a block: fewer leave the matrix unit waiting, by the same schedule, and more spill."""

STATE_BYTES = 16 << 20
"""Most vector memory for a tile's running sums."""

CORES = 2
"""Shares that the tiles are divided into: v5p runs one kernel on two cores."""


def unsupported(
    q: Any,
    k: Any,
    v: Any,
    pages: KVPages,
    page_table: Any,
    query_starts: Any,
    lengths: Any,
    spec: AttentionSpec,
    *,
    sinks: Any = None,
) -> str | None:
    """Why this lowering cannot run these arguments (arrays or their shapes), in a sentence; None when it can."""
    del query_starts, lengths, spec, sinks
    reason = mosaic_tpu.attention_reason(q, pages, page_table, BLOCK_TOKENS)
    if reason is None and k is not None:
        reason = kv_write_tpu.unsupported(k, v, pages, None, None)
    return reason


def paged_prefill(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pages: KVPages,
    page_table: jax.Array,
    query_starts: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KVPages]:
    """`paged_prefill` as Mosaic TPU kernels; shapes as in the public operation.

    New keys and values are written first, by `kv_write`; attention then reads everything from the pages. A tile of
    queries that holds several sequences is computed once for each of them, so that chunks far shorter than a tile cost
    more arithmetic than they need. What padding costs is told at `paged_decode`.
    """
    if k is not None:
        page_ids, offsets = _destinations(q.shape[0], pages.page_size, page_table, query_starts, lengths)
        pages = kv_write_tpu.kv_write(k, v, pages, page_ids, offsets)
    plan = _plan(q, pages, page_table, spec, sinks)
    features, padding = plan.features, plan.tiles * plan.tile - plan.tokens
    grouped = q.reshape(plan.tokens, plan.kv_heads, plan.group, features.k_dim)
    grouped = jnp.pad(grouped, ((0, padding), (0, 0), (0, 0), (0, features.key_width - features.k_dim)))
    grouped = grouped.transpose(1, 0, 2, 3).reshape(plan.kv_heads, -1, features.key_width)
    inputs = [grouped]
    if sinks is not None:
        inputs.append(mosaic_tpu.sink_rows(sinks, plan.kv_heads, plan.tile, plan.rows))
    scalars = (*_items(plan, query_starts), query_starts, lengths, page_table.reshape(-1))
    pool = mosaic_tpu.pool_arrays(pages)
    out = _call(plan, scalars, inputs, pool)
    out = out.reshape(plan.kv_heads, -1, plan.group, features.sum_width).transpose(1, 0, 2, 3)
    return out[: plan.tokens, :, :, features.kept].reshape(plan.tokens, q.shape[1], features.v_dim), pages


def _destinations(
    tokens: int, page_size: int, page_table: jax.Array, query_starts: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Page and offset of every flat token, page 0 for padding."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= query_starts[None, 1:], axis=1, dtype=jnp.int32)
    real = row < lengths.shape[0]
    row = jnp.minimum(row, lengths.shape[0] - 1)
    position = jnp.where(real, lengths[row] - query_starts[row + 1] + index, 0)
    page_ids = page_table[row, position // page_size]
    return jnp.where(real, page_ids, 0), position % page_size


@dataclass(frozen=True)
class _Plan:
    """The static shape of one call. tile: query tokens of a tile; group: query heads of a KV head."""

    tokens: int
    tile: int
    sequences: int
    kv_heads: int
    group: int
    block_pages: int
    columns: int
    scaled: bool
    sinks: bool
    features: Features
    spec: AttentionSpec
    out_dtype: Any

    @property
    def tiles(self) -> int:
        """Tiles of queries."""
        return -(-self.tokens // self.tile)

    @property
    def rows(self) -> int:
        """Query rows of a KV head in a tile: token by token, the heads of its group."""
        return self.tile * self.group

    @property
    def items(self) -> int:
        """Work items: stretches of tokens that lie in one tile and one sequence."""
        return self.tiles + self.sequences + 1

    @property
    def shares(self) -> int:
        """Parts of the tiles that may run on different cores."""
        return CORES if self.tiles % CORES == 0 and self.tiles >= 2 * CORES else 1


def _plan(q: Any, pages: KVPages, page_table: Any, spec: AttentionSpec, sinks: Any) -> _Plan:
    tokens, q_heads, _ = q.shape
    group, columns = q_heads // pages.kv_heads, page_table.shape[1]
    features = mosaic_tpu.features_of(spec, pages.width)
    return _Plan(
        tokens=tokens,
        tile=_tile_tokens(tokens, pages.kv_heads, group, features),
        sequences=page_table.shape[0],
        kv_heads=pages.kv_heads,
        group=group,
        block_pages=mosaic_tpu.pages_per_block(pages, columns, BLOCK_TOKENS),
        columns=columns,
        scaled=pages.scales is not None,
        sinks=sinks is not None,
        features=features,
        spec=spec,
        out_dtype=q.dtype,
    )


def _tile_tokens(tokens: int, kv_heads: int, group: int, features: Features) -> int:
    """Query tokens of a tile: a power of two from 16, as large as its two limits and the call's tokens let it be."""
    token_state = kv_heads * group * (2 * mosaic_tpu.LANES + features.sum_width) * 4
    limit = min(TILE_ROWS // group, STATE_BYTES // token_state)
    tile = 16
    while 2 * tile <= limit and tile < tokens:
        tile *= 2
    return tile


def _items(plan: _Plan, query_starts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Work items: where the tokens are cut, at every tile's and every sequence's first token.

    i32[items + 1] first token of each item and the end of the last; i32[items] sequence of each item, the number of
    sequences for padding; i32[shares * (items + 1)] the first item of each share with work, then the next after each.
    """
    cuts = jnp.concatenate([jnp.arange(plan.tiles, dtype=jnp.int32) * plan.tile, query_starts.astype(jnp.int32)])
    begins = jnp.append(jnp.sort(cuts), plan.tiles * plan.tile)
    first, end = begins[:-1], begins[1:]
    row = jnp.sum(first[:, None] >= query_starts[None, 1:], axis=1, dtype=jnp.int32)
    working = (first < end) & (row < plan.sequences)
    share = first // (plan.tile * (plan.tiles // plan.shares))
    index = jnp.arange(plan.items, dtype=jnp.int32)
    following = []
    for each in range(plan.shares):
        own = jnp.where(working & (share == each), index, plan.items)
        following.append(jnp.append(lax.cummin(own, reverse=True), plan.items))
    return begins, row, jnp.concatenate(following).astype(jnp.int32)


def _call(plan: _Plan, scalars: tuple[jax.Array, ...], inputs: list[jax.Array], pool: list[jax.Array]) -> Any:
    data = pool[0]
    heads, page_size, width = data.shape[1:]

    def tile_block(features: int) -> pl.BlockSpec:
        def at(share: Any, item: Any, begins: Any, *_: Any) -> tuple[Any, Any, Any]:
            return (0, _tile_of(plan, share, begins[item]), 0)

        return pl.BlockSpec((heads, plan.rows, features), at)

    tokens = plan.block_pages * page_size
    scratch: dict[str, Any] = {
        "buffer": pltpu.VMEM((2, plan.block_pages, heads, page_size, width), data.dtype),
        "semaphores": pltpu.SemaphoreType.DMA((2,)),
        "highest": pltpu.VMEM((heads, plan.rows, mosaic_tpu.LANES), jnp.float32),
        "total": pltpu.VMEM((heads, plan.rows, mosaic_tpu.LANES), jnp.float32),
        "sums": pltpu.VMEM((heads, plan.rows, plan.features.sum_width), jnp.float32),
        "count": pltpu.SMEM((1,), jnp.int32),
    }
    if plan.scaled:
        scratch["scale_buffer"] = pltpu.VMEM((2, plan.block_pages, *pool[1].shape[1:]), jnp.float32)
        scratch["spread"] = pltpu.VMEM((2, heads, 1, tokens), jnp.float32)

    def kernel(*refs: Any) -> None:
        named = dict(zip(scratch, refs[len(refs) - len(scratch) :], strict=True))
        _Kernel(plan, refs[: len(refs) - len(scratch)], named).run()

    in_specs = [tile_block(plan.features.key_width)]
    in_specs += [pl.BlockSpec(memory_space=pltpu.VMEM)] if plan.sinks else []
    in_specs += [pl.BlockSpec(memory_space=pltpu.HBM)] * len(pool)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((heads, plan.tiles * plan.rows, plan.features.sum_width), plan.out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(plan.shares, plan.items),
            in_specs=in_specs,
            out_specs=tile_block(plan.features.sum_width),
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=mosaic_tpu.VMEM_LIMIT
        ),
        cost_estimate=_cost(plan, scalars, inputs, pool),
        name="paged_prefill",
    )(*scalars, *inputs, *pool)


def _tile_of(plan: _Plan, share: Any, token: Any) -> Any:
    """The tile that holds a token; for tokens of other shares, the nearest tile of this one."""
    share_tiles = plan.tiles // plan.shares
    return jnp.clip(token // plan.tile, share * share_tiles, (share + 1) * share_tiles - 1)


def _cost(plan: _Plan, scalars: Any, inputs: Any, pool: Any) -> pl.CostEstimate:
    """The work of a call whose sequences end at the last column of the page table: the last tokens of one sequence, or
    several whole sequences if the tokens are more than the table's positions."""
    pages = KVPages(*pool)
    context = plan.columns * pages.page_size
    seen = max(context - plan.tokens // 2, context // 2) + plan.tile // 2
    if plan.spec.window is not None:
        seen = min(seen, plan.spec.window + plan.tile)
    query_rows = plan.tiles * plan.rows * plan.kv_heads
    widths = mosaic_tpu.round_up(plan.features.key_width, 128) + mosaic_tpu.round_up(plan.features.sum_width, 128)
    moved = plan.tiles * seen * mosaic_tpu.page_bytes(pages) // pages.page_size
    moved += sum(mosaic_tpu.array_bytes(array) for array in (*scalars, *inputs))
    moved += query_rows * plan.features.sum_width * np.dtype(plan.out_dtype).itemsize
    return pl.CostEstimate(
        flops=2 * query_rows * seen * widths, transcendentals=query_rows * seen, bytes_accessed=moved
    )


class _Kernel:
    """The kernel's body: one grid step is one item, a stretch of tokens in one tile and one sequence."""

    def __init__(self, plan: _Plan, refs: tuple[Any, ...], scratch: dict[str, Any]) -> None:
        remaining = list(refs)
        self.plan = plan
        self.begins, self.row_of, self.following, self.query_starts, self.lengths, table = (
            remaining.pop(0) for _ in range(6)
        )
        self.queries = remaining.pop(0)
        self.sinks = remaining.pop(0) if plan.sinks else None
        self.out = remaining.pop()
        self.softmax = OnlineSoftmax(scratch["highest"], scratch["total"], scratch["sums"])
        self.blocks = PageBlocks(
            pool=remaining[0],
            scales=remaining[1] if plan.scaled else None,
            buffer=scratch["buffer"],
            scale_buffer=scratch.get("scale_buffer"),
            spread=scratch.get("spread"),
            semaphores=scratch["semaphores"],
            table=table,
            columns=plan.columns,
        )
        self.count = scratch["count"]

    def run(self) -> None:
        """Attend for the grid step's item; its first block was begun by the item before."""
        share, item = pl.program_id(0), pl.program_id(1)
        chain = share * (self.plan.items + 1) + item
        tile = _tile_of(self.plan, share, self.begins[item])

        @pl.when(item == 0)
        def _begin() -> None:
            self.count[0] = 0
            self._start(self.following[chain], 0, 0)

        @pl.when((item == 0) | (_tile_of(self.plan, share, self.begins[jnp.maximum(item - 1, 0)]) != tile))
        def _first_of_tile() -> None:
            self.softmax.reset(self.sinks)

        @pl.when(self.following[chain] == item)
        def _work() -> None:
            blocks = self._columns(item)[2]

            def one_block(index: Any, carry: None) -> None:
                slot = lax.rem(self.count[0], 2)
                at_end = index + 1 == blocks
                following = jnp.where(at_end, self.following[chain + 1], item)
                self._start(following, jnp.where(at_end, 0, index + 1), 1 - slot)
                self._attend(item, tile, index, slot)
                self.count[0] = self.count[0] + 1
                return carry

            lax.fori_loop(0, blocks, one_block, None)

        last = self.plan.items - 1

        @pl.when((item == last) | (_tile_of(self.plan, share, self.begins[jnp.minimum(item + 1, last)]) != tile))
        def _last_of_tile() -> None:
            def one_head(head: Any) -> None:
                self.out[head] = self.softmax.result(head).astype(self.out.dtype)

            mosaic_tpu.for_each_head(self.plan.kv_heads, self.plan.rows, one_head)

    def _shift(self, item: Any) -> Any:
        """What to add to a flat token's index to get its position in the item's sequence."""
        row = self.row_of[item]
        return self.lengths[row] - self.query_starts[row + 1]

    def _seen(self, item: Any) -> tuple[Any, Any]:
        """First position that any of the item's queries sees, and the position after the last."""
        shift = self._shift(item)
        begin = 0
        if self.plan.spec.window is not None:
            begin = jnp.maximum(self.begins[item] + shift - self.plan.spec.window + 1, 0)
        return begin, self.begins[item + 1] + shift

    def _columns(self, item: Any) -> tuple[Any, Any, Any]:
        """First column of the page table to read, the one after the last, and the number of blocks between."""
        begin, end = self._seen(item)
        first, last = begin // self.blocks.page_size, pl.cdiv(end, self.blocks.page_size)
        return first, last, pl.cdiv(last - first, self.blocks.pages)

    def _start(self, item: Any, index: Any, slot: Any) -> None:
        """Start copying a block of an item, unless `item` says that there is none."""

        @pl.when(item < self.plan.items)
        def _copy() -> None:
            first, end, _ = self._columns(item)
            self.blocks.start(self.row_of[item], first + index * self.blocks.pages, end, slot)

    def _attend(self, item: Any, tile: Any, index: Any, slot: Any) -> None:
        blocks, plan = self.blocks, self.plan
        first, end_column, _ = self._columns(item)
        begin, end = self._seen(item)
        column = first + index * blocks.pages
        base = column * blocks.page_size
        blocks.wait(self.row_of[item], column, end_column, slot)
        # Positions of the tile's first and last token, if both were of this sequence.
        tile_first = tile * plan.tile + self._shift(item)
        tile_last = tile_first + plan.tile - 1
        whole = (end - tile_first == plan.tile) & (self.begins[item] == tile * plan.tile)
        whole &= base + blocks.tokens <= tile_first + 1
        if plan.spec.window is not None:
            whole &= base > tile_last - plan.spec.window

        def attend(visible: Visible | None) -> None:
            mosaic_tpu.attend_block(blocks, self.softmax, self.queries, slot, visible, plan.spec, plan.features)

        @pl.when(whole)
        def _everything_visible() -> None:
            attend(None)

        @pl.when(jnp.logical_not(whole))
        def _partly_visible() -> None:
            shape = (plan.rows, blocks.tokens)
            key = base + lax.broadcasted_iota(jnp.int32, shape, 1)
            query = tile_first + _token_of_row(plan, shape)
            visible = (key <= query) & (query >= self.begins[item] + self._shift(item)) & (query < end)
            if plan.spec.window is not None:
                visible &= key > query - plan.spec.window
            attend(Visible(visible, base, begin, end))


def _token_of_row(plan: _Plan, shape: tuple[int, int]) -> jax.Array:
    """Which token of the tile each query row belongs to, i32 of this shape."""
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    if plan.group == 1:
        return row
    # Vector units divide floats; half a row keeps the quotient clear of whole numbers, so that it rounds down right.
    return jnp.floor((row.astype(jnp.float32) + 0.5) * (1 / plan.group)).astype(jnp.int32)
