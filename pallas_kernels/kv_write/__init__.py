"""Write new keys and values into their pages."""

from __future__ import annotations

import jax

from pallas_kernels import dispatch
from pallas_kernels.pages import KVPages

__all__ = ["kv_write"]


def kv_write(
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    impl: str = dispatch.AUTO,
) -> KVPages:
    """The pages with every token's key and value in place; donate `pages` and nothing of the pool is copied.

    k: [T, kv_heads, k_dim]. v: [T, kv_heads, v_dim], or None where values lie in keys. Any float type; quantized pages
    quantize each row by its largest magnitude.
    page_ids, offsets: i32[T], the page of each token and its position inside; a padding token names page 0.
    impl: "auto" or a lowering of `pallas_kernels.dispatch`.
    Raises KernelUnavailable when an explicit `impl` cannot run these arguments.
    """
    arguments = (k, v, pages, page_ids, offsets)
    choice = dispatch.choose_for(__name__, impl, *arguments)
    return dispatch.load(__name__, choice.name).kv_write(*arguments)
