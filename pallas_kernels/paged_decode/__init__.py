"""Attention of one new position per sequence over its pages."""

from __future__ import annotations

import jax

from pallas_kernels import dispatch
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec

__all__ = ["paged_decode"]


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
    impl: str = dispatch.AUTO,
) -> tuple[jax.Array, KVPages]:
    """Write each sequence's new key and value, then attend over all it can see.

    q: [B, heads, k_dim]. Query head h reads key/value head h // (heads // kv_heads).
    k: [B, kv_heads, k_dim], v: [B, kv_heads, v_dim], stored at position lengths - 1; both None when they are in the
    pages already, which then come back untouched. v is None with `spec.values_in_keys`.
    page_table: i32[B, max_pages], the page of positions column * page_size ..; unused entries are 0.
    lengths: i32[B], visible positions including the new one; 0 marks an empty row, whose output is 0.
    sinks: f32[heads] or None: logits that only add to each head's softmax denominator.
    impl: "auto" or a lowering of `pallas_kernels.dispatch`.
    Returns out [B, heads, v_dim] in q's type, and the pages.
    Raises KernelUnavailable when an explicit `impl` cannot run these arguments.
    """
    arguments = (q, k, v, pages, page_table, lengths, spec)
    choice = dispatch.choose_for(__name__, impl, *arguments, sinks=sinks)
    return dispatch.load(__name__, choice.name).paged_decode(*arguments, sinks=sinks)
