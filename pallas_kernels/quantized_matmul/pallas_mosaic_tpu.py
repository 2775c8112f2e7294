"""The product with a quantized weight on TPU: blocks of the weight stream through vector memory, each read once.

A block is converted a few rows at a time, so that what is converted stays close to the matrix unit that takes it. All
of x lies in vector memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import LANES, VMEM_LIMIT, product
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, offset_product, stored_bytes

BLOCK_WEIGHTS = 1 << 20
"""Weights of a block; two of 1 MiB (int8) in flight cover a copy's latency, see `mosaic_tpu.BLOCK_BYTES`."""

BLOCK_INPUTS = 2048
"""Most inputs of a block."""

STEP_INPUTS = 256
"""Inputs converted at a time: the depth of the matrix unit of v6e and v7x."""

MOST_ROWS = 256
"""Rows of x up to which a product is bound by reading the weight; with more, XLA's own product is as good."""

SMALLEST_GROUP = 16
"""Inputs of a group whose rows are whole register tiles of 16-bit numbers."""


def unsupported(x: Any, weight: QuantizedWeight) -> str | None:
    """Why this lowering cannot run these arguments (arrays or their shapes), in a sentence; None when it can."""
    if x.shape[0] > MOST_ROWS:
        return f"x has {x.shape[0]} rows, but the kernel serves products of at most {MOST_ROWS}, bound by the weight."
    if jnp.dtype(x.dtype).name not in ("bfloat16", "float32"):
        return f"The kernel multiplies bfloat16 and float32, but x is {jnp.dtype(x.dtype).name}."
    if weight.axis == 1 and weight.groups > 1:
        return f"The kernel reads a table with one scale for each row, but this one has {weight.groups}."
    if weight.outputs % LANES or weight.inputs % LANES:
        return f"The kernel needs multiples of {LANES} inputs and outputs, not {weight.inputs} and {weight.outputs}."
    if weight.group % SMALLEST_GROUP:
        return f"The kernel needs groups of a multiple of {SMALLEST_GROUP} inputs, not {weight.group}."
    if jnp.dtype(weight.scales.dtype).name not in ("bfloat16", "float32"):
        return f"The kernel reads bfloat16 and float32 scales, but these are {jnp.dtype(weight.scales.dtype).name}."
    if _plan(weight) is None:
        return f"{weight.groups} groups of {weight.inputs} inputs divide into no blocks that fit vector memory."
    return None


def quantized_matmul(x: jax.Array, weight: QuantizedWeight, *, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    """`pallas_kernels.quantized_matmul.quantized_matmul` as a Mosaic TPU kernel."""
    if weight.offsets is None:
        return _scaled_product(x, weight, out_dtype)
    return (_scaled_product(x, weight, jnp.float32) + offset_product(x, weight)).astype(out_dtype)


def _scaled_product(x: jax.Array, weight: QuantizedWeight, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    """[T, outputs], offsets left out."""
    plan = _plan(weight)
    assert plan is not None, "unsupported() refuses what has no plan"
    rows, outputs = x.shape[0], weight.outputs
    # A scale of all inputs waits for the sum; those of groups are applied to the weights, block by block.
    grouped = weight.groups > 1
    scales_block = (plan.inputs // weight.group if grouped else 1, plan.outputs)
    values_block = (plan.inputs, plan.outputs) if weight.axis == 0 else (plan.outputs, plan.inputs)
    swap = weight.axis == 1

    def body(x_ref: Any, values: Any, scales: Any, out: Any, sums: Any) -> None:
        block = pl.program_id(1)

        @pl.when(block == 0)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        for start in range(0, plan.inputs, plan.step):
            step = pl.ds(start, plan.step)
            exact = values[:, step] if swap else values[step, :]
            if grouped:
                exact = _scaled(exact, scales[pl.ds(start // weight.group, plan.step // weight.group), :], x.dtype)
            inputs = x_ref[:, pl.ds(pl.multiple_of(block * plan.inputs + start, LANES), plan.step)]
            sums[...] += product(inputs, exact.astype(x.dtype), weight.axis)

        @pl.when(block == pl.num_programs(1) - 1)
        def _() -> None:
            total = sums[...] if grouped else sums[...] * scales[...].astype(jnp.float32)
            out[...] = total.astype(out.dtype)

    moved = sum(stored_bytes(array) for array in (x, weight.values, weight.scales))
    # XLA would bring small scales into vector memory beforehand, and they would be read twice.
    stored = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in (weight.values, weight.scales)]
    moved += rows * outputs * jnp.dtype(out_dtype).itemsize
    return pl.pallas_call(
        body,
        grid=(outputs // plan.outputs, weight.inputs // plan.inputs),
        in_specs=[
            pl.BlockSpec(x.shape, lambda j, k: (0, 0)),
            pl.BlockSpec(values_block, (lambda j, k: (j, k)) if swap else (lambda j, k: (k, j))),
            pl.BlockSpec(scales_block, (lambda j, k: (k, j)) if grouped else (lambda j, k: (0, j))),
        ],
        out_specs=pl.BlockSpec((rows, plan.outputs), lambda j, k: (0, j)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        scratch_shapes=[pltpu.VMEM((rows, plan.outputs), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * weight.inputs * outputs, bytes_accessed=moved, transcendentals=0
        ),
    )(x, *stored)


@dataclass(frozen=True)
class _Plan:
    """Inputs and outputs of a block, and the inputs converted at a time."""

    inputs: int
    outputs: int
    step: int


def _plan(weight: QuantizedWeight) -> _Plan | None:
    """Blocks of whole groups and whole tiles that divide the weight; None where there are none."""
    # Eight groups' scales are a whole tile; a block of all inputs takes them all.
    unit = math.lcm(LANES, 8 * weight.group) if weight.groups > 1 else LANES
    inputs = _largest_multiple(weight.inputs, unit, BLOCK_INPUTS)
    if inputs is None:
        inputs = weight.inputs
    outputs = _largest_multiple(weight.outputs, LANES, BLOCK_WEIGHTS // inputs)
    if outputs is None:
        return None
    group = weight.group if weight.groups > 1 else 1
    step = _largest_multiple(inputs, math.lcm(group, 64), STEP_INPUTS) or inputs
    return _Plan(inputs, outputs, step)


def _largest_multiple(number: int, unit: int, most: int) -> int | None:
    """The largest multiple of `unit` that divides a number and is at most `most`."""
    found = [size for size in range(unit, min(number, most) + 1, unit) if number % size == 0]
    return max(found, default=None)


def _scaled(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Integers [inputs, outputs] times scales [groups, outputs]."""
    groups, outputs = scales.shape
    # An integer times a bfloat16 scale, rounded to bfloat16 once, is the same in either arithmetic; this one is faster.
    narrow = dtype == jnp.bfloat16 and scales.dtype == jnp.bfloat16
    exact = values.astype(jnp.bfloat16 if narrow else jnp.float32).reshape(groups, -1, outputs)
    return (exact * scales.astype(exact.dtype)[:, None]).reshape(-1, outputs)
