"""Paged decode in plain XLA, on any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import _xla_attention as attention
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec


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
    """See `pallas_kernels.paged_decode.paged_decode`."""
    if k is not None:
        positions = jnp.maximum(lengths - 1, 0)
        columns = (positions // pages.page_size)[:, None]
        page_ids = jnp.where(lengths > 0, _pages_at(page_table, columns)[:, 0], 0)
        pages = kv_write_xla.kv_write(k, v, pages, page_ids, positions % pages.page_size)
    return _attend(q, pages, page_table, lengths, spec, sinks), pages


def _attend(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention over the pages seen in part first, then over those seen whole.

    Only the former need masking of values, a pass over memory as costly as each of the two products.
    """
    batch, heads, _ = q.shape
    group_shape = (batch, pages.kv_heads, heads // pages.kv_heads)
    v_dim = spec.value_width(pages.width)
    queries = (q.astype(jnp.float32) * spec.scale).reshape(*group_shape, -1)
    # A sink alone would give an empty row the denominator 1 and the output 0: the same as no sink.
    start = None if sinks is None else attention.empty_partial(group_shape, v_dim, sinks.reshape(1, *group_shape[1:]))
    partial = _add_border_pages(start, queries, pages, page_table, lengths, spec)
    partial = _add_whole_pages(partial, queries, pages, page_table, lengths, spec)
    return attention.finish(partial).reshape(batch, heads, v_dim).astype(q.dtype)


def _add_border_pages(
    partial: attention.Partial | None,
    queries: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
) -> attention.Partial:
    """The page that holds the last position, unless it is full, and the one in which the window begins."""
    size = pages.page_size
    last = lengths // size
    begins = None if spec.window is None else jnp.maximum(lengths - spec.window, 0)
    columns = last[:, None] if begins is None else jnp.stack([begins // size, last], axis=1)
    positions = columns[:, :, None] * size + jnp.arange(size)
    visible = positions < lengths[:, None, None]
    if begins is not None:
        first_is_border = (begins // size < last) & (begins % size > 0)
        wanted = jnp.stack([first_is_border, jnp.ones_like(first_is_border)], axis=1)
        visible &= (positions >= begins[:, None, None]) & wanted[:, :, None]
    page_ids = _pages_at(page_table, columns)
    visible = visible.reshape(lengths.shape[0], -1)
    k, v = attention.gather_block(pages, page_ids, spec)
    v = jnp.where(visible[:, None, :, None], v, 0)
    return attention.add_block(partial, queries, k, v, visible[:, None, None], spec.softcap)


def _add_whole_pages(
    partial: attention.Partial,
    queries: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
) -> attention.Partial:
    """The pages of which every position is visible, a block at a time."""
    per_block = attention.block_pages(pages, lengths.shape[0])
    end = lengths // pages.page_size
    first = jnp.zeros_like(end) if spec.window is None else -(-jnp.maximum(lengths - spec.window, 0) // pages.page_size)
    has_any = first < end

    def is_whole(columns: jax.Array) -> jax.Array:
        before_end = columns < end[:, None]
        return before_end if spec.window is None else before_end & (columns >= first[:, None])

    # Columns that a row does not see whole repeat one that it does: their weight is 0, their values finite.
    table = attention.pad_table(page_table, per_block)
    table = jnp.where(is_whole(jnp.arange(table.shape[1])), table, _pages_at(page_table, first[:, None]))

    def body(index: jax.Array, looped: attention.Partial) -> attention.Partial:
        page_ids = jax.lax.dynamic_slice(table, (0, index * per_block), (table.shape[0], per_block))
        k, v = attention.gather_block(pages, page_ids, spec)
        visible = jnp.repeat(is_whole(index * per_block + jnp.arange(per_block)), pages.page_size, axis=1)
        return attention.add_block(looped, queries, k, v, visible[:, None, None], spec.softcap)

    first_block = 0
    if spec.window is not None:
        first_block = jnp.min(jnp.where(has_any, first, page_table.shape[1])) // per_block
    last_block = -(-jnp.max(jnp.where(has_any, end, 0)) // per_block)
    looped = jax.lax.fori_loop(first_block, last_block, body, partial)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        # A row without a whole page had nothing finite to stand in.
        return jnp.where(has_any.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(keep, looped, partial)


def _pages_at(page_table: jax.Array, columns: jax.Array) -> jax.Array:
    """The pages i32[B, n] at these columns of each row, beyond the last those of the last."""
    rows = jnp.arange(page_table.shape[0])[:, None]
    columns = jnp.minimum(columns, page_table.shape[1] - 1)
    return page_table.at[rows, columns].get(mode="promise_in_bounds", wrap_negative_indices=False)
