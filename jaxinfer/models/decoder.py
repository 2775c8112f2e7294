"""The decoder: Flax modules without state, whose parameters are an argument of every call.

Attention itself is handed in (`attend`), so the same modules serve prefill, decode and anything else that can say how
queries meet the cache. All activations are flat: [T, features], whatever sequences the T positions belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.rope import rotate, rotation
from pallas_kernels import KVPages
from pallas_kernels.dispatch import current_platform

Attend = Callable[[int, jax.Array, jax.Array, jax.Array, KVPages], tuple[jax.Array, KVPages]]
"""(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d], that layer's pages) -> (out [T, heads, d], pages)"""

CPU_SPLITS = 4
"""Parts of the sum of a matrix-vector product on a CPU; 4 measured best among 1 to 16 on 2 cores."""
_INIT = nn.initializers.normal(0.02)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, in float32 (Zhang and Sennrich, 2019)."""

    size: int
    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] -> the same shape and type."""
        scale = self.param("scale", nn.initializers.ones, (self.size,), jnp.dtype(self.config.dtype))
        exact = x.astype(jnp.float32)
        normed = exact * jax.lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + self.config.norm_eps)
        return scale * normed.astype(x.dtype)


class Projection(nn.Module):
    """x @ kernel (+ bias), from `inputs` features to an output of any rank; kernel [inputs, *outputs]."""

    inputs: int
    outputs: tuple[int, ...]
    bias: bool
    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, inputs] -> [T, *outputs]."""
        dtype = jnp.dtype(self.config.dtype)
        kernel = self.param("kernel", _INIT, (self.inputs, *self.outputs), dtype)
        out = _product(x, kernel, _precision(self.config))
        if self.bias:
            out = out + self.param("bias", nn.initializers.zeros, self.outputs, dtype)
        return out


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Keys and values come from one kernel [hidden, 2, kv_heads, head_dim], queries from one of their own: measured faster
    on a CPU than all three from one, and cut over devices by heads without ado.
    """

    config: DecoderConfig
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, rotations: tuple[jax.Array, jax.Array], pages: KVPages, attend: Attend
    ) -> tuple[jax.Array, KVPages]:
        """x [T, hidden] -> ([T, hidden], the layer's pages)."""
        config, width = self.config, self.config.head_dim
        q_shape, kv_shape = (config.num_heads, width), (2, config.num_kv_heads, width)
        q = Projection(config.hidden_size, q_shape, config.qkv_bias, config, name="q")(x)
        kv = Projection(config.hidden_size, kv_shape, config.qkv_bias, config, name="kv")(x)
        k, v = kv[:, 0], kv[:, 1]
        if config.qk_norm:
            q = RMSNorm(width, config, name="q_norm")(q)
            k = RMSNorm(width, config, name="k_norm")(k)
        out, pages = attend(self.layer, rotate(q, *rotations), rotate(k, *rotations), v, pages)
        inputs = config.num_heads * width
        out = out.reshape(x.shape[0], inputs)
        return Projection(inputs, (config.hidden_size,), config.output_bias, config, name="out")(out), pages


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, hidden] -> [T, hidden]."""
        config, widths = self.config, (self.config.intermediate_size,)
        gate = Projection(config.hidden_size, widths, config.mlp_bias, config, name="gate")(x)
        up = Projection(config.hidden_size, widths, config.mlp_bias, config, name="up")(x)
        gate = nn.silu(gate) if config.activation == "silu" else nn.gelu(gate, approximate=True)
        down = Projection(config.intermediate_size, (config.hidden_size,), config.mlp_bias, config, name="down")
        return down(gate * up)


class Block(nn.Module):
    """One pre-norm layer: attention and MLP, each added to the residual stream."""

    config: DecoderConfig
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, rotations: tuple[jax.Array, jax.Array], pages: KVPages, attend: Attend
    ) -> tuple[jax.Array, KVPages]:
        """x [T, hidden] -> ([T, hidden], the layer's pages)."""
        config = self.config
        normed = RMSNorm(config.hidden_size, config, name="attention_norm")(x)
        mixed, pages = Attention(config, self.layer, name="attention")(normed, rotations, pages, attend)
        x = x + mixed
        normed = RMSNorm(config.hidden_size, config, name="mlp_norm")(x)
        return x + GatedMLP(config, name="mlp")(normed), pages


class Decoder(nn.Module):
    """Token ids to final hidden states, and hidden states to logits."""

    config: DecoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        config = self.config
        table_shape, dtype = (config.vocab_size, config.hidden_size), jnp.dtype(config.dtype)
        self.embedding = self.param("embedding", _INIT, table_shape, dtype)
        self.layers = [Block(config, layer) for layer in range(config.num_layers)]
        self.final_norm = RMSNorm(config.hidden_size, config)
        self.head = self.embedding if config.tied_head else self.param("head", _INIT, table_shape, dtype)

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, kv: Sequence[KVPages], attend: Attend
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """token_ids i32[T], positions i32[T], pages per layer -> (normed hidden states [T, hidden], pages)."""
        x = self.embedding[token_ids]
        rotations = rotation(self.config.rope, positions)
        written = []
        for block, pages in zip(self.layers, kv, strict=True):
            x, pages = block(x, rotations, pages, attend)
            written.append(pages)
        return self.final_norm(x), tuple(written)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [R, hidden] -> logits f32[R, vocab]."""
        # The table is the left operand: with few rows, XLA's CPU product reads it at full bandwidth only this way.
        contract_features = (((1,), (1,)), ((), ()))
        precision = _precision(self.config)
        by_token = jax.lax.dot_general(
            self.head, hidden, contract_features, precision=precision, preferred_element_type=jnp.float32
        )
        return by_token.T


def _product(x: jax.Array, kernel: jax.Array, precision: jax.lax.Precision | None) -> jax.Array:
    """x [T, inputs] times kernel [inputs, *outputs]."""
    inputs = kernel.shape[0]
    if x.shape[0] > 1 or inputs % CPU_SPLITS or current_platform() != "cpu":
        return jnp.tensordot(x, kernel, axes=1, precision=precision)
    # One row on a CPU: a single product is read by one core at a time, parts of the sum by all.
    parts = kernel.reshape(CPU_SPLITS, inputs // CPU_SPLITS, -1)
    sums = jnp.einsum("pi,pio->po", x.reshape(CPU_SPLITS, -1), parts, precision=precision)
    return sums.sum(0).reshape(1, *kernel.shape[1:])


def _precision(config: DecoderConfig) -> jax.lax.Precision | None:
    # Accelerators would otherwise round float32 operands (bfloat16 on TPU, TF32 on GPU).
    return jax.lax.Precision.HIGHEST if config.dtype == "float32" else None


def init_params(config: DecoderConfig, key: jax.Array) -> dict[str, Any]:
    """Random parameters: a nested dict of arrays in config.dtype."""

    def no_attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, pages: Any) -> tuple[jax.Array, Any]:
        return q, pages

    token = jnp.zeros((1,), jnp.int32)
    return dict(Decoder(config).init(key, token, token, (None,) * config.num_layers, no_attention)["params"])


def abstract_params(config: DecoderConfig) -> dict[str, Any]:
    """The same tree as `init_params`, as ShapeDtypeStructs; computes nothing."""
    return jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
