"""Quantized weights as the device holds them: integers, and a float scale for each group of inputs of each output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BITS = (4, 8)


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is quantized.

    bits: 8 (int8) or 4 (int4, two to a byte). group: inputs that share a scale; None for all of them.
    minimums: whether each group also has a number that is added to its weights.
    scale_dtype: of scales and minimums.
    """

    bits: int
    group: int | None = None
    minimums: bool = False
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"Weights are quantized to {' or '.join(map(str, BITS))} bits, not {self.bits}.")
        if self.group is not None and self.group < 1:
            raise ValueError(f"A group of weights needs at least one input, not {self.group}.")

    def group_of(self, inputs: int) -> int:
        """Inputs that share a scale in a weight of so many: the group, or what it and they have in common."""
        return inputs if self.group is None else math.gcd(inputs, self.group)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight of a matrix product, a pytree: weight ~= values * scale of its group (+ minimum of its group).

    values: int8 or int4 [inputs, outputs]; [outputs, inputs] where `axis` is 1, as in a table of token embeddings.
    scales: a float type [groups, outputs] for either axis; groups divide the inputs evenly, in order.
    minimums: the same type and shape, or None.
    axis: of the inputs, over which products sum: 0 or 1.
    """

    values: jax.Array
    scales: jax.Array
    minimums: jax.Array | None = None
    axis: int = field(default=0, metadata={"static": True})

    @property
    def inputs(self) -> int:
        """Features that come in."""
        return self.values.shape[self.axis]

    @property
    def outputs(self) -> int:
        """Features that go out."""
        return self.values.shape[1 - self.axis]

    @property
    def groups(self) -> int:
        """Groups of inputs."""
        return self.scales.shape[0]

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.inputs // self.groups

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return jnp.iinfo(self.values.dtype).bits


def quantize(array: Any, weight_format: WeightFormat, axis: int = 0) -> QuantizedWeight:
    """The nearest weight of this format, symmetric: each group's largest magnitude becomes the largest integer.

    array: numpy or jax, [inputs, outputs] ([outputs, inputs] for axis 1), any float type; the result is of the same
        library. A group of zeros has scale 0.
    """
    library: Any = jnp if isinstance(array, jax.Array) else np
    bits, group = weight_format.bits, weight_format.group_of(array.shape[axis])
    largest = 2 ** (bits - 1) - 1
    exact = _grouped(array.astype(np.float32), group, axis)
    magnitude = library.abs(exact).max(axis + 1)
    # The integers are chosen for the scale as it is stored.
    scales = (magnitude / largest).astype(jnp.dtype(weight_format.scale_dtype))
    divisor = library.where(scales == 0, 1, scales).astype(np.float32)
    rounded = library.rint(exact / library.expand_dims(divisor, axis + 1))
    values = library.clip(rounded, -largest - 1, largest).reshape(array.shape).astype(integer_type(bits))
    scales = scales if axis == 0 else scales.T
    minimums = library.zeros_like(scales) if weight_format.minimums else None
    return QuantizedWeight(values, scales, minimums, axis)


def dequantized(weight: QuantizedWeight) -> jax.Array:
    """The weights in float32, in the shape of `values`; one expression, for the compiler to fuse into what reads it."""
    exact = _grouped(weight.values.astype(jnp.float32), weight.group, weight.axis)
    exact = exact * _spread(weight.scales, weight.axis)
    if weight.minimums is not None:
        exact = exact + _spread(weight.minimums, weight.axis)
    return exact.reshape(weight.values.shape)


def table_rows(table: QuantizedWeight, ids: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rows ids i32[T] of a table (axis 1) as `dtype` [T, inputs]: token embeddings."""
    minimums = None if table.minimums is None else table.minimums[:, ids]
    return dequantized(QuantizedWeight(table.values[ids], table.scales[:, ids], minimums, 1)).astype(dtype)


def integer_type(bits: int) -> Any:
    """The type of values of so many bits."""
    return jnp.dtype(jnp.int8 if bits == 8 else jnp.int4)


def stored_bytes(array: Any) -> int:
    """Bytes of an array (or its shape and type) on a device, which stores two int4 in one."""
    bits = jnp.iinfo(array.dtype).bits if jnp.issubdtype(array.dtype, jnp.integer) else 8 * array.dtype.itemsize
    return math.prod(array.shape) * bits // 8


def _spread(factors: jax.Array, axis: int) -> jax.Array:
    """[groups, outputs] -> f32[groups, 1, outputs], or for axis 1 f32[outputs, groups, 1]."""
    factors = factors.astype(jnp.float32)
    return factors[:, None] if axis == 0 else factors.T[:, :, None]


def _grouped(array: Any, group: int, axis: int) -> Any:
    """[.., inputs, ..] -> [.., groups, group, ..]."""
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] // group, group, *shape[axis + 1 :])
