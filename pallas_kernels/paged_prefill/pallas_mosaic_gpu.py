"""Ragged paged prefill for Hopper and newer GPUs (Mosaic GPU).

A block takes the tokens of one sequence inside an aligned window of 64 query tokens for two query heads of one kv
head, or of 128 tokens for one head where the heads that share a kv head are odd in number. Of its three warpgroups one
brings the pages by TMA into a ring of shared-memory buffers and two multiply (wgmma, 64 rows each) and keep an online
softmax in float32. Which sequence and tokens a block has is worked out before the kernel from `query_starts`: one
block for each window and N more always suffice. Padding tokens count as a sequence without positions, whose outputs
are 0.

Costs of other types and widths: int8, float8 and float32 tiles are rewritten as bfloat16 terms by the copying
warpgroup (see paged_decode). Ragged ends are stored by row, and a row of shared memory that the copy engine reads must
begin at a multiple of 128 bytes: value widths of 80 and 96 leave the kernel padded to 128 (bfloat16) and are sliced.
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
from pallas_kernels.ragged import token_positions
from pallas_kernels.spec import AttentionSpec

ROWS = gpu.WARPGROUP_ROWS
MULTIPLIERS = 2
COPIER = MULTIPLIERS
MAX_STAGES = 4


@dataclass(frozen=True)
class Plan:
    """Static sizes of a block.

    tile: positions of a tile. stages: tiles in the ring. term_stages: converted tiles, 0 where none is needed.
    heads: query heads of a block, 1 or 2. out_width: value width rounded up to whole 128 bytes. out_reuses_query:
    whether a warpgroup's output exactly covers the shared memory of its queries.
    """

    tile: int
    stages: int
    term_stages: int
    heads: int
    out_width: int
    out_reuses_query: bool

    @property
    def tokens(self) -> int:
        """Query tokens of a block."""
        return ROWS * MULTIPLIERS // self.heads

    @property
    def ready_stages(self) -> int:
        """Tiles that the multiplying warpgroups see at once."""
        return self.term_stages or self.stages


def plan_of(group: int, q_dtype: Any, operands: gpu.Operands) -> Plan | None:
    """Sizes for `group` query heads of each kv head; None when nothing fits shared memory.

    128 positions a tile keep the tensor cores busy longest between softmaxes; wider heads and converted tiles take 64.
    """
    item = jnp.dtype(q_dtype).itemsize
    out_width = -(-operands.v_dim * item // 128) * 128 // item
    query = MULTIPLIERS * ROWS * operands.k_dim * 2 * operands.query_terms
    out = MULTIPLIERS * ROWS * out_width * item
    fixed = (query if query == out else query + out) + 3072
    heads = MULTIPLIERS if group % MULTIPLIERS == 0 else 1
    for tile in (128, 64):
        if tile == 128 and (operands.converts or max(operands.k_dim, operands.v_dim) > 128):
            continue
        converted = operands.converted_bytes(tile)
        for term_stages in (2, 1) if operands.converts else (0,):
            free = gpu.SHARED_MEMORY_BYTES - fixed - term_stages * (converted + 8 * tile)
            stages = min(free // operands.raw_bytes(tile), 2 if operands.converts else MAX_STAGES)
            if stages >= (1 if operands.converts else 2):
                return Plan(tile, stages, term_stages, heads, out_width, query == out)
    return None


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
    """Why this lowering cannot run these shapes and types, as a sentence; None when it can."""
    del page_table, query_starts, lengths, sinks
    reason = gpu.unsupported_attention(q, pages, spec)
    if reason is None and k is not None:
        reason = kv_write_gpu.unsupported(k, v, pages, None, None)
    if reason is not None:
        return reason
    operands = gpu.operands_of(q.dtype, pages, spec)
    if plan_of(q.shape[1] // pages.kv_heads, q.dtype, operands) is None:
        return (
            f"A tile of {operands.k_dim} + {operands.v_dim} features of {operands.page_dtype.name} with "
            f"{jnp.dtype(q.dtype).name} queries does not fit shared memory."
        )
    return None


def token_places(
    tokens: int, query_starts: jax.Array, lengths: jax.Array, page_table: jax.Array, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """(page, offset) i32[tokens] of each flat token; page 0 for padding tokens."""
    rows, positions = token_positions(tokens, query_starts, lengths)
    inside = jnp.maximum(positions, 0)
    return jnp.where(positions < 0, 0, page_table[rows, inside // page_size]), inside % page_size


def block_table(tokens: int, block_tokens: int, query_starts: jax.Array, lengths: jax.Array) -> dict[str, jax.Array]:
    """What each block does, i32[blocks] each. A block is the part of one sequence inside one aligned window of tokens.

    row: sequence. token: first flat token of the window, a multiple of block_tokens. skip, stop: the block's tokens are
    token + skip .. token + stop - 1; none (stop <= skip) for a block with nothing to do. position: of the window's
    first token, were it in the sequence (may be negative). limit: positions that some token of the block sees, 0 for
    padding tokens.
    """
    rows = lengths.shape[0]
    blocks = -(-tokens // block_tokens) + rows
    # The padding tokens are one more row, which sees nothing.
    starts = query_starts.astype(jnp.int32)
    ends = jnp.append(starts[1:], tokens)
    first_window = starts // block_tokens
    windows = jnp.where(ends > starts, (ends - 1) // block_tokens - first_window + 1, 0)
    blocks_until = jnp.cumsum(windows).astype(jnp.int32)
    block = jnp.arange(blocks, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(blocks_until, block, side="right").astype(jnp.int32), rows)
    used = block < blocks_until[rows]
    token = jnp.where(used, (first_window[row] + block - (blocks_until[row] - windows[row])) * block_tokens, 0)
    stop = jnp.where(used, jnp.minimum(ends[row] - token, block_tokens), 0)
    known = jnp.append(lengths - (ends - starts)[:rows], 0).astype(jnp.int32)
    position = known[row] - starts[row] + token
    return {
        "row": jnp.minimum(row, rows - 1),
        "token": token,
        "skip": jnp.where(used, jnp.maximum(starts[row] - token, 0), 0),
        "stop": stop,
        "position": position,
        "limit": jnp.where(used & (row < rows), position + stop, 0),
    }


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
    interpret: Any = None,
) -> tuple[jax.Array, KVPages]:
    """`pallas_kernels.paged_prefill` by Mosaic GPU; `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU."""
    if k is not None and v is not None:
        page_ids, offsets = token_places(q.shape[0], query_starts, lengths, page_table, pages.page_size)
        pages = kv_write_gpu.kv_write(k, v, pages, page_ids, offsets, interpret=interpret)
    tokens, heads, _ = q.shape
    group = heads // pages.kv_heads
    operands = gpu.operands_of(q.dtype, pages, spec)
    plan = plan_of(group, q.dtype, operands)
    assert plan is not None
    blocks = block_table(tokens, plan.tokens, query_starts, lengths)
    # Queries are copied in tiles of 8 tokens, 64 at a time: a copy may run past the end (the hardware reads zeros
    # there), but not be larger than the array.
    queries = jnp.pad(q, ((0, max(ROWS - tokens, -tokens % 8)), (0, 0), (0, 0)))
    inputs: dict[str, Any] = {
        "q": jnp.stack(gpu.split_terms(queries, operands.query_terms, operands.dtype)),
        "pool": pages.data,
        "table": page_table,
        "blocks": blocks,
    }
    if operands.quantized:
        inputs["scales"] = pages.scales
    if sinks is not None:
        inputs["sinks"] = sinks.astype(jnp.float32) * gpu.LOG2E
    block = _Block(plan, operands, spec, group, interpret is not None)

    def paged_prefill_kernel(inputs: dict[str, Any], out: Any) -> None:
        block.run(inputs, out)

    kernel = plgpu.kernel(
        paged_prefill_kernel,
        out_type=jax.ShapeDtypeStruct((tokens, heads, plan.out_width), q.dtype),
        grid=(blocks["row"].shape[0], heads // plan.heads),
        grid_names=("block", "heads"),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LANE),
        interpret=interpret,
    )
    return kernel(inputs)[..., : operands.v_dim], pages


@dataclass(frozen=True)
class _Range:
    """The part of a sequence that a block reads, all traced scalars.

    row: sequence. begin, tiles: first tile and their number. first_visible, limit: positions that some token sees.
    """

    row: jax.Array
    begin: jax.Array
    tiles: jax.Array
    first_visible: jax.Array
    limit: jax.Array


@dataclass(frozen=True)
class _Block:
    """The kernel of one (block, heads) of the grid."""

    plan: Plan
    operands: gpu.Operands
    spec: AttentionSpec
    group: int
    interpret: bool

    def run(self, inputs: dict[str, Any], out: Any) -> None:
        """Give each warpgroup its part, with their shared memory and barriers."""
        plan, operands = self.plan, self.operands
        query = gpu.operand_memory((MULTIPLIERS, operands.query_terms, ROWS, operands.k_dim), operands.dtype, plan.tile)
        result = plgpu.SMEM((MULTIPLIERS, ROWS, plan.out_width), out.dtype)
        copies = plan.tile // gpu.rows_per_copy(inputs["pool"].shape[2], plan.tile)
        raw_arrivals = copies * (2 if operands.quantized else 1)
        ready_arrivals = 1 if operands.converts else copies
        pl.run_scoped(
            lambda memory, queries, barriers: self._roles(inputs, out, memory, queries, barriers),
            self._tile_memory(),
            [plgpu.RefUnion(query, result)] if plan.out_reuses_query else [query, result],
            {
                "query": plgpu.Barrier(num_arrivals=operands.query_terms, num_barriers=MULTIPLIERS),
                "k_raw": plgpu.Barrier(num_arrivals=raw_arrivals, num_barriers=plan.stages),
                "v_raw": plgpu.Barrier(num_arrivals=raw_arrivals, num_barriers=plan.stages),
                "k_ready": plgpu.Barrier(num_arrivals=ready_arrivals, num_barriers=plan.ready_stages),
                "v_ready": plgpu.Barrier(num_arrivals=ready_arrivals, num_barriers=plan.ready_stages),
                "k_free": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=plan.ready_stages),
                "v_free": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=plan.ready_stages),
                "cleared": plgpu.Barrier(num_arrivals=MULTIPLIERS),
            },
            collective_axes="warpgroup",
        )

    def _tile_memory(self) -> dict[str, Any]:
        """The ring of tiles, and for converted pages the smaller ring of their 16-bit terms and scales."""
        plan, operands = self.plan, self.operands
        shapes = {"k": (plan.tile, operands.k_dim), "v": (plan.tile, operands.v_dim)}
        if not operands.converts:
            return {
                kind: gpu.operand_memory((plan.stages, *shape), operands.dtype, plan.tile)
                for kind, shape in shapes.items()
            }
        memory = {}
        for kind, shape in shapes.items():
            memory[f"{kind}_raw"] = plgpu.SMEM((plan.stages, *shape), operands.page_dtype)
            terms = (plan.term_stages, operands.page_terms, *shape)
            memory[kind] = gpu.operand_memory(terms, operands.dtype, plan.tile)
        if operands.quantized:
            memory["scales_raw"] = plgpu.SMEM((plan.stages, 2, plan.tile), jnp.float32)
            memory["scales"] = plgpu.SMEM((plan.term_stages, 2, plan.tile), jnp.float32)
        return memory

    def _roles(
        self, inputs: dict[str, Any], out: Any, memory: dict[str, Any], queries: list[Any], barriers: dict[str, Any]
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        table = {name: ref[block] for name, ref in inputs["blocks"].items()}
        first_visible = jnp.int32(0)
        if self.spec.window is not None:
            first_visible = jnp.maximum(table["position"] + table["skip"] - (self.spec.window - 1), 0)
        tile = jnp.int32(self.plan.tile)
        begin = lax.div(first_visible, tile)
        tiles = jnp.maximum(lax.div(table["limit"] + (tile - 1), tile) - begin, 0)
        span = _Range(table["row"], begin, tiles, first_visible, table["limit"])

        @pl.when(warpgroup == COPIER)
        def _copy() -> None:
            plgpu.set_max_registers(104 if self.operands.converts else 24, action="decrease")
            if self.operands.converts:
                self._copy_and_convert(inputs, memory, barriers, span)
            else:
                self._copy_tiles(inputs, memory, barriers, span)

        @pl.when(warpgroup < MULTIPLIERS)
        def _multiply() -> None:
            plgpu.set_max_registers(200 if self.operands.converts else 240, action="increase")
            query, result = queries[0] if len(queries) == 1 else queries
            self._multiply(inputs, out, memory, query, result, barriers, span, table, warpgroup)

    # --- the copying warpgroup ---------------------------------------------------------------------------------------

    def _fetch(
        self, inputs: dict[str, Any], kind: str, target: Any, scales: Any, barrier: Any, span: _Range, index: jax.Array
    ) -> None:
        """Start the copies of one tile's keys ('k') or values ('v'), page by page."""
        pool = inputs["pool"]
        page_size = pool.shape[2]
        head = self._kv_head()
        features = pl.ds(0, self.operands.k_dim)
        if kind == "v":
            features = pl.ds(self.operands.k_dim, self.operands.v_dim)
        copy_rows = gpu.rows_per_copy(page_size, self.plan.tile)
        last_column = lax.div(span.limit - 1, jnp.int32(page_size))
        places = []
        for part in range(self.plan.tile // copy_rows):
            position = (span.begin + index) * self.plan.tile + part * copy_rows
            # Past the end the last page comes again: its rows are masked, and no foreign page is touched.
            column = jnp.minimum(lax.div(position, jnp.int32(page_size)), last_column)
            places.append((inputs["table"][span.row, column], lax.rem(position, jnp.int32(page_size))))
        for part, (page, offset) in enumerate(places):
            rows = pl.ds(offset, copy_rows) if copy_rows < page_size else slice(None)
            into = pl.ds(part * copy_rows, copy_rows)
            plgpu.copy_gmem_to_smem(pool.at[page, head, rows, features], target.at[into], barrier)
            if scales is not None:
                source = inputs["scales"].at[page, int(kind == "v"), head, rows]
                plgpu.copy_gmem_to_smem(source, scales.at[into], barrier)

    def _kv_head(self) -> jax.Array:
        return lax.div(lax.axis_index("heads"), jnp.int32(self.group // self.plan.heads))

    def _copy_tiles(
        self, inputs: dict[str, Any], memory: dict[str, Any], barriers: dict[str, Any], span: _Range
    ) -> None:
        """Keep the ring of matrix operands full."""
        stages = self.plan.stages

        def fetch(kind: str, index: jax.Array, slot: Any) -> None:
            self._fetch(inputs, kind, memory[kind].at[slot], None, barriers[f"{kind}_ready"].at[slot], span, index)

        for stage in range(stages):

            @pl.when(stage < span.tiles)
            def _(stage: int = stage) -> None:
                fetch("k", jnp.int32(stage), stage)
                fetch("v", jnp.int32(stage), stage)

        @pl.loop(0, jnp.maximum(span.tiles - stages, 0))
        def _refill(index: jax.Array) -> None:
            slot = lax.rem(index, jnp.int32(stages))
            for kind in ("k", "v"):
                plgpu.barrier_wait(barriers[f"{kind}_free"].at[slot])
                fetch(kind, index + stages, slot)

        self._see_the_rest_freed(barriers, span)

    def _copy_and_convert(
        self, inputs: dict[str, Any], memory: dict[str, Any], barriers: dict[str, Any], span: _Range
    ) -> None:
        """Keep the ring of raw tiles full, and turn each into 16-bit terms, zero where no token may look."""
        plan, operands = self.plan, self.operands

        def fetch(kind: str, index: jax.Array, slot: Any) -> None:
            scales = memory["scales_raw"].at[slot, int(kind == "v")] if operands.quantized else None
            raw, barrier = memory[f"{kind}_raw"].at[slot], barriers[f"{kind}_raw"].at[slot]
            self._fetch(inputs, kind, raw, scales, barrier, span, index)

        for stage in range(plan.stages):

            @pl.when(stage < span.tiles)
            def _(stage: int = stage) -> None:
                fetch("k", jnp.int32(stage), stage)
                fetch("v", jnp.int32(stage), stage)

        @pl.loop(0, span.tiles)
        def _convert(index: jax.Array) -> None:
            raw_slot = lax.rem(index, jnp.int32(plan.stages))
            slot = lax.rem(index, jnp.int32(plan.term_stages))
            start = (span.begin + index) * plan.tile

            def seen(offsets: jax.Array) -> jax.Array:
                positions = offsets + start
                return (positions < span.limit) & (positions >= span.first_visible)

            for kind in ("k", "v"):
                plgpu.barrier_wait(barriers[f"{kind}_raw"].at[raw_slot])

                @pl.when(index >= plan.term_stages)
                def _(kind: str = kind) -> None:
                    plgpu.barrier_wait(barriers[f"{kind}_free"].at[slot])

                terms = [memory[kind].at[slot, term] for term in range(operands.page_terms)]
                gpu.convert(memory[f"{kind}_raw"].at[raw_slot], terms, operands, seen)
                if operands.quantized:
                    which = int(kind == "v")
                    scales = gpu.load_as(memory["scales_raw"].at[raw_slot, which], plgpu.Layout.WGMMA.reduce(1))
                    places = plgpu.layout_cast(lax.iota(jnp.int32, plan.tile), plgpu.Layout.WGMMA.reduce(1))
                    kept = jnp.where(seen(places), scales, jnp.zeros(scales.shape, scales.dtype))
                    memory["scales"][slot, which] = kept
                plgpu.commit_smem()
                plgpu.barrier_arrive(barriers[f"{kind}_ready"].at[slot])

                @pl.when(index + plan.stages < span.tiles)
                def _(kind: str = kind) -> None:
                    fetch(kind, index + plan.stages, raw_slot)

        self._see_the_rest_freed(barriers, span)

    def _see_the_rest_freed(self, barriers: dict[str, Any], span: _Range) -> None:
        """Wait until the last tiles are used too, so that no barrier ends with a phase that nobody saw."""
        stages = self.plan.ready_stages

        @pl.loop(jnp.maximum(span.tiles - stages, 0), span.tiles)
        def _wait(index: jax.Array) -> None:
            for kind in ("k", "v"):
                plgpu.barrier_wait(barriers[f"{kind}_free"].at[lax.rem(index, jnp.int32(stages))])

    # --- the multiplying warpgroups ----------------------------------------------------------------------------------

    def _multiply(
        self,
        inputs: dict[str, Any],
        out: Any,
        memory: dict[str, Any],
        query: Any,
        result: Any,
        barriers: dict[str, Any],
        span: _Range,
        table: dict[str, jax.Array],
        warpgroup: jax.Array,
    ) -> None:
        """64 rows of queries against every tile, then their output."""
        plan, operands = self.plan, self.operands
        heads = lax.axis_index("heads") * plan.heads
        # Two heads share the tokens, or one head has twice as many.
        head = heads + warpgroup if plan.heads == MULTIPLIERS else heads
        skipped = jnp.int32(0) if plan.heads == MULTIPLIERS else warpgroup * ROWS
        token, position = table["token"] + skipped, table["position"] + skipped
        skip, stop = (jnp.clip(table[name] - skipped, 0, ROWS) for name in ("skip", "stop"))
        for term in range(operands.query_terms):
            source = inputs["q"].at[term, pl.ds(token, ROWS), head]
            plgpu.copy_gmem_to_smem(source, query.at[warpgroup, term], barriers["query"].at[warpgroup])
        plgpu.barrier_wait(barriers["query"].at[warpgroup])
        terms = [query.at[warpgroup, term] for term in range(operands.query_terms)]

        def step(index: jax.Array, carry: tuple[jax.Array, ...], *, masked: bool) -> tuple[jax.Array, ...]:
            values, highest, total = carry
            slot = lax.rem(index, jnp.int32(plan.ready_stages))
            start = (span.begin + index) * plan.tile
            plgpu.barrier_wait(barriers["k_ready"].at[slot])
            products = gpu.score_products(terms, self._tiles(memory, "k", slot), operands)
            if operands.quantized:
                scales = gpu.load_as(memory["scales"].at[slot, 0], plgpu.Layout.WGMMA.reduce(0))
                products = products * gpu.along_columns(scales, products.shape)
            plgpu.barrier_arrive(barriers["k_free"].at[slot])
            scores = gpu.base2_scores(products, self.spec)
            if masked:
                ahead = (gpu.iota(scores.shape, 0) + position) - (gpu.iota(scores.shape, 1) + start)
                seen = ahead >= 0
                if self.spec.window is not None:
                    seen = seen & (ahead < self.spec.window)
                scores = jnp.where(seen, scores, -jnp.inf)
            weights, highest, total, factor = gpu.softmax_step(scores, highest, total)
            values = values * gpu.along_rows(factor, values.shape)
            plgpu.barrier_wait(barriers["v_ready"].at[slot])
            if operands.quantized:
                scales = gpu.load_as(memory["scales"].at[slot, 1], plgpu.Layout.WGMMA.reduce(0))
                weights = weights * gpu.along_columns(scales, weights.shape)
            if masked and not operands.converts:
                self._clear_unseen(memory["v"].at[slot], barriers["cleared"], span, start, warpgroup)
            tiles = self._tiles(memory, "v", slot)
            values = gpu.add_weighted_values(values, weights, tiles, operands, self.interpret)
            plgpu.barrier_arrive(barriers["v_free"].at[slot])
            return values, highest, total

        highest, total = gpu.row_constant(ROWS, gpu.LOWEST), gpu.row_constant(ROWS, 0.0)
        if "sinks" in inputs:
            # The sink is one more score, without a value.
            highest = gpu.row_constant(ROWS, 1.0) * inputs["sinks"][head]
            total = gpu.row_constant(ROWS, 1.0)
        carry = (gpu.matrix_zeros(ROWS, operands.v_dim), highest, total)
        whole_begin, whole_end = self._whole_tiles(span, table)
        if self.spec.window is not None:
            carry = lax.fori_loop(0, whole_begin, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(whole_begin, whole_end, functools.partial(step, masked=False), carry)
        values, _, total = lax.fori_loop(whole_end, span.tiles, functools.partial(step, masked=True), carry)
        normalized = gpu.normalized(values, total).astype(out.dtype)
        gpu.store(result.at[warpgroup, :, pl.ds(0, operands.v_dim)], normalized)
        plgpu.commit_smem()
        _store_rows(result, out, warpgroup, token, head, skip, stop)

    def _whole_tiles(self, span: _Range, table: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The tiles, counted from the first, of which every token of the block sees every position."""
        tile = jnp.int32(self.plan.tile)
        begin = jnp.int32(0)
        if self.spec.window is not None:
            last = jnp.maximum(span.limit - self.spec.window, 0)
            begin = jnp.clip(lax.div(last + (tile - 1), tile) - span.begin, 0, span.tiles)
        return begin, jnp.clip(lax.div(table["position"] + table["skip"] + 1, tile) - span.begin, begin, span.tiles)

    def _clear_unseen(self, tile: Any, cleared: Any, span: _Range, start: jax.Array, warpgroup: jax.Array) -> None:
        """Zero the values that no token of the block may see, the work shared between both warpgroups."""

        @pl.when((start + self.plan.tile > span.limit) | (start < span.first_visible))
        def _clear() -> None:
            for part in range(self.plan.tile // ROWS):

                @pl.when(warpgroup == part % MULTIPLIERS)
                def _(part: int = part) -> None:
                    def seen(offsets: jax.Array) -> jax.Array:
                        positions = offsets + (start + part * ROWS)
                        return (positions < span.limit) & (positions >= span.first_visible)

                    gpu.clear_rows(tile.at[pl.ds(part * ROWS, ROWS)], seen)

            plgpu.barrier_arrive(cleared)
            plgpu.barrier_wait(cleared)

    def _tiles(self, memory: dict[str, Any], kind: str, slot: jax.Array) -> list[Any]:
        """The terms of a tile's keys or values."""
        if not self.operands.converts:
            return [memory[kind].at[slot]]
        return [memory[kind].at[slot, term] for term in range(self.operands.page_terms)]


def _store_rows(
    result: Any, out: Any, warpgroup: jax.Array, token: jax.Array, head: jax.Array, skip: jax.Array, stop: jax.Array
) -> None:
    """Copy rows skip .. stop - 1 of a warpgroup's 64 to out[token:, head].

    Copies have static sizes, so there is one for each bit of the number of rows.
    """
    count = jnp.maximum(stop - skip, 0)
    row = skip
    for size in (64, 32, 16, 8, 4, 2, 1):
        if size > out.shape[0]:
            continue
        bit = count & size

        @pl.when(bit != 0)
        def _(size: int = size, row: jax.Array = row) -> None:
            target = out.at[pl.ds(token + row, size), head]
            plgpu.copy_smem_to_gmem(result.at[warpgroup, pl.ds(row, size)], target)

        row = row + bit
    plgpu.wait_smem_to_gmem(0)
