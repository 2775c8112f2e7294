"""Causal attention of several sequences' new positions, of different lengths, over their pages."""

from __future__ import annotations

import jax

from pallas_kernels import dispatch
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec

__all__ = ["paged_prefill"]


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
    impl: str = dispatch.AUTO,
) -> tuple[jax.Array, KVPages]:
    """Write the new keys and values of every row, then attend causally over what each position can see.

    The tokens of all rows lie flat, one row after the other: row i owns tokens query_starts[i] .. query_starts[i + 1]
    of T; tokens from query_starts[N] on are padding and get 0.

    q: [T, heads, k_dim]. Query head h reads key/value head h // (heads // kv_heads).
    k: [T, kv_heads, k_dim], v: [T, kv_heads, v_dim]; both None when they are in the pages already. v is None with
    `spec.values_in_keys`.
    page_table: i32[N, max_pages], the page of positions column * page_size ..; unused entries are 0.
    query_starts: i32[N + 1], rising. lengths: i32[N], positions of each row after this call, so its token j stands at
    position lengths - count + j.
    sinks: f32[heads] or None: logits that only add to each head's softmax denominator.
    impl: "auto" or a lowering of `pallas_kernels.dispatch`.
    Returns out [T, heads, v_dim] in q's type, and the pages.
    Raises KernelUnavailable when an explicit `impl` cannot run these arguments.
    """
    arguments = (q, k, v, pages, page_table, query_starts, lengths, spec)
    choice = dispatch.choose_for(__name__, impl, *arguments, sinks=sinks)
    return dispatch.load(__name__, choice.name).paged_prefill(*arguments, sinks=sinks)
