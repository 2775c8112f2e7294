"""Weights that are kept quantized: rounded when they are loaded, or taken from a file that has them so."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import Checkpoint, QuantizedTensor
from jaxinfer.models import DecoderConfig, Family
from jaxinfer.models.linear import TABLES, flattened, format_of, is_quantizable, quantized_weights
from jaxinfer.models.tensors import Join, sources
from pallas_kernels.quantized_matmul import QuantizedWeight, WeightFormat, integer_type, quantize

AUTO = "auto"
AS_STORED = "stored"
FLOAT = "float"
WEIGHT_DTYPES = (AUTO, AS_STORED, FLOAT, "int8", "int4")
"""What `weight_dtype` may be: by the device, as the checkpoint has them, all in the type of the computation, or
rounded."""

_STORED_FORMATS = {
    "Q4_0": WeightFormat(4, 32),
    "Q4_1": WeightFormat(4, 32, offsets=True),
    "Q4_K": WeightFormat(4, 32, offsets=True),
    "Q5_0": WeightFormat(8, 32),
    "Q5_1": WeightFormat(8, 32, offsets=True),
    "Q5_K": WeightFormat(8, 32, offsets=True),
    "Q6_K": WeightFormat(8, 16),
    "Q8_0": WeightFormat(8, 32),
}
"""GGUF's types, and the formats that hold their integers and scales exactly."""

_round = jax.jit(quantize, static_argnums=(1, 2))


def weight_formats(
    checkpoint: Checkpoint, family: Family, config: DecoderConfig, weight_dtype: str
) -> tuple[tuple[str, WeightFormat], ...]:
    """`DecoderConfig.weights` for one of WEIGHT_DTYPES. Raises ValueError for another one."""
    if weight_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"weight_dtype must be one of {', '.join(WEIGHT_DTYPES)}, not {weight_dtype!r}.")
    if weight_dtype == AUTO:
        # XLA's products with quantized weights take twice as long as those with floats on a CPU.
        weight_dtype = FLOAT if jax.default_backend() == "cpu" else AS_STORED
    if weight_dtype == FLOAT:
        return ()
    if weight_dtype == AS_STORED:
        return tuple(_formats_as_stored(checkpoint, family, config))
    return quantized_weights(weight_dtype)


def keep_quantized(
    checkpoint: Checkpoint, config: DecoderConfig, path: str, names: tuple[str, ...], join: Join
) -> QuantizedWeight | None:
    """A parameter quantized as `config.weights` says, on the device; None if it is to be an array in config.dtype.

    path: of the parameter. names: its tensors. join: how they make it up. What the checkpoint has in just this format
    is taken as it is; everything else is rounded.
    """
    weight_format = format_of(config, path)
    if weight_format is None:
        return None
    if _format_as_stored(checkpoint, names) == weight_format:
        tensors = [checkpoint.read_quantized(name) for name in names]
        if None not in tensors:
            stored = _as_stored([tensor for tensor in tensors if tensor is not None], path, join, weight_format)
            return jax.tree.map(jnp.array, stored)
    joined = join([checkpoint.read(name) for name in names])
    if path in TABLES:
        return _round(jnp.asarray(joined), weight_format, 1)
    return _round(jnp.asarray(flattened(joined)), weight_format, 0)


def _formats_as_stored(
    checkpoint: Checkpoint, family: Family, config: DecoderConfig
) -> Iterator[tuple[str, WeightFormat]]:
    """(path, format) of every parameter that the checkpoint has as integers and scales."""
    names_of = sources(config, family.rules, family.prefixes, checkpoint.tensors)
    readable: dict[str, bool] = {}
    for path, names in names_of:
        found = _format_as_stored(checkpoint, names) if is_quantizable(path) else None
        if found is None:
            continue
        # A file may hold a matrix the other way round. One layer tells for all of them.
        kind = path.partition("/")[2]
        if kind not in readable:
            readable[kind] = not kind or all(checkpoint.read_quantized(name) is not None for name in names)
        if readable[kind]:
            yield path, found


def _format_as_stored(checkpoint: Checkpoint, names: tuple[str, ...]) -> WeightFormat | None:
    """The format that holds all of these tensors exactly, side by side; None where one is not stored as integers."""
    formats = [_STORED_FORMATS.get(checkpoint.tensors[name].stored_as) for name in names]
    known = [each for each in formats if each is not None]
    if len(known) < len(formats):
        return None
    groups = [each.group or 0 for each in known]
    return WeightFormat(max(each.bits for each in known), min(groups), any(each.offsets for each in known))


def _as_stored(tensors: list[QuantizedTensor], path: str, join: Join, weight_format: WeightFormat) -> QuantizedWeight:
    """The stored integers and scales in the decoder's layout, as numpy arrays."""
    alike = [_in_format(tensor, weight_format) for tensor in tensors]
    arrays = [join([parts[index] for parts in alike]) for index in range(3 if weight_format.offsets else 2)]
    if path in TABLES:
        values, *factors = arrays
        factors = [np.ascontiguousarray(factor.T) for factor in factors]
    else:
        values, *factors = map(flattened, arrays)
    return QuantizedWeight(values.astype(integer_type(weight_format.bits)), *factors, axis=1 if path in TABLES else 0)  # pyright: ignore


def _in_format(tensor: QuantizedTensor, weight_format: WeightFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values int8[outputs, inputs], scales and minimums f32[outputs, groups] for groups of the format's size."""
    values, scales = tensor.values, tensor.scales.astype(np.float32)
    minimums = np.zeros_like(scales) if tensor.minimums is None else tensor.minimums.astype(np.float32)
    if weight_format.bits == 4 and tensor.minimums is not None:
        # 0 .. 15 as the signed type has it. The sum has float32's precision, and is exact for all but extreme scales.
        values, minimums = values - np.int8(8), minimums + 8 * scales
    repeats = tensor.group_size // (weight_format.group or tensor.group_size)
    return values, np.repeat(scales, repeats, axis=1), np.repeat(minimums, repeats, axis=1)
