"""Quantized weights as the device holds them: integers, and a float scale for each group of inputs of each output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

BITS = (4, 8)


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is quantized.

    bits: 8 (int8) or 4 (int4, two to a byte). group: inputs that share a scale; None for all of them.
    offsets: whether each group also has the weight that integer 0 stands for, so that its range need not lie around 0.
    scale_dtype: of scales and offsets.
    """

    bits: int
    group: int | None = None
    offsets: bool = False
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
    """A weight of a matrix product, a pytree: weight ~= values * scale of its group (+ offset of its group).

    values: int8 or int4 [inputs, outputs]; [outputs, inputs] where `axis` is 1, as in a table of token embeddings.
    scales: a float type [groups, outputs] for either axis; groups divide the inputs evenly, in order.
    offsets: the same type and shape, or None.
    axis: of the inputs, over which products sum: 0 or 1.
    """

    values: jax.Array
    scales: jax.Array
    offsets: jax.Array | None = None
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
    def size(self) -> int:
        """Number of weights."""
        return self.inputs * self.outputs

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return jnp.iinfo(self.values.dtype).bits


def quantize(array: Any, weight_format: WeightFormat, axis: int = 0) -> QuantizedWeight:
    """The nearest weight of this format: the integers reach from each group's smallest weight to its largest.

    Without offsets they reach as far on either side of 0 as the largest magnitude.
    array: numpy or jax, [inputs, outputs] ([outputs, inputs] for axis 1), any float type; the result is of the same
        library. A group of equal weights has scale 0.
    """
    library: Any = jnp if isinstance(array, jax.Array) else np
    bits, group = weight_format.bits, weight_format.group_of(array.shape[axis])
    largest, stored = 2 ** (bits - 1) - 1, jnp.dtype(weight_format.scale_dtype)
    exact = _grouped(array.astype(np.float32), group, axis)
    # The integers are chosen for scales and offsets as they are stored.
    if weight_format.offsets:
        low, high = exact.min(axis + 1, keepdims=True), exact.max(axis + 1, keepdims=True)
        scales = ((high - low) / (2 * largest + 1)).astype(stored)
        offsets = (low + (largest + 1) * scales.astype(np.float32)).astype(stored)
        exact = exact - offsets.astype(np.float32)
    else:
        scales, offsets = (library.abs(exact).max(axis + 1, keepdims=True) / largest).astype(stored), None
    rounded = library.rint(exact / library.where(scales == 0, 1, scales).astype(np.float32))
    values = library.clip(rounded, -largest - 1, largest).reshape(array.shape).astype(integer_type(bits))
    factors = [None if factor is None else factor.squeeze(axis + 1) for factor in (scales, offsets)]
    if axis == 1:
        factors = [None if factor is None else factor.T for factor in factors]
    return QuantizedWeight(values, *factors, axis=axis)  # pyright: ignore[reportArgumentType]  # scales are there


def dequantized(weight: QuantizedWeight) -> jax.Array:
    """The weights in float32, in the shape of `values`; one expression, for the compiler to fuse into what reads it."""
    exact = _grouped(weight.values.astype(jnp.float32), weight.group, weight.axis)
    exact = exact * _spread(weight.scales, weight.axis)
    if weight.offsets is not None:
        exact = exact + _spread(weight.offsets, weight.axis)
    return exact.reshape(weight.values.shape)


def offset_product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """f32[T, outputs]: what the offsets add to x [T, inputs] times the weight; a group's inputs share theirs."""
    assert weight.offsets is not None, "only weights with offsets have this part"
    sums = x.astype(jnp.float32).reshape(x.shape[0], weight.groups, -1).sum(-1)
    return jnp.matmul(sums, weight.offsets.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def table_rows(table: QuantizedWeight, ids: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rows ids i32[T] of a table (axis 1) as `dtype` [T, inputs]: token embeddings."""
    offsets = None if table.offsets is None else table.offsets[:, ids]
    return dequantized(QuantizedWeight(table.values[ids], table.scales[:, ids], offsets, 1)).astype(dtype)


def is_quantized_weight(leaf: Any) -> TypeGuard[QuantizedWeight]:
    """Whether a part of a tree is a quantized weight, to be taken as one leaf."""
    return isinstance(leaf, QuantizedWeight)


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
