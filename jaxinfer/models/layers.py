"""The parts of a block that know nothing of sequences: norms, projections, the MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxinfer.models.config import DecoderConfig
from pallas_kernels.dispatch import current_platform

CPU_SPLITS = 4
"""Parts of the sum of a matrix-vector product on a CPU; 4 measured best among 1 to 16 on 2 cores."""
INIT = nn.initializers.normal(0.02)
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu": partial(nn.gelu, approximate=False),
    "gelu_tanh": partial(nn.gelu, approximate=True),
    "relu": nn.relu,
}


class Norm(nn.Module):
    """The norm of `config.norm` over the last axis, in float32.

    RMSNorm (Zhang and Sennrich, 2019): x / rms(x) * scale. LayerNorm (Ba et al., 2016): (x - mean) / std * scale
    + bias.
    """

    size: int
    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] -> the same shape and type."""
        kind, dtype = self.config.norm, jnp.dtype(self.config.dtype)
        neutral = nn.initializers.zeros if kind == "rms_offset" else nn.initializers.ones
        scale = self.param("scale", neutral, (self.size,), dtype)
        exact = x.astype(jnp.float32)
        if kind == "layer":
            exact = exact - jnp.mean(exact, -1, keepdims=True)
        normed = exact * jax.lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + self.config.norm_eps)
        if kind == "rms":
            return scale * normed.astype(x.dtype)
        factor = scale.astype(jnp.float32) + (1 if kind == "rms_offset" else 0)
        normed = normed * factor
        if kind == "layer":
            normed = normed + self.param("bias", nn.initializers.zeros, (self.size,), dtype).astype(jnp.float32)
        return normed.astype(x.dtype)


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
        kernel = self.param("kernel", INIT, (self.inputs, *self.outputs), dtype)
        out = _product(x, kernel, precision(self.config))
        if self.bias:
            out = out + self.param("bias", nn.initializers.zeros, self.outputs, dtype)
        return out


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020), or without a gate down(activation(up(x)))."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, hidden] -> [T, hidden]."""
        config, widths = self.config, (self.config.intermediate_size,)
        activation = _ACTIVATIONS[config.activation]
        if config.gated_mlp:
            gate = Projection(config.hidden_size, widths, config.mlp_bias, config, name="gate")(x)
            up = Projection(config.hidden_size, widths, config.mlp_bias, config, name="up")(x)
            inner = activation(gate) * up
        else:
            inner = activation(Projection(config.hidden_size, widths, config.mlp_bias, config, name="up")(x))
        down = Projection(config.intermediate_size, (config.hidden_size,), config.mlp_bias, config, name="down")
        return down(inner)


def _product(x: jax.Array, kernel: jax.Array, precision: jax.lax.Precision | None) -> jax.Array:
    """x [T, inputs] times kernel [inputs, *outputs]."""
    inputs = kernel.shape[0]
    if x.shape[0] > 1 or inputs % CPU_SPLITS or current_platform() != "cpu":
        return jnp.tensordot(x, kernel, axes=1, precision=precision)
    # One row on a CPU: a single product is read by one core at a time, parts of the sum by all.
    parts = kernel.reshape(CPU_SPLITS, inputs // CPU_SPLITS, -1)
    sums = jnp.einsum("pi,pio->po", x.reshape(CPU_SPLITS, -1), parts, precision=precision)
    return sums.sum(0).reshape(1, *kernel.shape[1:])


def precision(config: DecoderConfig) -> jax.lax.Precision | None:
    """Of every product of parameters."""
    # Accelerators would otherwise round float32 operands (bfloat16 on TPU, TF32 on GPU).
    return jax.lax.Precision.HIGHEST if config.dtype == "float32" else None
