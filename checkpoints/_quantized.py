"""Quantized weights as a file holds them, and their form as integers with one scale for each group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix whose inputs are quantized in groups, exactly as the file has it.

    With g = group_size, the weight of output o and input i is, computed in float32,

        values[o, i] * scales[o, i // g] + minimums[o, i // g]        (minimums None: no second term)

    which is bit for bit what `Checkpoint.read` returns.

    values: int8[outputs, inputs], in Hugging Face's order of rows; with `bits` bits they lie in 0 .. 2**bits - 1 when
        there are minimums, else in -2**(bits - 1) .. 2**(bits - 1) - 1.
    scales: float16 or float32 [outputs, inputs / g]. minimums: the same type and shape, or None.
    bits: 4, 5, 6 or 8. group_size: 16 or 32; it divides inputs.
    """

    values: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        outputs, inputs = self.values.shape
        groups = (outputs, inputs // self.group_size)
        if inputs % self.group_size or self.scales.shape != groups:
            raise ValueError(
                f"values {self.values.shape} and scales {self.scales.shape} do not fit groups of {self.group_size}."
            )
        if self.minimums is not None and (self.minimums.shape, self.minimums.dtype) != (groups, self.scales.dtype):
            raise ValueError(f"minimums must be {self.scales.dtype} {groups} like the scales.")

    def dequantized(self) -> np.ndarray:
        """The weights, float32[outputs, inputs]."""
        outputs, inputs = self.values.shape
        result = self.values.astype(np.float32).reshape(outputs, -1, self.group_size)
        result *= self.scales.astype(np.float32)[:, :, None]
        if self.minimums is not None:
            result += self.minimums.astype(np.float32)[:, :, None]
        return result.reshape(outputs, inputs)
