"""Lazy reading of GGUF tensors as Hugging Face tensors: dequantized, rows in Hugging Face order."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints._checkpoint import TensorInfo
from checkpoints._errors import CheckpointError
from checkpoints._gguf_header import GGUFHeader, GGUFTensor
from checkpoints._gguf_names import ROPE_FACTOR_TENSORS, Architecture, hugging_face_name

_PLAIN: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
}
# Rows are dequantized in pieces of this many values, because the routine's temporaries are several times its input.
_CHUNK_VALUES = 1 << 21


@dataclass(frozen=True)
class _View:
    """One Hugging Face tensor as a part of one GGUF tensor."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    heads: int | None = None
    expert: int | None = None
    unit_offset: bool = False


class GGUFStore:
    """Tensors of a mapped GGUF file under Hugging Face names."""

    def __init__(
        self, path: Path, data: mmap.mmap, header: GGUFHeader, arch: Architecture, heads: tuple[int, int]
    ) -> None:
        self._path = path
        self._data: mmap.mmap | None = data
        self._views = _views(path, header, arch, heads)
        self.infos: Mapping[str, TensorInfo] = {name: _info(view) for name, view in self._views.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor: float32 when quantized, otherwise in its own dtype."""
        view = self._views[name]
        rows = self._stored_rows(view)
        if view.heads is not None:
            rows = unpermute_rows(rows, view.heads)
        result = _decode(rows, view.tensor.type).reshape(view.shape)
        if view.unit_offset:
            result = (result.astype(np.float32) - np.float32(1)).astype(result.dtype)
        return result

    def close(self) -> None:
        """Drop the mapping; it is unmapped once no array views it."""
        self._data = None

    def _stored_rows(self, view: _View) -> np.ndarray:
        if self._data is None:
            raise CheckpointError(f"{self._path}: the checkpoint is closed; open it again to read tensors.")
        tensor = view.tensor
        raw = np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)
        if view.expert is not None:
            raw = raw.reshape(tensor.shape[0], -1)[view.expert]
        rows = math.prod(view.shape[:-1]) if len(view.shape) > 1 else 1
        if view.heads is not None and len(view.shape) == 1:
            rows = view.shape[0]
        return raw.reshape(rows, -1)


def unpermute_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Turn llama.cpp's interleaved rotary pairs into Hugging Face's halves.

    `rows` is [heads * head_dim, ...]; within each head, row 2j+h becomes row h*head_dim/2+j.
    """
    head_dim = rows.shape[0] // heads
    split = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _views(path: Path, header: GGUFHeader, arch: Architecture, heads: tuple[int, int]) -> dict[str, _View]:
    views: dict[str, _View] = {}
    for tensor in header.tensors.values():
        if tensor.name in ROPE_FACTOR_TENSORS:
            continue
        name = hugging_face_name(tensor.name, arch)
        if name is None:
            raise CheckpointError(
                f"{path}: tensor {tensor.name[:80]!r} has no place in a {arch.model_type} model; "
                "convert the file again or use the safetensors checkpoint."
            )
        _refuse_unreadable(path, tensor)
        if "{}" in name:
            for expert in range(tensor.shape[0]):
                views[name.format(expert)] = _View(tensor, tensor.shape[1:], expert=expert)
        else:
            views[name] = _View(
                tensor,
                tensor.shape,
                heads=_permuted_heads(path, tensor, name, heads) if arch.permuted else None,
                unit_offset=arch.unit_offset_norms and name.endswith("norm.weight"),
            )
    return views


def _permuted_heads(path: Path, tensor: GGUFTensor, name: str, heads: tuple[int, int]) -> int | None:
    for part, count in zip((".q_proj.", ".k_proj."), heads, strict=True):
        if part in name:
            if tensor.shape[0] % (2 * count):
                raise CheckpointError(
                    f"{path}: tensor {tensor.name!r} of shape {tensor.shape} does not divide into {count} heads "
                    "of even width; convert the file again."
                )
            return count
    return None


def _refuse_unreadable(path: Path, tensor: GGUFTensor) -> None:
    if tensor.type in _PLAIN:
        return
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8), tensor.type)
    except (NotImplementedError, ValueError):
        raise CheckpointError(
            f"{path}: tensor {tensor.name[:80]!r} has the type {tensor.type.name}, which cannot be dequantized; "
            "use a file quantized another way, for example Q8_0."
        ) from None


def _info(view: _View) -> TensorInfo:
    dtype = _PLAIN.get(view.tensor.type, np.dtype(np.float32))
    count = math.prod(view.shape)
    stored = view.tensor.nbytes * count // max(1, math.prod(view.tensor.shape))
    return TensorInfo(view.shape, dtype, count * dtype.itemsize, view.tensor.type.name, stored)


def _decode(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind in _PLAIN:
        return rows.view(_PLAIN[kind])
    block, block_bytes = GGML_QUANT_SIZES[kind]
    width = rows.shape[1] // block_bytes * block
    result = np.empty((rows.shape[0], width), np.float32)
    step = max(1, _CHUNK_VALUES // width)
    for start in range(0, rows.shape[0], step):
        result[start : start + step] = gguf.quants.dequantize(rows[start : start + step], kind)
    return result
