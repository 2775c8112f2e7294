"""Open a GGUF file as a checkpoint."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import IO

import numpy as np

from checkpoints._checkpoint import Checkpoint
from checkpoints._errors import CheckpointError
from checkpoints._files import map_bytes, open_file
from checkpoints._gguf_config import gguf_config, gguf_generation_config
from checkpoints._gguf_header import GGUFHeader, parse_header
from checkpoints._gguf_names import ROPE_FACTOR_TENSORS, architecture
from checkpoints._gguf_store import GGUFStore
from checkpoints._gguf_tokenizer import gguf_tokenizer

_MAX_FACTORS = 1 << 12


def open_gguf(path: Path, source: str) -> Checkpoint:
    """Open one `.gguf` file; raises `CheckpointError` when it cannot be read."""
    file = open_file(path)
    try:
        return _opened(path, file, source)
    except BaseException:
        file.close()
        raise


def _opened(path: Path, file: IO[bytes], source: str) -> Checkpoint:
    with _whole(file, path) as data:
        header = parse_header(data, path)
    _refuse_splits(header, source)
    arch = architecture(header.metadata.get("general.architecture"), source)
    config = gguf_config(header, arch, _rope_factors(file, header, source), source)
    generation_config = gguf_generation_config(header, config)
    # Only architectures with permuted rows look at them, and these have both.
    heads = (config.get("num_attention_heads", 1), config.get("num_key_value_heads", 1))
    return Checkpoint(
        source=source,
        format="gguf",
        config=config,
        generation_config=generation_config,
        store=GGUFStore(path, file, header, arch, heads),
        load_tokenizer=lambda: gguf_tokenizer(header.metadata, generation_config.get("eos_token_id", []), source),
    )


def _whole(file: IO[bytes], path: Path) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty; download it again.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); check the path.") from None


def _refuse_splits(header: GGUFHeader, source: str) -> None:
    count = header.metadata.get("split.count", 0)
    if type(count) is int and count > 1:
        raise CheckpointError(
            f"{source}: this is one of {count} parts of a split model, which is not supported; "
            "join them with llama-gguf-split --merge."
        )


def _rope_factors(file: IO[bytes], header: GGUFHeader, source: str) -> dict[str, np.ndarray]:
    factors: dict[str, np.ndarray] = {}
    for name in ROPE_FACTOR_TENSORS & header.tensors.keys():
        tensor = header.tensors[name]
        if tensor.type.name != "F32" or math.prod(tensor.shape) > _MAX_FACTORS:
            raise CheckpointError(
                f"{source}: tensor {name} must hold at most {_MAX_FACTORS} F32 values; convert again."
            )
        factors[name] = map_bytes(file, tensor.offset, tensor.nbytes).view(np.float32).copy()
    return factors
