"""Rotary position embedding: frequencies by scaling rule, and the rotation itself."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import RopeConfig

Rotation = tuple[jax.Array, jax.Array]
"""Cosines and sines f32[T, 1, rotary_dim / 2]."""


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """f32[rotary_dim / 2], radians per position of each feature pair.

    theta^(-2i/d) (Su et al., 2021), then by `rope.scaling`:

    linear: all divided by the factor (Chen et al., 2023).
    dynamic: theta grows with `longest` beyond the original context (NTK-aware scaling, bloc97 and emozilla, 2023).
    llama3: those whose wavelength exceeds original/low_freq_factor are divided by the factor, those below
        original/high_freq_factor kept, those between blended (Llama 3.1 model card).
    yarn: those that turn less than beta_slow times in the original context are divided by the factor, those that turn
        more than beta_fast times kept, those between blended by their index (Peng et al., 2023).
    longrope: each divided by its own long factor, or by its short one when `longest` is within the original context
        (Ding et al., 2024).
    """
    if rope.scaling == "dynamic":
        return _plain(_stretched_theta(rope), rope.rotary_dim)
    plain = _plain(rope.theta, rope.rotary_dim)
    if rope.scaling == "linear":
        return (plain / np.float32(rope.factor)).astype(np.float32)
    if rope.scaling == "llama3":
        turns = rope.original_max_positions * plain / (2 * np.pi)
        kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        return ((1 - kept) * plain / rope.factor + kept * plain).astype(np.float32)
    if rope.scaling == "yarn":
        kept = _yarn_kept(rope)
        return ((1 - kept) * plain / rope.factor + kept * plain).astype(np.float32)
    if rope.scaling == "longrope":
        long = rope.longest > rope.original_max_positions
        return (plain / np.array(rope.long_factors if long else rope.short_factors, np.float32)).astype(np.float32)
    return plain


def _plain(theta: float, rotary_dim: int) -> np.ndarray:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def _stretched_theta(rope: RopeConfig) -> float:
    length = max(rope.longest, rope.original_max_positions) / rope.original_max_positions
    return rope.theta * (rope.factor * length - (rope.factor - 1)) ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _yarn_kept(rope: RopeConfig) -> np.ndarray:
    """How much of each plain frequency yarn keeps, 0 to 1."""

    def index_of(turns: float) -> float:
        """The (fractional) pair that turns so often in the original context."""
        return (
            rope.rotary_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    first, last = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = (last - first) or 0.001  # a step, not a division by zero
    ramp = (np.arange(rope.rotary_dim // 2, dtype=np.float32) - first) / width
    return 1 - np.clip(ramp, 0, 1)


def rotation(rope: RopeConfig, positions: jax.Array) -> Rotation:
    """Cosines and sines f32[T, 1, rotary_dim / 2] for positions i32[T], times the attention factor."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope)[None]
    factor = jnp.float32(rope.attention_factor)
    return jnp.cos(angles)[:, None] * factor, jnp.sin(angles)[:, None] * factor


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array, interleaved: bool = False) -> jax.Array:
    """x [T, heads, head_dim] with its first rotary_dim features rotated in float32; same type as x.

    interleaved: see RopeConfig.
    """
    pairs, axis = cosines.shape[-1], -1 if interleaved else -2
    shape = (pairs, 2) if interleaved else (2, pairs)
    both = x[..., : 2 * pairs].astype(jnp.float32).reshape(*x.shape[:-1], *shape)
    # Reversing the two of a pair, instead of joining them again, is what XLA compiles quickly.
    signed_sines = jnp.stack([-sines, sines], axis=axis)
    rotated = both * jnp.expand_dims(cosines, axis) + jnp.flip(both, axis) * signed_sines
    rotated = rotated.reshape(*x.shape[:-1], 2 * pairs).astype(x.dtype)
    return rotated if x.shape[-1] == 2 * pairs else jnp.concatenate([rotated, x[..., 2 * pairs :]], axis=-1)
