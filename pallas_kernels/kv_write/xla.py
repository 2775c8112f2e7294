"""Writing keys and values as XLA scatters, on any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.pages import KVPages, is_quantized, quantize_rows


def kv_write(k: jax.Array, v: jax.Array | None, pages: KVPages, page_ids: jax.Array, offsets: jax.Array) -> KVPages:
    """See `pallas_kernels.kv_write.kv_write`."""
    # A scatter of one row becomes an update slice, whose pool XLA copies before a loop that reads it; the extra row,
    # which goes to the padding page, keeps it a scatter.
    page_ids, offsets = jnp.append(page_ids, 0), jnp.append(offsets, 0)
    scales = pages.scales
    if is_quantized(pages.data.dtype):
        assert scales is not None, "quantized pages always carry scales"
        k, k_scales = quantize_rows(k, pages.data.dtype)
        v, v_scales = (v, k_scales) if v is None else quantize_rows(v, pages.data.dtype)
        row_scales = _with_padding_row(jnp.stack([k_scales, v_scales], axis=1))
        scales = scales.at[page_ids, :, :, offsets].set(row_scales, mode="drop")
    # Two scatters compile in half the time of one over joined rows.
    data, k_dim = pages.data, k.shape[-1]
    heads = slice(None)
    if pages.apart:
        key_places, value_places = (page_ids, heads, 0, offsets), (page_ids, heads, 1, offsets)
    else:
        key_places = (page_ids, heads, offsets, slice(k_dim))
        value_places = (page_ids, heads, offsets, slice(k_dim, None))
    data = data.at[key_places].set(_with_padding_row(k.astype(data.dtype)), mode="drop")
    if v is None:
        return KVPages(data, scales)
    data = data.at[value_places].set(_with_padding_row(v.astype(data.dtype)), mode="drop")
    return KVPages(data, scales)


def _with_padding_row(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, [(0, 1)] + [(0, 0)] * (rows.ndim - 1))
