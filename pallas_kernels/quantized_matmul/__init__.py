"""Products with weights that stay quantized in memory."""

from __future__ import annotations

import jax

from pallas_kernels import dispatch
from pallas_kernels.quantized_matmul.weights import (
    QuantizedWeight,
    WeightFormat,
    dequantized,
    integer_type,
    is_quantized_weight,
    quantize,
    stored_bytes,
    table_rows,
)

__all__ = [
    "QuantizedWeight",
    "WeightFormat",
    "dequantized",
    "integer_type",
    "is_quantized_weight",
    "quantize",
    "quantized_matmul",
    "stored_bytes",
    "table_rows",
]


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    impl: str = dispatch.AUTO,
) -> jax.Array:
    """x times the weight, which is read as it is stored.

    x: [T, inputs], float32 or bfloat16; the weights are rounded to its type. Sums are float32.
    weight: of so many inputs.
    out_dtype: type of the result [T, outputs]; None for that of x.
    impl: "auto" or a lowering of `pallas_kernels.dispatch`.
    Raises KernelUnavailable when an explicit `impl` cannot run these arguments.
    """
    choice = dispatch.choose_for(__name__, impl, x, weight)
    lowering = dispatch.load(__name__, choice.name)
    return lowering.quantized_matmul(x, weight, out_dtype=x.dtype if out_dtype is None else out_dtype)
