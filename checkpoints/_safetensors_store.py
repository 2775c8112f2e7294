"""Lazy reading of one safetensors file, or of several joined by an index."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from checkpoints._checkpoint import TensorInfo
from checkpoints._errors import CheckpointError
from checkpoints._files import child, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


class SafetensorsStore:
    """Tensors of the safetensors files in a directory; the library maps the files and checks their headers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._home: dict[str, Any] = {}
        self.infos: Mapping[str, TensorInfo] = {}
        if child(directory, SINGLE).is_file():
            file = _open(directory / SINGLE)
            self._home = dict.fromkeys(file.keys(), file)
        else:
            self._home = _open_shards(directory)
        self.infos = {name: self._info(name) for name in self._home}

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype."""
        if name not in self._home:
            raise CheckpointError(f"{self._directory}: the checkpoint is closed; open it again to read tensors.")
        try:
            return self._home[name].get_tensor(name)
        except (safetensors.SafetensorError, KeyError, OSError) as error:
            raise CheckpointError(f"{self._directory}: tensor {name!r} cannot be read ({error}).") from None

    def read_quantized(self, name: str) -> None:
        """None: nothing here is stored as integers with scales."""

    def close(self) -> None:
        """Drop the files; each is unmapped when its last reference goes."""
        self._home = {}

    def _info(self, name: str) -> TensorInfo:
        view = self._home[name].get_slice(name)
        code, shape = view.get_dtype(), tuple(view.get_shape())
        if code not in _DTYPES:
            raise CheckpointError(
                f"{self._directory}: tensor {name[:80]!r} has the type {code}, which is not supported; "
                "convert the checkpoint to bfloat16."
            )
        nbytes = math.prod(shape) * _DTYPES[code].itemsize
        return TensorInfo(shape, _DTYPES[code], nbytes, code, nbytes)


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file ({error}); download or convert it again."
        ) from None


def _open_shards(directory: Path) -> dict[str, Any]:
    index = child(directory, INDEX)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: the entry weight_map must map tensor names to file names; get a correct file.")
    files: dict[str, Any] = {}
    for shard in dict.fromkeys(weight_map.values()):
        path = child(directory, shard)
        if not path.is_file():
            raise CheckpointError(f"{path}: the shard named by {INDEX} is missing; download it.")
        files[shard] = _open(path)
    names = {shard: frozenset(file.keys()) for shard, file in files.items()}
    for name, shard in weight_map.items():
        if name not in names[shard]:
            raise CheckpointError(f"{directory / shard}: tensor {name[:80]!r} named by {INDEX} is not in it.")
    return {name: files[shard] for name, shard in weight_map.items()}
