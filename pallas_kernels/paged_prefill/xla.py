"""Ragged paged prefill in plain XLA, on any device.

Each row's queries are cut into blocks; one loop walks the blocks of all rows, another the pages that a block can see,
both with bounds known only at run time: no padding of short rows to the longest, no score beyond the causal border.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _xla_attention as attention
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.pages import KVPages
from pallas_kernels.ragged import page_places, token_positions
from pallas_kernels.spec import AttentionSpec

QUERY_BLOCK = 128
"""Queries of one row that are computed together, at most."""
LEAST_QUERY_BLOCK = 32
"""At least: as many as the rows have on the average, since a shorter row computes a whole block."""


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
    """See `pallas_kernels.paged_prefill.paged_prefill`."""
    tokens = q.shape[0]
    if k is not None:
        rows, positions = token_positions(tokens, query_starts, lengths)
        places = page_places(page_table, rows, positions, pages.page_size)
        pages = kv_write_xla.kv_write(k, v, pages, *places)
    return _attend(q, pages, page_table, query_starts, lengths, spec, sinks), pages


def _attend(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    query_starts: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None,
) -> jax.Array:
    tokens, heads, _ = q.shape
    v_dim = spec.value_width(pages.width)
    query_block = min(tokens, QUERY_BLOCK, max(LEAST_QUERY_BLOCK, tokens // lengths.shape[0]))
    blocks = _plan(query_starts, lengths, query_block, -(-tokens // query_block) + lengths.shape[0])
    queries = q.astype(jnp.float32) * spec.scale
    # A row's last block may reach past the last token; the padding keeps the slice from sliding back.
    queries = jnp.pad(queries, ((0, query_block), (0, 0), (0, 0)))
    table = attention.pad_table(page_table, attention.block_pages(pages))

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        row, first_token, first_position, length = attention.take(blocks.table, index)
        block_queries = jax.lax.dynamic_slice(queries, (first_token, 0, 0), (query_block, *queries.shape[1:]))
        table_row = attention.take(table, row)
        result = _attend_block(block_queries, pages, table_row, first_position, length, spec, sinks)
        # What a short last block writes past its row is overwritten by the next row's blocks, or is padding.
        return jax.lax.dynamic_update_slice(out, result, (first_token, 0, 0))

    out = jnp.zeros((tokens + query_block, heads, v_dim), jnp.float32)
    out = jax.lax.fori_loop(0, blocks.count, body, out)[:tokens]
    return jnp.where((jnp.arange(tokens) < query_starts[-1])[:, None, None], out, 0).astype(q.dtype)


class _Blocks(NamedTuple):
    """Blocks of queries: their number, and i32[most blocks, 4] of each its row, first token and position, and the row's
    length."""

    count: jax.Array
    table: jax.Array


def _plan(query_starts: jax.Array, lengths: jax.Array, query_block: int, most: int) -> _Blocks:
    """Planned once for all layers of a model, as XLA sees; inside the loop it would be done again in every block."""
    counts = jnp.diff(query_starts)
    per_row = -(-counts // query_block)
    ends = jnp.cumsum(per_row)
    index = jnp.arange(most)
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), lengths.shape[0] - 1)
    inside = (index - ends[row] + per_row[row]) * query_block
    places = row, query_starts[row] + inside, lengths[row] - counts[row] + inside, lengths[row]
    return _Blocks(ends[-1], jnp.stack(places, axis=1).astype(jnp.int32))


def _attend_block(
    queries: jax.Array,
    pages: KVPages,
    table_row: jax.Array,
    first_position: jax.Array,
    length: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention f32[query_block, heads, v_dim] of consecutive queries of one row; those past `length` mean nothing."""
    count, heads, k_dim = queries.shape
    v_dim = spec.value_width(pages.width)
    group = heads // pages.kv_heads
    by_head = queries.reshape(count, pages.kv_heads, group, k_dim).transpose(1, 2, 0, 3)
    by_head = by_head.reshape(1, pages.kv_heads, group * count, k_dim)
    query_positions = first_position + jnp.arange(count)
    per_block = attention.block_pages(pages)
    block = per_block * pages.page_size

    def body(index: jax.Array, partial: attention.Partial) -> attention.Partial:
        page_ids = jax.lax.dynamic_slice(table_row, (index * per_block,), (per_block,))[None]
        positions = index * block + jnp.arange(block)
        seen_by_any, visible = positions < length, positions[None] <= query_positions[:, None]
        if spec.window is not None:
            seen_by_any &= positions > first_position - spec.window
            visible &= positions[None] > query_positions[:, None] - spec.window
        k, v = attention.gather_block(pages, page_ids, spec)
        v = jnp.where(seen_by_any[:, None], v, 0)
        return attention.add_block(partial, by_head, k, v, jnp.tile(visible, (group, 1))[None, None], spec.softcap)

    first = 0 if spec.window is None else jnp.maximum(first_position + 1 - spec.window, 0) // block
    last = -(-jnp.minimum(first_position + count, length) // block)
    head_sinks = None if sinks is None else jnp.repeat(sinks.reshape(1, pages.kv_heads, group), count, axis=-1)
    start = attention.empty_partial((1, pages.kv_heads, group * count), v_dim, head_sinks)
    out = attention.finish(jax.lax.fori_loop(first, last, body, start))
    return out.reshape(heads, count, v_dim).transpose(1, 0, 2)
