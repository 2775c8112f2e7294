"""GGUF's block formats that are integers with scales, taken apart without changing a value.

The `gguf` package unpacks the integers: a block whose scales are replaced by one and whose minimums by zero
dequantizes to its integers.  Only the scales are read here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints._quantized import QuantizedTensor

_ONE = np.array([1.0], np.float16).view(np.uint8)
_ZERO = np.zeros(2, np.uint8)
# Eight 6-bit scales of one and minimums of zero, as the K types pack them.
_K_ONES = np.array([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], np.uint8)

_Scales = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]


@dataclass(frozen=True)
class _Kind:
    """One block type: `neutral` maps a byte offset to the bytes that make scales one and minimums zero there."""

    bits: int
    group_size: int
    neutral: dict[int, np.ndarray]
    scales: _Scales


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _scale_only(at: int) -> _Scales:
    return lambda blocks: (_half(blocks, at), None)


def _scale_and_minimum(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _half(blocks, 0), _half(blocks, 2)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales, minimums = gguf.quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return (
        _half(blocks, 0).astype(np.float32) * scales.astype(np.float32),
        -(_half(blocks, 2).astype(np.float32) * minimums.astype(np.float32)),
    )


def _q6_k_scales(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _half(blocks, 208).astype(np.float32) * scales, None


_K_NEUTRAL = {0: _ONE, 2: _ZERO, 4: _K_ONES}
_KINDS: dict[GGMLQuantizationType, _Kind] = {
    GGMLQuantizationType.Q4_0: _Kind(4, 32, {0: _ONE}, _scale_only(0)),
    GGMLQuantizationType.Q4_1: _Kind(4, 32, {0: _ONE, 2: _ZERO}, _scale_and_minimum),
    GGMLQuantizationType.Q5_0: _Kind(5, 32, {0: _ONE}, _scale_only(0)),
    GGMLQuantizationType.Q5_1: _Kind(5, 32, {0: _ONE, 2: _ZERO}, _scale_and_minimum),
    GGMLQuantizationType.Q8_0: _Kind(8, 32, {0: _ONE}, _scale_only(0)),
    GGMLQuantizationType.Q4_K: _Kind(4, 32, _K_NEUTRAL, _k_scales),
    GGMLQuantizationType.Q5_K: _Kind(5, 32, _K_NEUTRAL, _k_scales),
    GGMLQuantizationType.Q6_K: _Kind(6, 16, {192: np.ones(16, np.uint8), 208: _ONE}, _q6_k_scales),
}


def integers_with_scales(rows: np.ndarray, kind: GGMLQuantizationType) -> QuantizedTensor | None:
    """Take apart the blocks of a matrix, uint8[outputs, bytes of a row]; None for a type that is no such format."""
    form = _KINDS.get(kind)
    if form is None:
        return None
    outputs, (width, block_bytes) = rows.shape[0], GGML_QUANT_SIZES[kind]
    inputs = rows.shape[1] // block_bytes * width
    values = np.empty((outputs, inputs), np.int8)
    step = max(1, (1 << 18) // inputs)
    for start in range(0, outputs, step):
        blocks = rows[start : start + step].reshape(-1, block_bytes).copy()
        for at, neutral in form.neutral.items():
            blocks[:, at : at + neutral.size] = neutral
        values[start : start + step] = gguf.quants.dequantize(blocks, kind).reshape(-1, inputs)
    with np.errstate(all="ignore"):  # a scale that is no number is the file's
        scales, minimums = form.scales(rows.reshape(-1, block_bytes))
    groups = (outputs, inputs // form.group_size)
    minimums = None if minimums is None else minimums.reshape(groups)
    return QuantizedTensor(values, scales.reshape(groups), minimums, form.bits, form.group_size)
