"""kv_write for Hopper and newer GPUs (Mosaic GPU): rows go from the new K/V into their pages by TMA, in place.

A block carries a few tokens: one copy brings their keys (all heads) into shared memory, then one copy for each token
scatters them over the heads of its page; values likewise. The pool is a mutable reference of the kernel, so with a
donated pool nothing else of it moves. Quantizing is elementwise work on a few rows and stays in XLA, with the scales
(1 / 32 of the bytes or less) scattered by XLA, also in place.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._gpu_attention import LANE, unsupported_here
from pallas_kernels.pages import NOT_JOINED, KVPages, quantize_rows

# Shared-memory addresses of copies are multiples of 128 bytes, and so are the bytes of a copy that is waited for
# (the 128 threads share them out). Rows that are not, as a lone head of 80 features, are padded before the kernel.
ALIGNMENT = 128
BLOCK_TOKENS = 4
MAX_BLOCK_BYTES = 220 * 1024


def unsupported(k: Any, v: Any, pages: KVPages, page_ids: Any, offsets: Any) -> str | None:
    """Why this lowering cannot run these shapes and types, as a sentence; None when it can."""
    del page_ids, offsets
    here = unsupported_here()
    if here is not None:
        return here
    if pages.apart:
        return NOT_JOINED
    if v is None:
        return "The Mosaic GPU kernel writes keys and values side by side, but here values lie in keys."
    item = jnp.dtype(pages.data.dtype).itemsize
    for name, rows in (("key", k), ("value", v)):
        dim = rows.shape[-1]
        if dim * item % 16:
            return f"The GPU's copy engine moves multiples of 16 bytes, but a {name} row has {dim * item}."
        if dim > 256 or pages.kv_heads > 256:
            return f"One copy of the GPU takes at most 256 heads of 256 features, not {pages.kv_heads} of {dim}."
    dims = (k.shape[-1], v.shape[-1])
    if BLOCK_TOKENS * padded_heads(pages.kv_heads, dims, item) * sum(dims) * item > MAX_BLOCK_BYTES:
        return f"The rows of {pages.kv_heads} heads do not fit a block's shared memory."
    return None


def padded_heads(heads: int, dims: tuple[int, int], item: int) -> int:
    """Heads rounded up so that one token's keys, and its values, are whole units of the copy engine."""
    units = [ALIGNMENT // math.gcd(ALIGNMENT, dim * item) for dim in dims]
    unit = math.lcm(*units)
    return -(-heads // unit) * unit


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
    # Padding tokens go to page 0, as every padding does; padding heads go nowhere.
    more_tokens = -k.shape[0] % BLOCK_TOKENS
    item = jnp.dtype(pages.data.dtype).itemsize
    more_heads = padded_heads(pages.kv_heads, (k.shape[-1], v.shape[-1]), item) - pages.kv_heads
    k, v = (jnp.pad(rows, ((0, more_tokens), (0, more_heads), (0, 0))) for rows in (k, v))
    page_ids, offsets = (jnp.pad(index, (0, more_tokens)) for index in (page_ids, offsets))
    return KVPages(_scatter_rows(k, v, pages.data, page_ids, offsets, interpret), scales)


def _scatter_rows(
    k: jax.Array, v: jax.Array, data: jax.Array, page_ids: jax.Array, offsets: jax.Array, interpret: Any
) -> jax.Array:
    """The pool with k and v at (page_ids, offsets); their number is a multiple of BLOCK_TOKENS, heads may be padded."""
    total, stored_heads, k_dim = k.shape
    tokens, heads = BLOCK_TOKENS, pl.ds(0, data.shape[1])
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
            plgpu.copy_smem_to_gmem(k_rows.at[token, heads], pool.at[page, :, offset, pl.ds(0, k_dim)])
            plgpu.copy_smem_to_gmem(v_rows.at[token, heads], pool.at[page, :, offset, pl.ds(k_dim, v_dim)])
        plgpu.wait_smem_to_gmem(0)

    pool = jax.new_ref(data)
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((tokens, stored_heads, k_dim), data.dtype),
            plgpu.SMEM((tokens, stored_heads, v_dim), data.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(total // tokens,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
        interpret=interpret,
    )(k, v, page_ids, offsets, pool)
    return jax.freeze(pool)
