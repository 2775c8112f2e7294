"""Grouped-query attention around a cache that is handed in."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import Norm, Projection
from jaxinfer.models.rope import Rotation, rotate
from pallas_kernels import KVPages

Attend = Callable[
    [int, jax.Array, jax.Array, "jax.Array | None", KVPages, "jax.Array | None"], tuple[jax.Array, KVPages]
]
"""(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d], that layer's pages, sinks f32[heads] or None) ->
(out [T, heads, d], pages). v is None where values are the beginning of keys."""


class Attention(nn.Module):
    """Grouped-query attention, with rotary positions where the layer has them.

    Keys and values come from one kernel [hidden, 2, kv_heads, head_dim], queries from one of their own: measured faster
    on a CPU than all three from one, and cut over devices by heads without ado.
    """

    config: DecoderConfig
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, rotation: Rotation | None, pages: KVPages, attend: Attend
    ) -> tuple[jax.Array, KVPages]:
        """x [T, hidden] -> ([T, hidden], the layer's pages)."""
        config, width, rope = self.config, self.config.head_dim, self.config.ropes[self.layer]
        q_shape, kv_shape = (config.num_heads, width), (2, config.num_kv_heads, width)
        q = Projection(config.hidden_size, q_shape, config.qkv_bias, config, name="q")(x)
        kv = Projection(config.hidden_size, kv_shape, config.qkv_bias, config, name="kv")(x)
        k, v = kv[:, 0], kv[:, 1]
        q, k = _normed(config, "q_norm", q), _normed(config, "k_norm", k)
        if rope is not None and rotation is not None:
            q, k = rotate(q, *rotation, rope.interleaved), rotate(k, *rotation, rope.interleaved)
        sinks = None
        if config.attention_sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (config.num_heads,), jnp.float32)
        out, pages = attend(self.layer, q, k, v, pages, sinks)
        inputs = config.num_heads * width
        out = out.reshape(x.shape[0], inputs)
        return Projection(inputs, (config.hidden_size,), config.output_bias, config, name="out")(out), pages


def _normed(config: DecoderConfig, name: str, heads: jax.Array) -> jax.Array:
    """heads [T, heads, head_dim] after `config.qk_norm`."""
    if config.qk_norm == "none":
        return heads
    if config.qk_norm == "head":
        return Norm(config.head_dim, config, name=name)(heads)
    flat = heads.reshape(heads.shape[0], -1)
    return Norm(flat.shape[1], config, name=name)(flat).reshape(heads.shape)
