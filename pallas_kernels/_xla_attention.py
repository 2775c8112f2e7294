"""What the XLA lowerings of decode and prefill share: online softmax over blocks of gathered pages.

The loop over a sequence's pages has a bound known only at run time, so one compiled program serves every context
length and reads no more than the longest sequence needs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import current_platform
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec

BLOCK_POSITIONS = 128
"""Positions of a row gathered at a time: enough to amortize the loop."""
BLOCK_ROWS_TIMES_POSITIONS = 2048
"""Positions of all rows gathered at a time on a CPU: few enough to stay in a core's cache."""
FEW_QUERIES = 8
"""Up to so many queries of a key/value head are few: see `_better_by_sums`."""
MASKED = -1e30
"""Score of an invisible position: finite, so that a row that sees nothing yields no NaN."""
_EXACT = jax.lax.Precision.HIGHEST  # accelerators would otherwise round float32 operands


class Partial(NamedTuple):
    """Running softmax of [..., queries]: largest score, sum of exponentials, weighted sum of values."""

    largest: jax.Array
    total: jax.Array
    weighted: jax.Array


def block_pages(pages: KVPages, rows: int = 1) -> int:
    """Pages of one row in one block of that many rows."""
    positions = BLOCK_POSITIONS
    if current_platform() == "cpu":
        positions = min(positions, max(BLOCK_ROWS_TIMES_POSITIONS // rows, BLOCK_POSITIONS // 4))
    return max(1, positions // pages.page_size)


def pad_table(page_table: jax.Array, pages_per_block: int) -> jax.Array:
    """The table with its columns padded (page 0) to whole blocks."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_block)))


def gather_block(pages: KVPages, page_ids: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """Keys f32[B, kv_heads, positions, k_dim] and values f32[.., v_dim] of the pages i32[B, n], one after the other.

    Unused rows of a page may hold NaN. A score is replaced where its position is invisible, so keys do no harm; values
    do, since 0 * NaN is NaN: the caller replaces them.
    """
    batch = page_ids.shape[0]
    head_ids = jnp.arange(pages.kv_heads)
    flat_ids = (page_ids[:, None, :] * pages.kv_heads + head_ids[None, :, None]).reshape(-1)
    # One row per page and head: XLA's CPU gather is quick only when it copies long rows of a matrix.
    row = pages.page_size * pages.data.shape[-1]
    flat = pages.data.reshape(-1, row)

    def gather(ids: jax.Array) -> jax.Array:
        return flat.at[ids].get(mode="promise_in_bounds").reshape(batch, pages.kv_heads, -1, pages.data.shape[-1])

    if pages.apart:
        parts = gather(2 * flat_ids), gather(2 * flat_ids + 1)
    else:
        parts = spec.split_rows(gather(flat_ids))
    k, v = (part.astype(jnp.float32) for part in parts)
    if pages.scales is None:
        return k, v
    scales = pages.scales[page_ids].transpose(2, 0, 3, 1, 4)  # [2, B, kv_heads, n, page_size]
    scales = scales.reshape(2, batch, pages.kv_heads, -1, 1)
    return k * scales[0], v * scales[1]


def empty_partial(shape: tuple[int, ...], v_dim: int, sinks: jax.Array | None) -> Partial:
    """The start: nothing seen, or only the sinks (broadcastable to `shape`)."""
    weighted = jnp.zeros((*shape, v_dim), jnp.float32)
    if sinks is None:
        return Partial(jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), weighted)
    # exp(sink - largest) is 1 while the sink itself is the largest.
    return Partial(jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape, jnp.float32), weighted)


def add_block(
    partial: Partial | None, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, softcap: float | None
) -> Partial:
    """Fold one block in.

    partial: None where nothing was seen before, not even sinks.
    q: f32[B, kv_heads, queries, k_dim], scaled. k: f32[B, kv_heads, positions, k_dim]. v: f32[.., v_dim], finite.
    visible: bool, broadcastable to [B, kv_heads, queries, positions].
    """
    by_sums = _better_by_sums(q)
    if by_sums:
        scores = (k[:, :, None] * q[:, :, :, None]).sum(-1)
    else:
        # Keys on the left: for few queries, XLA's CPU product reads them twice as fast that way.
        scores = jnp.einsum("bhtd,bhqd->bhtq", k, q, precision=_EXACT).swapaxes(2, 3)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible, scores, MASKED)
    largest = scores.max(-1) if partial is None else jnp.maximum(partial.largest, scores.max(-1))
    # While a row has seen nothing, largest is MASKED, and exp(0) would count the invisible.
    weights = jnp.exp(scores - jnp.maximum(largest, MASKED / 2)[..., None])
    if by_sums:
        weighted = (v[:, :, None] * weights[..., None]).sum(3)
    else:
        weighted = jnp.einsum("bhqt,bhtd->bhqd", weights, v, precision=_EXACT)
    if partial is None:
        return Partial(largest, weights.sum(-1), weighted)
    decay = jnp.exp(partial.largest - largest)
    return Partial(largest, partial.total * decay + weights.sum(-1), partial.weighted * decay[..., None] + weighted)


def _better_by_sums(q: jax.Array) -> bool:
    """Whether few queries [B, kv_heads, queries, k_dim] had better be multiplied one by one and summed.

    XLA's CPU compiler reads gathered pages as they lie for that, and copies them to another shape for a product of
    matrices, at 64 features up to 1.5 times as slow. Of a single row or query it makes a slow loop instead.
    """
    rows, _, queries, _ = q.shape
    return current_platform() == "cpu" and rows > 1 and 1 < queries <= FEW_QUERIES


def finish(partial: Partial) -> jax.Array:
    """The attention output f32[..., v_dim]; 0 for a row that saw nothing, NaN for one that saw NaN."""
    total = partial.total[..., None]
    return jnp.where(total == 0, 0, partial.weighted / jnp.where(total == 0, 1, total))


def take(array: jax.Array, indices: jax.Array) -> jax.Array:
    """array[indices] along the first axis, for indices that are inside: one operation, where indexing makes several."""
    return array.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)
