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
    if k is not None and v is not None:
        positions = jnp.maximum(lengths - 1, 0)
        columns = (positions // pages.page_size)[:, None]
        page_ids = jnp.where(lengths > 0, jnp.take_along_axis(page_table, columns, axis=1)[:, 0], 0)
        pages = kv_write_xla.kv_write(k, v, pages, page_ids, positions % pages.page_size)
    return _attend(q, pages, page_table, lengths, spec, sinks), pages


def _attend(
    q: jax.Array, pages: KVPages, page_table: jax.Array, lengths: jax.Array, spec: AttentionSpec, sinks: jax.Array | None
) -> jax.Array:
    batch, heads, _ = q.shape
    group_shape = (batch, pages.kv_heads, heads // pages.kv_heads)
    v_dim = spec.value_width(pages.width)
    queries = attention.pad_queries(q, pages.width, spec.scale).reshape(*group_shape, pages.width)
    per_block = attention.block_pages(pages)
    block = per_block * pages.page_size
    table = attention.pad_table(page_table, per_block)
    begins = attention.visible_from(lengths, spec)
    first = jnp.min(jnp.where(lengths > 0, jnp.maximum(begins, 0), jnp.max(lengths))) // block
    last = -(-jnp.max(lengths) // block)

    def body(index: jax.Array, partial: attention.Partial) -> attention.Partial:
        page_ids = jax.lax.dynamic_slice(table, (0, index * per_block), (batch, per_block))
        positions = (index * block + jnp.arange(block))[None]
        visible = (positions < lengths[:, None]) & (positions >= begins[:, None])
        rows = attention.gather_block(pages, page_ids, visible, v_dim)
        return attention.add_block(partial, queries, rows, visible[:, None, None], spec.softcap)

    grouped_sinks = None if sinks is None else sinks.reshape(1, *group_shape[1:])
    start = attention.empty_partial(group_shape, pages.width, grouped_sinks)
    # A sink alone would give an empty row the denominator 1 and the output 0: the same as no sink.
    partial = jax.lax.fori_loop(first, last, body, start)
    return attention.finish(partial, v_dim).reshape(batch, heads, v_dim).astype(q.dtype)
