"""The product with a quantized weight by XLA.

Accelerators: one expression, whose conversion of the weights the compiler fuses into the product (on TPU always; on
GPU where one scale serves all inputs, else it writes the weights out). On a CPU it would write them out too, so there
they are converted a block at a time, which stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import current_platform
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, dequantized, offset_product

BLOCK_WEIGHTS = 1 << 18
"""Weights converted at a time on a CPU: 1 MiB in float32, which a core's second-level cache holds."""

FEW_ROWS, LARGE_BLOCK_WEIGHTS = 32, 1 << 21
"""With more rows of x, adding up costs more than converting, so that there are fewer and larger blocks."""


def quantized_matmul(x: jax.Array, weight: QuantizedWeight, *, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    """See `pallas_kernels.quantized_matmul.quantized_matmul`."""
    if current_platform() == "cpu":
        by_block = _by_blocks_of_inputs if weight.axis == 0 else _by_blocks_of_outputs
        product = by_block(x, weight)
    else:
        product = _product(x, _scaled(weight, weight.values, weight.scales, x.dtype), weight.axis)
    if weight.groups == 1:
        product = product * weight.scales.astype(jnp.float32)
    if weight.offsets is not None:
        product = product + offset_product(x, weight)
    return product.astype(out_dtype)


def _scaled(weight: QuantizedWeight, values: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Some of the weight's values in `dtype`, times their scales unless one of all inputs can wait for the sum."""
    if weight.groups == 1:
        return values.astype(dtype)  # in one step, which XLA fuses into the product on GPU
    return dequantized(QuantizedWeight(values, scales, None, weight.axis)).astype(dtype)


def _product(x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """f32[T, outputs] of x [T, inputs] and a matrix whose inputs lie on `axis`."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, matrix, dimensions, precision=precision, preferred_element_type=jnp.float32)


# --- CPU -------------------------------------------------------------------------------------------------------------


def _by_blocks_of_inputs(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Sums f32[T, outputs] over one block of inputs after the other."""
    parts, x = _parts(weight), x.astype(jnp.float32)
    rows = _block_rows(weight, x.shape[0])

    def add(index: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        inputs = lax.dynamic_slice_in_dim(x, index * rows, rows, 1)
        return [total + _product(inputs, part(index * rows, rows), 0) for total, part in zip(sums, parts, strict=True)]

    zeros = [jnp.zeros((x.shape[0], weight.outputs // len(parts)), jnp.float32) for _ in parts]
    sums = lax.fori_loop(0, weight.inputs // rows, add, zeros)
    return jnp.stack(sums, -1).reshape(x.shape[0], weight.outputs)


def _by_blocks_of_outputs(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """f32[T, outputs] of a table, one block of outputs after the other."""
    parts, x = _parts(weight), x.astype(jnp.float32)
    rows = min(weight.outputs, max(1, BLOCK_WEIGHTS // weight.inputs))

    def fill(index: jax.Array, by_output: jax.Array) -> jax.Array:
        # The last block ends where the table does, and computes again what it shares with the one before.
        first = jnp.minimum(index * rows, weight.outputs - rows)
        # The table is the left operand: XLA's CPU product is faster so with few rows of x.
        products = [_product(part(first, rows), x[:, i :: len(parts)], 1) for i, part in enumerate(parts)]
        return lax.dynamic_update_slice_in_dim(by_output, sum(products[1:], products[0]), first, 0)

    empty = jnp.zeros((weight.outputs, x.shape[0]), jnp.float32)
    return lax.fori_loop(0, -(-weight.outputs // rows), fill, empty).T


_Part = Callable[[jax.Array, int], jax.Array]
"""(first row, rows) -> these rows of the values' array, or of every other column of it, as weights in float32."""


def _parts(weight: QuantizedWeight) -> list[_Part]:
    """One part for int8 values; for int4 values the even columns and the odd ones, which share bytes.

    XLA's CPU conversion of int4 takes several times as long as shifting bytes does.
    """
    values = weight.values
    if values.dtype == jnp.int8 or values.shape[1] % 2 or (weight.axis == 1 and weight.group % 2):
        return [_part(weight, values.astype(jnp.int8), None)]
    pairs = lax.bitcast_convert_type(values.reshape(values.shape[0], -1, 2), jnp.int8)
    return [_part(weight, pairs, nibble) for nibble in range(2)]


def _part(weight: QuantizedWeight, stored: jax.Array, nibble: int | None) -> _Part:
    """stored: int8[rows, columns]. nibble: which half of each byte counts, 0 for the low one; None for the whole."""
    scales = weight.scales if nibble is None or weight.axis == 1 else weight.scales[:, nibble::2]

    def rows(first: jax.Array, count: int) -> jax.Array:
        block = lax.dynamic_slice_in_dim(stored, first, count)
        if nibble is not None:
            block = (block << 4 if nibble == 0 else block) >> 4
        if weight.axis == 0:
            start, size = first // weight.group, max(1, count // weight.group)
        else:
            start, size = first, count
        few = lax.dynamic_slice_in_dim(scales, start, size, weight.axis)
        return _scaled(weight, block, few, jnp.float32)

    return rows


def _block_rows(weight: QuantizedWeight, x_rows: int) -> int:
    """Inputs of a block: whole groups, or an even part of one.

    Two blocks at least: without a loop XLA converts the weights of many products at the same time.
    """
    block = BLOCK_WEIGHTS if x_rows <= FEW_ROWS else LARGE_BLOCK_WEIGHTS
    most = max(1, min(block // weight.outputs, weight.inputs // 2))
    if most < weight.group:
        return _largest_divisor(weight.group, most)
    return weight.group * _largest_divisor(weight.groups, most // weight.group)


def _largest_divisor(number: int, most: int) -> int:
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
