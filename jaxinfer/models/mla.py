"""Multi-head latent attention, computed on the latents themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxinfer.models.attention import Attend
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layer_config import MLAConfig
from jaxinfer.models.layers import Norm, Projection
from jaxinfer.models.linear import INIT, precision
from jaxinfer.models.rope import Rotation, rotate
from pallas_kernels import KVPages


class LatentAttention(nn.Module):
    """Attention whose cache holds one latent and one rotated key for each position (see MLAConfig).

    A head's key is key_up[head] times the latent. Instead of multiplying every cached latent with it, its query is:
    q . (key_up c) = (key_up^T q) . c. The weighted sum of latents becomes values by value_up afterwards. To the kernel
    this is multi-query attention whose values are the first features of its keys.
    """

    config: DecoderConfig
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, rotation: Rotation | None, pages: KVPages, attend: Attend
    ) -> tuple[jax.Array, KVPages]:
        """x [T, hidden] -> ([T, hidden], the layer's pages)."""
        config, mla, rope = self.config, self.config.mla, self.config.ropes[self.layer]
        assert mla is not None, "only models with latent attention have this module"
        assert rope is not None, "latent attention always rotates"
        assert rotation is not None, "latent attention always rotates"
        exact, heads = precision(config), config.num_heads
        key_up = self.param("key_up", INIT, (heads, mla.plain_dim, mla.latent_dim), jnp.dtype(config.dtype))
        value_up = self.param("value_up", INIT, (heads, mla.latent_dim, mla.value_dim), jnp.dtype(config.dtype))
        q = self._queries(mla, x)
        joint = Projection(config.hidden_size, (mla.row_dim,), config.qkv_bias, config, name="kv_a")(x)
        latent = self._norm(mla, "kv_a_norm", mla.latent_dim)(joint[:, : mla.latent_dim])
        rotated_key = rotate(joint[:, None, mla.latent_dim :], *rotation, rope.interleaved)
        rotated_query = rotate(q[..., mla.plain_dim :], *rotation, rope.interleaved)
        latent_query = jnp.einsum("thp,hpc->thc", q[..., : mla.plain_dim], key_up, precision=exact)
        query = jnp.concatenate([latent_query, rotated_query], -1)
        key = jnp.concatenate([latent[:, None], rotated_key], -1)
        out, pages = attend(self.layer, query, key, None, pages, None)
        values = jnp.einsum("thc,hcv->thv", out, value_up, precision=exact)
        inputs = heads * mla.value_dim
        values = values.reshape(x.shape[0], inputs)
        return Projection(inputs, (config.hidden_size,), config.output_bias, config, name="out")(values), pages

    def _queries(self, mla: MLAConfig, x: jax.Array) -> jax.Array:
        """[T, heads, plain_dim + rope_dim]."""
        config = self.config
        shape = (config.num_heads, mla.plain_dim + mla.rope_dim)
        if mla.query_rank is None:
            return Projection(config.hidden_size, shape, False, config, name="q")(x)
        low = Projection(config.hidden_size, (mla.query_rank,), config.qkv_bias, config, name="q_a")(x)
        low = self._norm(mla, "q_a_norm", mla.query_rank)(low)
        return Projection(mla.query_rank, shape, False, config, name="q")(low)

    def _norm(self, mla: MLAConfig, name: str, size: int) -> Norm:
        return Norm(size, self.config.replace(norm_eps=mla.norm_eps), name=name)
