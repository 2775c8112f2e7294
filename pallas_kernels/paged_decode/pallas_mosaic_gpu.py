"""Paged decode for Hopper and newer GPUs (Mosaic GPU).

One block of one warpgroup serves (sequence, kv head, split): it walks its tiles of the sequence, each tile's pages
coming straight from the pool by TMA into a ring of shared-memory buffers, and keeps an online softmax in float32.
The query heads that share a kv head are the rows of one 64-row tensor-core tile. Padding up to 64 rows wastes
arithmetic but no memory traffic: at 64 rows the tile costs 64 multiply-adds for each byte read, a third of what the
chip can do in the time the bytes take, so decode stays bound by bandwidth.
With few sequences the tiles of each are split over blocks so that all multiprocessors read; every split returns its
normalized values and the logarithm of its softmax sum, and a small XLA epilogue merges them.

Costs of other types and widths: head widths of 80 and 96 use narrower swizzles, not padding. int8 and float8 tiles
are rewritten as bfloat16 in shared memory (tensor cores take no transposed 8-bit values), float32 tiles as two
bfloat16 terms whose three products keep about 16 mantissa bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _gpu_attention as gpu
from pallas_kernels.kv_write import pallas_mosaic_gpu as kv_write_gpu
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec

ROWS = gpu.WARPGROUP_ROWS
TILE = 64
# Two blocks on each multiprocessor hide each other's softmax, so a block may use about half its shared memory.
BLOCK_BUDGET_BYTES = 110 * 1024
# A split shorter than this spends more on its own start and merge than it saves.
MIN_SPLIT_POSITIONS = 256
MAX_STAGES = 6


@dataclass(frozen=True)
class Plan:
    """Static sizes: positions of a tile, tiles in flight, splits of a sequence, query rows as stored."""

    tile: int
    stages: int
    splits: int
    stored_rows: int

    @property
    def min_split_tiles(self) -> int:
        """Fewest tiles of a split."""
        return MIN_SPLIT_POSITIONS // self.tile


def plan_of(batch: int, group: int, kv_heads: int, max_positions: int, operands: gpu.Operands) -> Plan | None:
    """Sizes for a call, None when no tile fits shared memory.

    The tile is 64 positions. Stages fill half a multiprocessor's shared memory, or all
    of it for tiles so large that two blocks do not fit. Splits fill twice the multiprocessors.
    """
    fixed = operands.query_terms * ROWS * operands.k_dim * 2 + operands.converted_bytes(TILE) // 2 + 2048
    for budget in (BLOCK_BUDGET_BYTES, gpu.SHARED_MEMORY_BYTES - 2048):
        stages = min((budget - fixed) // operands.raw_bytes(TILE), MAX_STAGES)
        if stages >= 2:
            longest = max(1, max_positions // MIN_SPLIT_POSITIONS)
            wanted = 2 * gpu.MULTIPROCESSORS // (batch * kv_heads)
            return Plan(TILE, stages, max(1, min(wanted, longest)), -(-group // 8) * 8)
    return None


def unsupported(
    q: Any, k: Any, v: Any, pages: KVPages, page_table: Any, lengths: Any, spec: AttentionSpec, *, sinks: Any = None
) -> str | None:
    """Why this lowering cannot run these shapes and types, as a sentence; None when it can."""
    del lengths, sinks
    reason = gpu.unsupported_attention(q, pages, spec)
    if reason is None and k is not None:
        reason = kv_write_gpu.unsupported(k, v, pages, None, None)
    if reason is not None:
        return reason
    batch, heads, _ = q.shape
    group = heads // pages.kv_heads
    if group > ROWS:
        return f"The Mosaic GPU kernel takes at most {ROWS} query heads for each kv head, not {group}."
    operands = gpu.operands_of(q.dtype, pages, spec)
    if plan_of(batch, group, pages.kv_heads, page_table.shape[1] * pages.page_size, operands) is None:
        return (
            f"Two tiles of {operands.k_dim} + {operands.v_dim} features of {operands.page_dtype.name} do not fit "
            "shared memory."
        )
    return None


def tiles_of_split(
    length: jax.Array, split: jax.Array | int, plan: Plan, window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first tile, tiles, first visible position) of one split of a sequence with `length` visible positions."""
    first_visible = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)
    first = lax.div(first_visible, jnp.int32(plan.tile))
    end = lax.div(length + (plan.tile - 1), jnp.int32(plan.tile))
    if plan.splits == 1:
        return first, end - first, first_visible
    share = lax.div(end - first + (plan.splits - 1), jnp.int32(plan.splits))
    share = jnp.maximum(share, plan.min_split_tiles)
    begin = first + split * share
    return begin, jnp.maximum(jnp.minimum(end - begin, share), 0), first_visible


def merge_splits(values: jax.Array, log_totals: jax.Array) -> jax.Array:
    """values f32[B, Hkv, splits, rows, v_dim] weighted by log_totals (base 2, -inf where a split saw nothing)."""
    highest = jnp.maximum(log_totals.max(axis=2, keepdims=True), gpu.LOWEST)
    weights = jnp.exp2(log_totals - highest)
    total = weights.sum(axis=2)
    merged = (values * weights[..., None]).sum(axis=2)
    return merged / jnp.where(total > 0, total, 1)[..., None]


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
    interpret: Any = None,
) -> tuple[jax.Array, KVPages]:
    """`pallas_kernels.paged_decode` by Mosaic GPU; `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU."""
    if k is not None and v is not None:
        last = jnp.maximum(lengths - 1, 0)
        columns = (last // pages.page_size)[:, None]
        page_ids = jnp.where(lengths > 0, jnp.take_along_axis(page_table, columns, axis=1)[:, 0], 0)
        pages = kv_write_gpu.kv_write(k, v, pages, page_ids, last % pages.page_size, interpret=interpret)
    return attend(q, pages, page_table, lengths, spec, sinks, interpret), pages


def attend(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """Attention of one query per sequence over pages that already hold its key and value."""
    batch, heads, k_dim = q.shape
    kv_heads = pages.kv_heads
    group = heads // kv_heads
    operands = gpu.operands_of(q.dtype, pages, spec)
    plan = plan_of(batch, group, kv_heads, page_table.shape[1] * pages.page_size, operands)
    assert plan is not None
    padding = plan.stored_rows - group
    queries = jnp.pad(q.reshape(batch, kv_heads, group, k_dim), ((0, 0), (0, 0), (0, padding), (0, 0)))
    query_terms = jnp.stack(gpu.split_terms(queries, operands.query_terms, operands.dtype))
    inputs: dict[str, Any] = {"q": query_terms, "pool": pages.data, "table": page_table, "lengths": lengths}
    if operands.quantized:
        inputs["scales"] = pages.scales
    if sinks is not None:
        # Rows past the group would stay unread; the lowest value keeps them harmless.
        by_head = sinks.astype(jnp.float32).reshape(kv_heads, group)
        inputs["sinks"] = jnp.pad(by_head * gpu.LOG2E, ((0, 0), (0, ROWS - group)), constant_values=gpu.LOWEST)
    out_dtype = q.dtype if plan.splits == 1 else jnp.float32
    shape = (batch, kv_heads, plan.splits, plan.stored_rows)
    outputs = {"values": jax.ShapeDtypeStruct((*shape, operands.v_dim), out_dtype)}
    if plan.splits > 1:
        outputs["log_totals"] = jax.ShapeDtypeStruct(shape, jnp.float32)

    def paged_decode_kernel(inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        _run_block(inputs, outputs, plan, operands, spec, interpret is not None)

    kernel = plgpu.kernel(
        paged_decode_kernel,
        out_type=outputs,
        # The last axis runs fastest: neighbouring blocks read the heads of one page.
        grid=(plan.splits, batch, kv_heads),
        grid_names=("split", "row", "kv_head"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LANE),
        interpret=interpret,
    )
    results = kernel(inputs)
    values = results["values"]
    merged = values[:, :, 0] if plan.splits == 1 else merge_splits(values, results["log_totals"])
    return merged[:, :, :group].astype(q.dtype).reshape(batch, heads, operands.v_dim)


def _run_block(
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    plan: Plan,
    operands: gpu.Operands,
    spec: AttentionSpec,
    interpret: bool,
) -> None:
    """One block: the tiles of (split, row, kv_head)."""
    split, row, head = lax.axis_index("split"), lax.axis_index("row"), lax.axis_index("kv_head")
    length = inputs["lengths"][row]
    page_size = inputs["pool"].shape[2]
    begin, tiles, first_visible = tiles_of_split(length, split, plan, spec.window)
    copy_rows = gpu.rows_per_copy(page_size, plan.tile)
    copies = plan.tile // copy_rows

    def walk(
        memory: dict[str, Any], query: Any, sink: Any, tile_barrier: Any, query_barrier: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def fetch(index: jax.Array, slot: Any) -> None:
            last_column = lax.div(length - 1, jnp.int32(page_size))
            sources = []
            for part in range(copies):
                position = (begin + index) * plan.tile + part * copy_rows
                # Past the end the last page comes again: its rows are masked, and no foreign page is touched.
                column = jnp.minimum(lax.div(position, jnp.int32(page_size)), last_column)
                sources.append((inputs["table"][row, column], lax.rem(position, jnp.int32(page_size))))
            for part, (page, offset) in enumerate(sources):
                rows = pl.ds(offset, copy_rows) if copy_rows < page_size else slice(None)
                place = pl.ds(part * copy_rows, copy_rows)
                barrier = tile_barrier.at[slot]
                source = inputs["pool"]
                plgpu.copy_gmem_to_smem(
                    source.at[page, head, rows, pl.ds(0, operands.k_dim)], memory["k"].at[slot, place], barrier
                )
                plgpu.copy_gmem_to_smem(
                    source.at[page, head, rows, pl.ds(operands.k_dim, operands.v_dim)],
                    memory["v"].at[slot, place],
                    barrier,
                )
                if operands.quantized:
                    for kind in range(2):
                        plgpu.copy_gmem_to_smem(
                            inputs["scales"].at[page, kind, head, rows], memory["scales"].at[slot, kind, place], barrier
                        )

        for stage in range(plan.stages):
            pl.when(stage < tiles)(functools.partial(fetch, jnp.int32(stage), stage))
        for term in range(operands.query_terms):
            plgpu.copy_gmem_to_smem(
                inputs["q"].at[term, row, head], query.at[term, pl.ds(0, plan.stored_rows)], query_barrier
            )
        if "sinks" in inputs:
            plgpu.copy_gmem_to_smem(inputs["sinks"].at[head], sink, query_barrier)
        plgpu.barrier_wait(query_barrier)

        def operand_tiles(kind: str, slot: jax.Array, keep: Any = None) -> list[Any]:
            tile = memory[kind].at[slot]
            if not operands.converts:
                if keep is not None:
                    gpu.clear_rows(tile, keep)
                return [tile]
            # The scores are done when the values take the keys' place.
            terms = [memory["terms"].at[term] for term in range(operands.page_terms)]
            gpu.convert(tile, terms, operands, keep)
            return terms

        def step(
            index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array], *, masked: bool
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            values, highest, total = carry
            slot = lax.rem(index, jnp.int32(plan.stages))
            plgpu.barrier_wait(tile_barrier.at[slot])
            start = (begin + index) * plan.tile

            def seen(offsets: jax.Array) -> jax.Array:
                positions = offsets + start
                return (positions < length) & (positions >= first_visible)

            keys = operand_tiles("k", slot)
            products = gpu.score_products([query.at[term] for term in range(operands.query_terms)], keys, operands)
            scales = None
            if operands.quantized:
                scales = [
                    gpu.load_as(memory["scales"].at[slot, kind], plgpu.Layout.WGMMA.reduce(0)) for kind in range(2)
                ]
                products = products * gpu.along_columns(scales[0], products.shape)
            scores = gpu.base2_scores(products, spec)
            if masked:
                scores = jnp.where(seen(gpu.iota(scores.shape, 1)), scores, -jnp.inf)
            weights, highest, total, factor = gpu.softmax_step(scores, highest, total)
            if scales is not None:
                weights = weights * gpu.along_columns(scales[1], weights.shape)
                if masked:
                    weights = jnp.where(seen(gpu.iota(weights.shape, 1)), weights, 0.0)
            value_tiles = operand_tiles("v", slot, seen if masked else None)
            values = values * gpu.along_rows(factor, values.shape)
            values = gpu.add_weighted_values(values, weights, value_tiles, operands, interpret)
            pl.when(index + plan.stages < tiles)(lambda: fetch(index + plan.stages, slot))
            return values, highest, total

        highest, total = gpu.row_constant(ROWS, gpu.LOWEST), gpu.row_constant(ROWS, 0.0)
        if "sinks" in inputs:
            # The sink is one more score, without a value; it counts in the first split alone.
            highest = gpu.load_as(sink, plgpu.Layout.WGMMA.reduce(1))
            total = gpu.row_constant(ROWS, 1.0) * (split == 0).astype(jnp.float32)
        carry = (gpu.matrix_zeros(ROWS, operands.v_dim), highest, total)
        # Only a tile that the window or the sequence's end cuts pays for masks.
        whole_begin = jnp.int32(0)
        if spec.window is not None:
            whole_begin = jnp.clip(lax.div(first_visible + (plan.tile - 1), jnp.int32(plan.tile)) - begin, 0, tiles)
        whole_end = jnp.clip(lax.div(length, jnp.int32(plan.tile)) - begin, whole_begin, tiles)
        if spec.window is not None:
            carry = lax.fori_loop(0, whole_begin, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(whole_begin, whole_end, functools.partial(step, masked=False), carry)
        return lax.fori_loop(whole_end, tiles, functools.partial(step, masked=True), carry)

    tile_arrivals = copies * (4 if operands.quantized else 2)
    values, highest, total = pl.run_scoped(
        walk,
        gpu.tile_memory(operands, plan.tile, plan.stages),
        gpu.operand_memory((operands.query_terms, ROWS, operands.k_dim), operands.dtype, plan.tile),
        plgpu.SMEM((ROWS,), jnp.float32),
        plgpu.Barrier(num_arrivals=tile_arrivals, num_barriers=plan.stages),
        plgpu.Barrier(num_arrivals=operands.query_terms + ("sinks" in inputs)),
    )

    def store(out: Any, log_totals: Any) -> None:
        out[...] = gpu.normalized(values, total).astype(out.dtype)
        if "log_totals" in outputs:
            log_totals[...] = jnp.where(total > 0.0, highest + jnp.log2(jnp.maximum(total, 1e-38)), -jnp.inf)
        plgpu.commit_smem()
        rows = pl.ds(0, plan.stored_rows)
        plgpu.copy_smem_to_gmem(out.at[rows], outputs["values"].at[row, head, split])
        if "log_totals" in outputs:
            plgpu.copy_smem_to_gmem(log_totals.at[rows], outputs["log_totals"].at[row, head, split])
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        store,
        gpu.swizzled_memory((ROWS, operands.v_dim), outputs["values"].dtype),
        plgpu.SMEM((ROWS,), jnp.float32),
    )
