"""top-k and top-p without sorting: the smallest kept logit is found by bisection over the bits of a float.

Bisection needs only counts and sums over the vocabulary, which every device does at full speed, and is exact: ties at
the border are kept in the order of their ids, as a stable sort would.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxinfer.runtime.lanes import sum_of


def keep_top_k(weights: jax.Array, logits: jax.Array, top_k: jax.Array, limits: jax.Array) -> jax.Array:
    """weights f32[R, V] with all but the top_k i32[R] largest logits f32[R, V] zeroed, in the rows that `limits`."""
    keys = _sortable(logits)
    wanted = jnp.where(limits, top_k, 1)
    border = _largest(lambda key: sum_of((keys >= key[:, None]).astype(jnp.int32)) >= wanted, len(top_k), 32)
    above = keys > border[:, None]
    ties_kept = wanted - sum_of(above.astype(jnp.int32))
    kept = above | _first_ties(keys == border[:, None], ties_kept)
    return jnp.where(kept | ~limits[:, None], weights, 0)


def keep_top_p(weights: jax.Array, logits: jax.Array, top_p: jax.Array, limits: jax.Array) -> jax.Array:
    """weights f32[R, V] cut to the most likely tokens that together reach top_p f32[R] of their sum, at least one.

    Nucleus sampling (Holtzman et al., 2020). weights: exp of the logits f32[R, V], zero where filtered out already.
    """
    keys = _sortable(logits)
    # Above zero, so that top_p = 0 keeps the most likely token; below the sum, so that rounding cannot ask for more.
    wanted = jnp.clip(jnp.where(limits, top_p, 0) * sum_of(weights), 1e-30, None)

    def reaches(key: jax.Array) -> jax.Array:
        return sum_of(jnp.where(keys >= key[:, None], weights, 0)) >= wanted

    border = _largest(reaches, len(top_p), 32)
    at_border = (keys == border[:, None]) & (weights > 0)
    above = keys > border[:, None]
    missing = wanted - sum_of(jnp.where(above, weights, 0))
    each = sum_of(jnp.where(at_border, weights, 0)) / jnp.maximum(sum_of(at_border.astype(jnp.int32)), 1)
    ties_kept = jnp.ceil(missing / jnp.where(each > 0, each, 1)).astype(jnp.int32)
    kept = above | _first_ties(at_border, jnp.maximum(ties_kept, 1))
    return jnp.where(kept | ~limits[:, None], weights, 0)


def _sortable(x: jax.Array) -> jax.Array:
    """u32 with the order of the floats f32 x (0 for -inf and below everything but NaN)."""
    # -0 and 0 are equal, but their bits are not.
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int, bits: int) -> jax.Array:
    """The largest u32[rows] of that many bits for which `holds` (true at 0, and false above some value) is true."""

    def body(index: jax.Array, found: jax.Array) -> jax.Array:
        bit = jnp.uint32(1) << (bits - 1 - index).astype(jnp.uint32)
        return jnp.where(holds(found | bit), found | bit, found)

    return jax.lax.fori_loop(0, bits, body, jnp.zeros((rows,), jnp.uint32))


def _first_ties(tied: jax.Array, count: jax.Array) -> jax.Array:
    """The first count i32[R] of the true entries of tied bool[R, V]."""
    index = jax.lax.broadcasted_iota(jnp.uint32, tied.shape, 1)

    def few_enough(end: jax.Array) -> jax.Array:
        return sum_of((tied & (index < end[:, None])).astype(jnp.int32)) <= count

    bits = int(tied.shape[1]).bit_length()
    return tied & (index < _largest(few_enough, tied.shape[0], bits)[:, None])
