"""The parts of a block that know nothing of sequences: norms, projections, the MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.linear import product, weight_init

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
        init = weight_init(self.config, (*self.path, "kernel"))
        kernel = self.param("kernel", init, (self.inputs, *self.outputs), dtype)
        out = product(x, kernel, self.outputs, str(self.name), self.config)
        if self.bias:
            out = out + self.param("bias", nn.initializers.zeros, self.outputs, dtype)
        return out


def activation_of(config: DecoderConfig) -> Callable[[jax.Array], jax.Array]:
    """The function that `config.activation` names."""
    return _ACTIVATIONS[config.activation]


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020), or without a gate down(activation(up(x)))."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, hidden] -> [T, hidden]."""
        config, widths = self.config, (self.config.intermediate_size,)
        activation = activation_of(config)
        if config.gated_mlp:
            gate = Projection(config.hidden_size, widths, config.mlp_bias, config, name="gate")(x)
            up = Projection(config.hidden_size, widths, config.mlp_bias, config, name="up")(x)
            inner = activation(gate) * up
        else:
            inner = activation(Projection(config.hidden_size, widths, config.mlp_bias, config, name="up")(x))
        down = Projection(config.intermediate_size, (config.hidden_size,), config.mlp_bias, config, name="down")
        return down(inner)
