"""kv_write for Hopper and newer GPUs (Mosaic GPU): rows go from the new K/V into their pages by TMA, in place.

A block carries a few tokens: one copy brings their keys (all heads) into shared memory, then one copy for each token
scatters them over the heads of its page; values likewise. The pool is a mutable reference of the kernel, so with a
donated pool nothing else of it moves. Quantizing is elementwise work on a few rows and stays in XLA, with the scales
(1 / 32 of the bytes or less) scattered by XLA, also in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._gpu_attention import LANE, unsupported_here
from pallas_kernels.pages import KVPages, quantize_rows

# The bytes of a counted copy are shared out over the 128 threads that wait for it.
COPY_BYTES_MULTIPLE = 128
MAX_BLOCK_BYTES = 96 * 1024


def unsupported(k: Any, v: Any, pages: KVPages, page_ids: Any, offsets: Any) -> str | None:
    """Why this lowering cannot run these shapes and types, as a sentence; None when it can."""
    del page_ids, offsets
    here = unsupported_here()
    if here is not None:
        return here
    item = jnp.dtype(pages.data.dtype).itemsize
    for name, rows in (("key", k), ("value", v)):
        dim = rows.shape[-1]
        if dim * item % 16:
            return f"The GPU's copy engine moves multiples of 16 bytes, but a {name} row has {dim * item}."
        if dim > 256 or pages.kv_heads > 256:
            return f"One copy of the GPU takes at most 256 heads of 256 features, not {pages.kv_heads} of {dim}."
    if tokens_per_block(pages, k.shape[-1], v.shape[-1]) is None:
        return f"The rows of {pages.kv_heads} heads do not fit a block's shared memory."
    return None


def tokens_per_block(pages: KVPages, k_dim: int, v_dim: int) -> int | None:
    """Tokens of a block: 4, or more where few heads make the copies too small to be counted; None when none fits."""
    item = jnp.dtype(pages.data.dtype).itemsize
    for tokens in (4, 2, 8, 16, 1):
        row_bytes = [tokens * pages.kv_heads * dim * item for dim in (k_dim, v_dim)]
        if all(size % COPY_BYTES_MULTIPLE == 0 for size in row_bytes) and sum(row_bytes) <= MAX_BLOCK_BYTES:
            return tokens
    return None


def kv_write(
    k: jax.Array, v: jax.Array, pages: KVPages, page_ids: jax.Array, offsets: jax.Array, *, interpret: Any = None
) -> KVPages:
    """`pallas_kernels.kv_write` by Mosaic GPU; `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU."""
    scales = pages.scales
    if scales is not None:
        k, k_scales = quantize_rows(k, pages.data.dtype)
        v, v_scales = quantize_rows(v, pages.data.dtype)
        scales = scales.at[page_ids, 0, :, offsets].set(k_scales).at[page_ids, 1, :, offsets].set(v_scales)
    k, v = k.astype(pages.data.dtype), v.astype(pages.data.dtype)
    tokens = tokens_per_block(pages, k.shape[-1], v.shape[-1])
    assert tokens is not None
    # Padding tokens go to page 0, as every padding does.
    missing = -k.shape[0] % tokens
    k, v = (jnp.pad(rows, ((0, missing), (0, 0), (0, 0))) for rows in (k, v))
    page_ids, offsets = (jnp.pad(index, (0, missing)) for index in (page_ids, offsets))
    return KVPages(_scatter_rows(k, v, pages.data, page_ids, offsets, tokens, interpret), scales)


def _scatter_rows(
    k: jax.Array, v: jax.Array, data: jax.Array, page_ids: jax.Array, offsets: jax.Array, tokens: int, interpret: Any
) -> jax.Array:
    """The pool with k and v at (page_ids, offsets); their number is a multiple of `tokens`."""
    total, kv_heads, k_dim = k.shape
    v_dim = v.shape[-1]

    def body(
        k_ref: Any, v_ref: Any, page_ref: Any, offset_ref: Any, pool: Any, k_rows: Any, v_rows: Any, ready: Any
    ) -> None:
        first = lax.axis_index("block") * tokens
        plgpu.copy_gmem_to_smem(k_ref.at[pl.ds(first, tokens)], k_rows, ready)
        plgpu.copy_gmem_to_smem(v_ref.at[pl.ds(first, tokens)], v_rows, ready)
        targets = [(page_ref[first + token], offset_ref[first + token]) for token in range(tokens)]
        plgpu.barrier_wait(ready)
        for token, (page, offset) in enumerate(targets):
            plgpu.copy_smem_to_gmem(k_rows.at[token], pool.at[page, :, offset, pl.ds(0, k_dim)])
            plgpu.copy_smem_to_gmem(v_rows.at[token], pool.at[page, :, offset, pl.ds(k_dim, v_dim)])
        plgpu.wait_smem_to_gmem(0)

    pool = jax.new_ref(data)
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((tokens, kv_heads, k_dim), data.dtype),
            plgpu.SMEM((tokens, kv_heads, v_dim), data.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(total // tokens,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
        interpret=interpret,
    )(k, v, page_ids, offsets, pool)
    return jax.freeze(pool)
