"""Lazy reading of GGUF tensors as Hugging Face tensors: dequantized, rows in Hugging Face order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints._checkpoint import TensorInfo
from checkpoints._errors import CheckpointError
from checkpoints._files import map_bytes
from checkpoints._gguf_header import GGUFHeader, GGUFTensor
from checkpoints._gguf_names import ROPE_FACTOR_TENSORS, Architecture, Join
from checkpoints._gguf_quantized import integers_with_scales
from checkpoints._quantized import QuantizedTensor
from checkpoints._sharded import sharded_array

_PLAIN: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.I8: np.dtype(np.int8),
    GGMLQuantizationType.I16: np.dtype(np.int16),
    GGMLQuantizationType.I32: np.dtype(np.int32),
    GGMLQuantizationType.I64: np.dtype(np.int64),
}
MAX_VIEWS = 100_000
"""A stack of experts is one tensor in the file and many here."""
# Rows are dequantized in pieces of this many values, because the routine's temporaries are several times its input.
_CHUNK_VALUES = 1 << 18
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class _View:
    """One Hugging Face tensor as a part of one GGUF tensor; `shape` is what is read, before it is transposed."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    heads: int | None = None
    expert: int | None = None
    unit_offset: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class _Joined:
    """One Hugging Face tensor made of several GGUF tensors of one dtype."""

    parts: tuple[_View, ...]
    rule: Join


class GGUFStore:
    """Tensors of an open GGUF file under Hugging Face names."""

    def __init__(
        self, path: Path, file: IO[bytes], header: GGUFHeader, arch: Architecture, heads: tuple[int, int]
    ) -> None:
        self._path = path
        self._file = file
        self._views = _named_views(path, header, arch, heads)
        self.infos: Mapping[str, TensorInfo] = {name: _info(view) for name, view in self._views.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor: float32 when quantized, otherwise in its own dtype."""
        view = self._views[name]
        if isinstance(view, _Joined):
            return view.rule.join([self._read_view(part) for part in view.parts])
        return self._read_view(view)

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """A matrix in one of the formats that are integers with scales, else None."""
        view = self._views[name]
        if isinstance(view, _Joined) or view.transposed or len(view.shape) != 2:
            return None
        return integers_with_scales(self._rows(view), view.tensor.type)

    def read_sharded(self, name: str, sharding: Any) -> Any:
        """One tensor on the devices of a sharding; of a matrix only the rows that are needed are decoded."""
        view = self._views[name]

        def part(index: tuple[slice, ...]) -> np.ndarray:
            if isinstance(view, _Joined) or view.transposed or len(view.shape) != 2:
                return self.read(name)[index]
            return self._read_view(view, index[0])[:, index[1]]

        return sharded_array(self.infos[name].shape, sharding, part)

    def close(self) -> None:
        """Close the file; arrays that view it stay valid."""
        self._file.close()

    def _read_view(self, view: _View, rows: slice = _ALL) -> np.ndarray:
        """A tensor, or some rows of a matrix."""
        shape = view.shape if rows == _ALL else (-1, *view.shape[1:])
        result = _decode(self._rows(view, rows), view.tensor.type).reshape(shape)
        if view.unit_offset:
            result = (result.astype(np.float32) - np.float32(1)).astype(result.dtype)
        return result.swapaxes(-1, -2) if view.transposed else result

    def _rows(self, view: _View, rows: slice = _ALL) -> np.ndarray:
        """The bytes of a tensor, uint8[rows, bytes of a row], rows in Hugging Face's order."""
        if self._file.closed:
            raise CheckpointError(f"{self._path}: the checkpoint is closed; open it again to read tensors.")
        tensor = view.tensor
        count = _stored_bytes(view)
        start = tensor.offset + (view.expert or 0) * count
        height = math.prod(view.shape[:-1]) if len(view.shape) > 1 else 1
        if view.heads is not None and len(view.shape) == 1:
            height = view.shape[0]
        stored = map_bytes(self._file, start, count).reshape(height, -1)
        return stored[rows] if view.heads is None else stored[unpermute_rows(np.arange(height), view.heads)[rows]]


def unpermute_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Turn llama.cpp's interleaved rotary pairs into Hugging Face's halves.

    `rows` is [heads * head_dim, ...]; within each head, row 2j+h becomes row h*head_dim/2+j.
    """
    head_dim = rows.shape[0] // heads
    split = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _named_views(
    path: Path, header: GGUFHeader, arch: Architecture, heads: tuple[int, int]
) -> dict[str, _View | _Joined]:
    result: dict[str, _View | _Joined] = {}
    for name, view in _views(path, header, arch, heads):
        if name in result:
            raise CheckpointError(f"{path}: two tensors are both {name[:80]!r}; convert the file again.")
        if len(result) == MAX_VIEWS:
            raise CheckpointError(f"{path}: the experts make more than {MAX_VIEWS} matrices; convert the file again.")
        result[name] = view
    return result


def _views(
    path: Path, header: GGUFHeader, arch: Architecture, heads: tuple[int, int]
) -> Iterator[tuple[str, _View | _Joined]]:
    part_of = {part: rule for rule in arch.joins for part in rule.parts}
    for tensor in header.tensors.values():
        if tensor.name in ROPE_FACTOR_TENSORS:
            continue
        _refuse_unreadable(path, tensor)
        prefix = tensor.name.rpartition(".")[0].rpartition(".")[0]
        part = tensor.name.removeprefix(f"{prefix}.")
        if part in part_of:
            if part == part_of[part].parts[0]:
                yield _joined(path, header, arch, prefix, part_of[part])
            elif f"{prefix}.{part_of[part].parts[0]}" not in header.tensors:
                raise _misfit(path, tensor.name, "the tensor that belongs to it is missing")
            continue
        name = arch.hugging_face_name(tensor.name)
        if name is None:
            raise _misfit(path, tensor.name, f"it has no place in a {arch.model_type} model")
        if "{}" in name:
            if len(tensor.shape) != 3:
                raise _misfit(path, tensor.name, f"its shape {tensor.shape} is no stack of matrices")
            for expert in range(tensor.shape[0]):
                yield name.format(expert), _View(tensor, tensor.shape[1:], expert=expert)
        else:
            yield name, _single(path, tensor, name, arch, heads)


def _single(path: Path, tensor: GGUFTensor, name: str, arch: Architecture, heads: tuple[int, int]) -> _View:
    transposed = name.endswith(tuple(arch.transposed))
    if transposed and len(tensor.shape) < 2:
        raise _misfit(path, tensor.name, f"its shape {tensor.shape} is no matrix")
    return _View(
        tensor,
        tensor.shape,
        heads=_permuted_heads(path, tensor, name, heads) if arch.permuted else None,
        unit_offset=arch.unit_offset_norms and name.endswith("norm.weight"),
        transposed=transposed,
    )


def _joined(path: Path, header: GGUFHeader, arch: Architecture, prefix: str, rule: Join) -> tuple[str, _Joined]:
    names = [f"{prefix}.{part}" for part in rule.parts]
    parts = [header.tensors[name] for name in names if name in header.tensors]
    if len(parts) != len(names):
        raise _misfit(path, names[0], "the tensor that belongs to it is missing")
    layer = prefix.removeprefix("blk.")
    if not layer.isascii() or not layer.isdigit():
        raise _misfit(path, names[0], f"it has no place in a {arch.model_type} model")
    try:
        rule.shape(tuple(tensor.shape for tensor in parts))
    except ValueError:
        shapes = " and ".join(str(tensor.shape) for tensor in parts)
        raise _misfit(path, names[0], f"the shapes {shapes} of what belongs together do not fit") from None
    views = tuple(_View(tensor, tensor.shape) for tensor in parts)
    if len({_dtype(view) for view in views}) > 1:
        raise _misfit(path, names[0], "what belongs together differs in type")
    return f"{arch.layer.format(int(layer))}.{rule.name}", _Joined(views, rule)


def _misfit(path: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {name[:80]!r} cannot be used, {why}; convert the file again or use the safetensors checkpoint."
    )


def _permuted_heads(path: Path, tensor: GGUFTensor, name: str, heads: tuple[int, int]) -> int | None:
    for part, count in zip((".q_proj.", ".k_proj."), heads, strict=True):
        if part in name:
            if not tensor.shape or tensor.shape[0] % (2 * count):
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


def _dtype(view: _View) -> np.dtype:
    return _PLAIN.get(view.tensor.type, np.dtype(np.float32))


def _stored_bytes(view: _View) -> int:
    return view.tensor.nbytes * math.prod(view.shape) // max(1, math.prod(view.tensor.shape))


def _info(view: _View | _Joined) -> TensorInfo:
    parts = view.parts if isinstance(view, _Joined) else (view,)
    if isinstance(view, _Joined):
        shape = view.rule.shape(tuple(part.shape for part in parts))
    else:
        shape = (*view.shape[:-2], view.shape[-1], view.shape[-2]) if view.transposed else view.shape
    dtype = _dtype(parts[0])
    stored_as = "/".join(dict.fromkeys(part.tensor.type.name for part in parts))
    stored = sum(_stored_bytes(part) for part in parts)
    return TensorInfo(shape, dtype, math.prod(shape) * dtype.itemsize, stored_as, stored)


def _decode(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind in _PLAIN:
        return rows.view(_PLAIN[kind])
    block, block_bytes = GGML_QUANT_SIZES[kind]
    width = rows.shape[1] // block_bytes * block
    result = np.empty((rows.shape[0], width), np.float32)
    step = max(1, _CHUNK_VALUES // width)
    with np.errstate(all="ignore"):  # a scale that is no number is the file's
        for start in range(0, rows.shape[0], step):
            result[start : start + step] = gguf.quants.dequantize(rows[start : start + step], kind)
    return result
