"""Rotary position embedding: frequencies by scaling rule, and the rotation itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """f32[rotary_dim / 2], radians per position of each feature pair.

    theta^(-2i/d) (Su et al., 2021), then by `rope.scaling`: "linear" divides all by the factor (Chen et al., 2023);
    "llama3" divides those whose wavelength exceeds original/low_freq_factor, keeps those below
    original/high_freq_factor and blends between (Llama 3.1 model card).
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    plain = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.scaling == "linear":
        return (plain / np.float32(rope.factor)).astype(np.float32)
    if rope.scaling == "llama3":
        turns = rope.original_max_positions * plain / (2 * np.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0, 1)
        return ((1 - blend) * plain / rope.factor + blend * plain).astype(np.float32)
    return plain


def rotation(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines f32[T, 1, rotary_dim / 2] for positions i32[T]."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope)[None]
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """x [T, heads, head_dim] with its first rotary_dim features rotated in float32; same type as x."""
    half = cosines.shape[-1]
    halves = x[..., : 2 * half].astype(jnp.float32).reshape(*x.shape[:-1], 2, half)
    # Reversing the two halves, instead of joining them again, is what XLA compiles quickly.
    signed_sines = jnp.stack([-sines, sines], axis=-2)
    rotated = halves * cosines[..., None, :] + halves[..., ::-1, :] * signed_sines
    rotated = rotated.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    return rotated if x.shape[-1] == 2 * half else jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
