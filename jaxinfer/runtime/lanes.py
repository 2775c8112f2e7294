"""Reductions over the vocabulary in two stages.

XLA's CPU backend reduces a row's floats one after the other. Cut into [n, lanes], the n rows reduce as vectors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LANES = 128


def blocked(x: jax.Array, fill: float = 0) -> jax.Array:
    """[R, V] -> [R, n, LANES] in order, filled up at the end."""
    padding = -x.shape[1] % LANES
    x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill) if padding else x
    return x.reshape(x.shape[0], -1, LANES)


def sum_of(x: jax.Array) -> jax.Array:
    """Sum of each row: [R, V] -> [R]."""
    return blocked(x).sum(1).sum(-1)


def max_of(x: jax.Array) -> jax.Array:
    """Largest value of each row: f32[R, V] -> f32[R]."""
    return blocked(x, -jnp.inf).max(1).max(-1)


def argmax(x: jax.Array) -> jax.Array:
    """The first index of each row's largest value: f32[R, V] -> i32[R]; 0 for a row with NaN."""
    last = x.shape[1] - 1
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    candidates = blocked(jnp.where(x == max_of(x)[:, None], last - index, -1), -1)
    # The largest distance from the end is the first index; where nothing equals the maximum, it is NaN.
    distance = candidates.max(1).max(-1)
    return jnp.where(distance < 0, 0, last - distance)
