"""Orbax checkpoints that hold a flat dictionary of Hugging Face tensor names."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints._checkpoint import TensorInfo
from checkpoints._errors import CheckpointError

PARAMS = "params"
"""The folder of the Orbax tensors inside a checkpoint directory."""
_LEAST_CHUNK_BYTES = 1 << 16
_FREE_BYTES, _MAX_RATIO = 1 << 26, 1 << 10


class OrbaxStore:
    """Tensors of an Orbax checkpoint, restored one at a time."""

    def __init__(self, directory: Path) -> None:
        self._path = (directory / PARAMS).resolve()
        stored_bytes = _bytes_below(self._path)
        with _sentence(self._path):
            self._checkpointer = _checkpointer()
            tree = self._checkpointer.metadata(self._path).item_metadata.tree
        self.infos: Mapping[str, TensorInfo] = {name: self._info(name, meta) for name, meta in tree.items()}
        # Arrays are compressed, so their size has to be compared with what lies on the disk before one is allocated.
        if sum(info.nbytes for info in self.infos.values()) > _FREE_BYTES + _MAX_RATIO * stored_bytes:
            raise CheckpointError(
                f"{self._path}: {stored_bytes} bytes claim to hold far larger tensors; get the checkpoint again."
            )

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype."""
        import orbax.checkpoint as ocp

        arguments = ocp.args.PyTreeRestore(
            item={name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
        )
        with _sentence(self._path):
            return np.asarray(self._checkpointer.restore(self._path, args=arguments)[name])

    def read_quantized(self, name: str) -> None:
        """None: nothing here is stored as integers with scales."""

    def read_sharded(self, name: str, sharding: Any) -> Any:
        """One tensor on the devices of a sharding; Orbax reads the chunks that this process's devices need."""
        import orbax.checkpoint as ocp

        restore = ocp.ArrayRestoreArgs(sharding=sharding)
        arguments = ocp.args.PyTreeRestore(item={name: 0}, restore_args={name: restore}, partial_restore=True)
        sharding.shard_shape(self.infos[name].shape)  # a sharding that does not divide it is no damaged file
        with _sentence(self._path):
            return self._checkpointer.restore(self._path, args=arguments)[name]

    def close(self) -> None:
        """Release the checkpointer."""
        self._checkpointer.close()

    def _info(self, name: str, meta: Any) -> TensorInfo:
        shape, dtype = getattr(meta, "shape", None), getattr(meta, "dtype", None)
        if shape is None or dtype is None:
            raise CheckpointError(
                f"{self._path}: entry {name[:80]!r} is no array, so this is not a flat dictionary of tensors; "
                "write the checkpoint with `python -m checkpoints convert`."
            )
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return TensorInfo(tuple(shape), np.dtype(dtype), nbytes, np.dtype(dtype).name, nbytes)


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        if path.is_symlink():
            raise CheckpointError(f"{path}: links inside an Orbax checkpoint are refused; copy the file itself there.")
        total += path.stat().st_size
    return total


def write_orbax(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write tensors below `directory`, which must not hold an Orbax checkpoint yet."""
    import orbax.checkpoint as ocp

    path = (directory / PARAMS).resolve()
    with _sentence(path):
        checkpointer = _checkpointer()
        # Chunks, so that a process that needs a part of a tensor need not read the whole; about eight by eight.
        chunked = {
            name: ocp.SaveArgs(chunk_byte_size=max(_LEAST_CHUNK_BYTES, value.nbytes // 64))
            for name, value in tensors.items()
        }
        checkpointer.save(path, args=ocp.args.PyTreeSave(tensors, save_args=chunked))
        checkpointer.close()


def _checkpointer() -> Any:
    # Imported here because it takes a second and only Orbax checkpoints need it.
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


@contextmanager
def _sentence(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Orbax and tensorstore report damaged files with many exception types; the user needs one sentence.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path}: the Orbax checkpoint cannot be read or written ({reason}).") from None
