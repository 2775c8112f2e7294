"""The product with a quantized weight from the definition: float32 numpy, the weights written out."""

from __future__ import annotations

import numpy as np

from pallas_kernels.quantized_matmul.weights import QuantizedWeight


def quantized_matmul(x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    """Reference of `quantized_matmul`: float32[T, outputs]."""
    return x.astype(np.float32) @ written_out(weight)


def written_out(weight: QuantizedWeight) -> np.ndarray:
    """The weights float32[inputs, outputs], one group after the other."""
    values, scales = (np.asarray(array).astype(np.float32) for array in (weight.values, weight.scales))
    offsets = np.zeros_like(scales) if weight.offsets is None else np.asarray(weight.offsets).astype(np.float32)
    if weight.axis == 1:
        values = values.T
    result = np.zeros(values.shape, np.float32)
    group = values.shape[0] // scales.shape[0]
    for index in range(scales.shape[0]):
        rows = slice(index * group, (index + 1) * group)
        result[rows] = values[rows] * scales[index] + offsets[index]
    return result
