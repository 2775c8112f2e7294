"""Write tensors as safetensors files the way transformers does: one file, or shards with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from checkpoints._checkpoint import TensorInfo
from checkpoints._errors import CheckpointError
from checkpoints._safetensors_store import INDEX, SINGLE


def write_safetensors(
    directory: Path, infos: Mapping[str, TensorInfo], read: Callable[[str], np.ndarray], shard_bytes: int
) -> None:
    """Write every tensor below `directory`, which has a config.json; only one shard is in memory at a time.

    infos: shapes and sizes by name, in the order to write. read: one tensor. shard_bytes: what a file may hold unless
    a single tensor is larger.  Raises `CheckpointError` for a dtype that safetensors does not have.
    """
    shards = _shards(infos, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        try:
            # transformers refuses files that do not say which library's layout they have.
            tensors = {name: np.ascontiguousarray(read(name)).reshape(infos[name].shape) for name in names}
            safetensors.numpy.save_file(tensors, directory / file, metadata={"format": "pt"})
        except (safetensors.SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{directory / file}: cannot be written as safetensors ({error}).") from None
        # The library lets only the owner read its files; these are to be like the others beside them.
        shutil.copymode(directory / "config.json", directory / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(info.nbytes for info in infos.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(infos: Mapping[str, TensorInfo], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + info.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.nbytes
    return shards
