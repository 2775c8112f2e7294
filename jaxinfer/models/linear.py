"""Products with weights, plain or quantized: every projection, token table and head goes through here."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from pallas_kernels.dispatch import AUTO, XLA, current_platform
from pallas_kernels.quantized_matmul import QuantizedWeight, WeightFormat, quantize, quantized_matmul, table_rows

CPU_SPLITS = 4
"""Parts of the sum of a matrix-vector product on a CPU; 4 measured best among 1 to 16 on 2 cores."""
INIT = jax.nn.initializers.normal(0.02)
Weight = jax.Array | QuantizedWeight
Initializer = Callable[..., Any]


def precision(config: DecoderConfig) -> jax.lax.Precision | None:
    """Of every product of parameters."""
    # Accelerators would otherwise round float32 operands (bfloat16 on TPU, TF32 on GPU).
    return jax.lax.Precision.HIGHEST if config.dtype == "float32" else None


def format_of(config: DecoderConfig, path: str) -> WeightFormat | None:
    """How the parameter of that path (names joined by "/") is quantized; None for an array in config.dtype."""
    return next((found for pattern, found in config.weights if fnmatchcase(path, pattern)), None)


def kernel_init(config: DecoderConfig, path: tuple[str, ...]) -> Initializer:
    """The initializer of a kernel [inputs, *outputs]; quantized, it is a QuantizedWeight with flat outputs."""
    return _init(config, path, axis=0)


def table_init(config: DecoderConfig, path: tuple[str, ...]) -> Initializer:
    """The initializer of a table [tokens, features]."""
    return _init(config, path, axis=1)


def _init(config: DecoderConfig, path: tuple[str, ...], axis: int) -> Initializer:
    weight_format = format_of(config, "/".join(path))
    if weight_format is None:
        return INIT

    def quantized(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> QuantizedWeight:
        array = INIT(key, shape, jnp.float32)
        return quantize(array.reshape(shape[0], -1), weight_format, axis)

    return quantized


def product(x: jax.Array, kernel: Weight, outputs: tuple[int, ...], config: DecoderConfig) -> jax.Array:
    """x [T, inputs] times a kernel [inputs, *outputs] -> [T, *outputs]."""
    if isinstance(kernel, QuantizedWeight):
        return quantized_matmul(x, kernel, impl=_lowering()).reshape(x.shape[0], *outputs)
    inputs = kernel.shape[0]
    if x.shape[0] > 1 or inputs % CPU_SPLITS or current_platform() != "cpu":
        return jnp.tensordot(x, kernel, axes=1, precision=precision(config))
    # One row on a CPU: a single product is read by one core at a time, parts of the sum by all.
    parts = kernel.reshape(CPU_SPLITS, inputs // CPU_SPLITS, -1)
    sums = jnp.einsum("pi,pio->po", x.reshape(CPU_SPLITS, -1), parts, precision=precision(config))
    return sums.sum(0).reshape(1, *outputs)


def table_product(x: jax.Array, table: Weight, config: DecoderConfig) -> jax.Array:
    """x [R, features] times every row of a table [tokens, features] -> f32[R, tokens]: logits."""
    if isinstance(table, QuantizedWeight):
        return quantized_matmul(x, table, out_dtype=jnp.float32, impl=_lowering())
    # The table is the left operand: with few rows, XLA's CPU product reads it at full bandwidth only this way.
    contract_features = (((1,), (1,)), ((), ()))
    by_token = jax.lax.dot_general(
        table, x, contract_features, precision=precision(config), preferred_element_type=jnp.float32
    )
    return by_token.T


def embedded(table: Weight, ids: jax.Array, config: DecoderConfig) -> jax.Array:
    """Rows ids i32[T] of a table [tokens, features] -> [T, features] in config.dtype."""
    if isinstance(table, QuantizedWeight):
        return table_rows(table, ids, config.dtype)
    return table[ids]


def _lowering() -> str:
    # The compiler cuts its own products over the devices of a mesh, but no Pallas kernel.
    mesh = jax.sharding.get_abstract_mesh()
    return AUTO if mesh.empty or mesh.size == 1 else XLA
