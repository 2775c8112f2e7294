"""Products with weights, plain or quantized: every projection, token table and head goes through here."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.mesh import MODEL_AXIS, model_parallelism
from pallas_kernels.dispatch import current_platform
from pallas_kernels.quantized_matmul import (
    QuantizedWeight,
    WeightFormat,
    is_quantized_weight,
    quantize,
    quantized_matmul,
    table_rows,
)

CPU_SPLITS = 4
"""Parts of the sum of a matrix-vector product on a CPU; 4 measured best among 1 to 16 on 2 cores."""
INIT = jax.nn.initializers.normal(0.02)
OUTPUTS_CUT = ("q", "kv", "gate", "up")
"""Projections whose outputs are cut over the devices of a mesh."""
INPUTS_CUT = ("out", "down")
"""Projections whose inputs are, so that their results are summed over the devices."""
TABLES = ("embedding", "head")
"""Tables [tokens, features]; their tokens are cut."""
QUANTIZED_DTYPES = ("int8", "int4")

Weight = jax.Array | QuantizedWeight


def precision(config: DecoderConfig) -> jax.lax.Precision | None:
    """Of every product of parameters."""
    # Accelerators would otherwise round float32 operands (bfloat16 on TPU, TF32 on GPU).
    return jax.lax.Precision.HIGHEST if config.dtype == "float32" else None


# --- which weights are quantized -------------------------------------------------------------------------------------


def quantized_weights(weight_dtype: str) -> tuple[tuple[str, WeightFormat], ...]:
    """`DecoderConfig.weights` for "int8" or "int4".

    int8: one scale for each output. int4: scale and offset for each group of 32 inputs. Token tables are int8 either
    way, one scale for each token; norms, biases, routers, experts and latents' projections stay as they are.
    """
    formats = {"int8": WeightFormat(8), "int4": WeightFormat(4, group=32, offsets=True, scale_dtype="bfloat16")}
    kernels = ((f"*/{name}/kernel", formats[weight_dtype]) for name in (*OUTPUTS_CUT, *INPUTS_CUT))
    return (*kernels, *((table, WeightFormat(8)) for table in TABLES))


def is_quantizable(path: str) -> bool:
    """Whether the decoder can take the parameter of that path quantized."""
    *parents, last = path.split("/")
    return path in TABLES or (last == "kernel" and parents[-1:] != [] and parents[-1] in (*OUTPUTS_CUT, *INPUTS_CUT))


def format_of(config: DecoderConfig, path: str) -> WeightFormat | None:
    """How the parameter of that path (names joined by "/") is quantized; None for an array in config.dtype."""
    return next((found for pattern, found in config.weights if fnmatchcase(path, pattern)), None)


def flattened(kernel: Any) -> Any:
    """A kernel [inputs, *outputs] as a quantized one has it: [inputs, all outputs], with heads outermost."""
    if kernel.ndim == 4:
        kernel = kernel.swapaxes(1, 2)
    return kernel.reshape(kernel.shape[0], -1)


def _unflattened(out: jax.Array, outputs: tuple[int, ...]) -> jax.Array:
    """[T, all outputs] of a flattened kernel -> [T, *outputs]."""
    if len(outputs) == 3:
        return out.reshape(-1, outputs[1], outputs[0], outputs[2]).swapaxes(1, 2)
    return out.reshape(-1, *outputs)


def weight_init(config: DecoderConfig, path: tuple[str, ...]) -> Callable[..., Any]:
    """The initializer of a kernel [inputs, *outputs] or a table [tokens, features], quantized if its format says so."""
    weight_format = format_of(config, "/".join(path))
    if weight_format is None:
        return INIT

    def quantized(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> QuantizedWeight:
        array = INIT(key, shape, jnp.float32)
        return quantize(array, weight_format, 1) if path[-1] in TABLES else quantize(flattened(array), weight_format)

    return quantized


# --- products --------------------------------------------------------------------------------------------------------


def product(x: jax.Array, kernel: Weight, outputs: tuple[int, ...], name: str, config: DecoderConfig) -> jax.Array:
    """x [T, inputs] times the kernel [inputs, *outputs] of the projection `name` -> [T, *outputs]."""
    if isinstance(kernel, QuantizedWeight):
        return _unflattened(_cut(quantized_matmul, name)(x, kernel), outputs)
    inputs = kernel.shape[0]
    if _is_bfloat16_on_cpu(x):
        return _bfloat16_product(x, kernel, axis=0).astype(x.dtype)
    if x.shape[0] > 1 or inputs % CPU_SPLITS or current_platform() != "cpu":
        return jnp.tensordot(x, kernel, axes=1, precision=precision(config))
    # One row on a CPU: a single product is read by one core at a time, parts of the sum by all.
    parts = kernel.reshape(CPU_SPLITS, inputs // CPU_SPLITS, -1)
    sums = jnp.einsum("pi,pio->po", x.reshape(CPU_SPLITS, -1), parts, precision=precision(config))
    return sums.sum(0).reshape(1, *outputs)


def _is_bfloat16_on_cpu(x: jax.Array) -> bool:
    return x.dtype == jnp.bfloat16 and current_platform() == "cpu"


def _bfloat16_product(x: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    """x [T, inputs] times a weight with its inputs on `axis`, on a CPU -> f32[T, outputs ...].

    XLA multiplies bfloat16 as it is when the result is float32 and there is more than one row; otherwise it first
    converts the whole weight to float32, which takes far longer.
    """
    rows = x.shape[0]
    padded = jnp.pad(x, ((0, 1), (0, 0))) if rows == 1 else x
    return jax.lax.dot_general(padded, weight, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)[:rows]


def table_product(x: jax.Array, table: Weight, config: DecoderConfig) -> jax.Array:
    """x [R, features] times every row of a table [tokens, features] -> f32[R, tokens]: logits."""
    if isinstance(table, QuantizedWeight):
        return _cut(partial(quantized_matmul, out_dtype=jnp.float32), "head")(x, table)
    if _is_bfloat16_on_cpu(x):
        return _bfloat16_product(x, table, axis=1)
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


# --- several devices -------------------------------------------------------------------------------------------------


def weight_specs(weight: QuantizedWeight, name: str) -> QuantizedWeight:
    """How the arrays of a quantized weight are cut over a mesh; `name` of its projection or table."""
    outputs_cut = name in OUTPUTS_CUT or name in TABLES
    inputs = MODEL_AXIS if name in INPUTS_CUT else None
    outputs = MODEL_AXIS if outputs_cut else None
    values = PartitionSpec(outputs, inputs) if weight.axis else PartitionSpec(inputs, outputs)
    # One scale of all inputs serves every part of them.
    factors = PartitionSpec(inputs if weight.groups > 1 else None, outputs)
    offsets = None if weight.offsets is None else factors
    return QuantizedWeight(values, factors, offsets, weight.axis)  # pyright: ignore[reportArgumentType]  # specs


def _cut(multiply: Callable[..., jax.Array], name: str) -> Callable[..., jax.Array]:
    """`multiply(x, weight)` run on every device with its own part of the weight, where a mesh is set.

    The compiler cuts its own products by itself, but no kernel.
    """
    if model_parallelism() == 1:
        return multiply

    def part(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        out = multiply(x, weight)
        return jax.lax.psum(out, MODEL_AXIS) if name in INPUTS_CUT else out

    def whole(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        specs = weight_specs(weight, name)
        x_spec = PartitionSpec(None, MODEL_AXIS if name in INPUTS_CUT else None)
        out_spec = PartitionSpec(None, MODEL_AXIS if name in OUTPUTS_CUT or name in TABLES else None)
        run = jax.shard_map(part, in_specs=(x_spec, specs), out_specs=out_spec, check_vma=False)
        return run(x, weight)

    return whole


def check_groups(params: Any, devices: int) -> None:
    """Raise ValueError when groups of inputs would be torn apart on so many devices."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized_weight)
    for path, weight in leaves:
        names = [key.key for key in path]
        if not is_quantized_weight(weight) or set(names[-2:]).isdisjoint(INPUTS_CUT):
            continue
        if weight.groups > 1 and weight.groups % devices:
            raise ValueError(
                f"The {weight.groups} groups of {weight.group} quantized inputs of {'/'.join(names)} cannot be cut "
                f"evenly over {devices} devices; quantize to int8 instead, which has no groups."
            )
