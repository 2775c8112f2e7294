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
        page_ids = jnp.where(lengths > 0, jnp.take_along_axis(page_table, columns, axis=1)[:, 0], 0)
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
    begins = jnp.maximum(attention.visible_from(lengths, spec), 0)
    grouped_sinks = None if sinks is None else sinks.reshape(1, *group_shape[1:])
    # A sink alone would give an empty row the denominator 1 and the output 0: the same as no sink.
    partial = attention.empty_partial(group_shape, v_dim, grouped_sinks)
    partial = _add_border_pages(partial, queries, pages, page_table, begins, lengths, spec)
    partial = _add_whole_pages(partial, queries, pages, page_table, begins, lengths, spec)
    return attention.finish(partial).reshape(batch, heads, v_dim).astype(q.dtype)


def _add_border_pages(
    partial: attention.Partial,
    queries: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    begins: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
) -> attention.Partial:
    """The page that holds the last position, unless it is full, and the one in which the window begins."""
    size = pages.page_size
    last = lengths // size
    columns, wanted = last[:, None], jnp.ones_like(last, bool)[:, None]
    if spec.window is not None:
        first = begins // size
        columns = jnp.stack([first, last], axis=1)
        wanted = jnp.stack([(first < last) & (begins % size > 0), wanted[:, 0]], axis=1)
    page_ids = jnp.take_along_axis(page_table, jnp.minimum(columns, page_table.shape[1] - 1), axis=1)
    positions = columns[:, :, None] * size + jnp.arange(size)
    visible = (positions >= begins[:, None, None]) & (positions < lengths[:, None, None]) & wanted[:, :, None]
    visible = visible.reshape(lengths.shape[0], -1)
    k, v = attention.gather_block(pages, page_ids, spec)
    v = jnp.where(visible[:, None, :, None], v, 0)
    return attention.add_block(partial, queries, k, v, visible[:, None, None], spec.softcap)


def _add_whole_pages(
    partial: attention.Partial,
    queries: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    begins: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
) -> attention.Partial:
    """The pages of which every position is visible, a block at a time."""
    per_block = attention.block_pages(pages, lengths.shape[0])
    table = attention.pad_table(page_table, per_block)
    first, end = -(-begins // pages.page_size), lengths // pages.page_size
    has_any = first < end
    # Columns that a row does not see whole repeat one that it does: their weight is 0, their values finite.
    stand_in = jnp.take_along_axis(page_table, jnp.minimum(first, page_table.shape[1] - 1)[:, None], axis=1)

    def body(index: jax.Array, looped: attention.Partial) -> attention.Partial:
        columns = index * per_block + jnp.arange(per_block)
        whole = (columns >= first[:, None]) & (columns < end[:, None])
        page_ids = jax.lax.dynamic_slice(table, (0, index * per_block), whole.shape)
        k, v = attention.gather_block(pages, jnp.where(whole, page_ids, stand_in), spec)
        visible = jnp.repeat(whole, pages.page_size, axis=1)
        return attention.add_block(looped, queries, k, v, visible[:, None, None], spec.softcap)

    first_block = jnp.min(jnp.where(has_any, first, page_table.shape[1])) // per_block
    last_block = -(-jnp.max(jnp.where(has_any, end, 0)) // per_block)
    looped = jax.lax.fori_loop(first_block, last_block, body, partial)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        # A row without a whole page had nothing finite to stand in.
        return jnp.where(has_any.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(keep, looped, partial)
