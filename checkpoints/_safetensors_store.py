"""Lazy reading of one safetensors file, or of several joined by an index."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import safetensors

from checkpoints._checkpoint import TensorInfo
from checkpoints._errors import CheckpointError
from checkpoints._files import child, map_bytes, open_file, read_json
from checkpoints._sharded import sharded_array

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 1 << 24
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
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: IO[bytes]
    offset: int
    info: TensorInfo


class SafetensorsStore:
    """Tensors of the safetensors files in a directory.

    The library reads and checks their headers; the bytes are read here, because it has no dtype for float8 and keeps
    what was read once mapped.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[IO[bytes]] = []
        try:
            if child(directory, SINGLE).is_file():
                self._tensors = dict(self._open(directory / SINGLE))
            else:
                self._tensors = self._open_shards(directory)
        except BaseException:
            self.close()
            raise
        self.infos: Mapping[str, TensorInfo] = {name: tensor.info for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype."""
        tensor = self._tensors[name]
        if tensor.file.closed:
            raise CheckpointError(f"{self._directory}: the checkpoint is closed; open it again to read tensors.")
        try:
            stored = map_bytes(tensor.file, tensor.offset, tensor.info.nbytes)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._directory}: tensor {name[:80]!r} cannot be read ({error}).") from None
        return stored.view(tensor.info.dtype).reshape(tensor.info.shape)

    def read_quantized(self, name: str) -> None:
        """None: nothing here is stored as integers with scales."""

    def read_sharded(self, name: str, sharding: Any) -> Any:
        """One tensor on the devices of a sharding."""
        stored = self.read(name)
        return sharded_array(stored.shape, sharding, lambda index: stored[index])

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _open(self, path: Path) -> Iterator[tuple[str, _Tensor]]:
        file = open_file(path)
        self._files.append(file)
        offset = 8 + _header_bytes(file, path)
        try:
            with safetensors.safe_open(path, framework="numpy") as header:
                # The library has refused gaps and overlaps, so each tensor begins where the one before ends.
                for name in header.offset_keys():
                    info = _info(path, name, header.get_slice(name))
                    yield name, _Tensor(file, offset, info)
                    offset += info.nbytes
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise _unreadable(path, error) from None

    def _open_shards(self, directory: Path) -> dict[str, _Tensor]:
        index = child(directory, INDEX)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(
                f"{index}: the entry weight_map must map tensor names to file names; get a correct file."
            )
        shards: dict[str, dict[str, _Tensor]] = {}
        for shard in dict.fromkeys(weight_map.values()):
            path = child(directory, shard)
            if not path.is_file():
                raise CheckpointError(f"{path}: the shard named by {INDEX} is missing; download it.")
            shards[shard] = dict(self._open(path))
        for name, shard in weight_map.items():
            if name not in shards[shard]:
                raise CheckpointError(f"{directory / shard}: tensor {name[:80]!r} named by {INDEX} is not in it.")
        return {name: shards[shard][name] for name, shard in weight_map.items()}


def _header_bytes(file: IO[bytes], path: Path) -> int:
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise _unreadable(path, f"its header claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
    return length


def _info(path: Path, name: str, view: Any) -> TensorInfo:
    code, shape = view.get_dtype(), tuple(view.get_shape())
    if code not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name[:80]!r} has the type {code}, which is not supported; "
            "convert the checkpoint to bfloat16."
        )
    nbytes = math.prod(shape) * _DTYPES[code].itemsize
    return TensorInfo(shape, _DTYPES[code], nbytes, code, nbytes)


def _unreadable(path: Path, error: object) -> CheckpointError:
    reason = " ".join(str(error).split())[:300]
    return CheckpointError(f"{path}: not a readable safetensors file ({reason}); download or convert it again.")
