"""Write any checkpoint as an Orbax directory or as the safetensors directory that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from checkpoints._checkpoint import Checkpoint
from checkpoints._errors import CheckpointError
from checkpoints._files import child
from checkpoints._hf_tokenizer import TOKENIZER_FILES
from checkpoints._named_models import Progress
from checkpoints._open import open_checkpoint
from checkpoints._orbax_store import write_orbax
from checkpoints._safetensors_writer import write_safetensors

TargetFormat = Literal["orbax", "safetensors"]
TARGET_FORMATS: tuple[str, ...] = get_args(TargetFormat)
SHARD_BYTES = 5 * 10**9


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    format: TargetFormat | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint as a directory of another format and return it.

    format: "orbax" (the tensors as a flat dictionary by Hugging Face name) or "safetensors" (what transformers loads;
    shards of at most `shard_bytes` and an index when one file would be larger). None: Orbax, and safetensors for what
    is Orbax already.

    The directory also holds config.json, generation_config.json and the tokenizer where there is one.  Every value
    keeps its bits (bfloat16 stays bfloat16); quantized GGUF tensors become float32.  It appears whole or not at all;
    one that exists is refused.  An Orbax checkpoint is held in memory while it is written, of a safetensors one a
    shard.  Raises `CheckpointError`.
    """
    if format not in (None, *TARGET_FORMATS):
        raise CheckpointError(f"{format!r} is no format to write; {' and '.join(TARGET_FORMATS)} are.")
    target = Path(os.fspath(destination)).expanduser()
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: it exists already and is not overwritten; give another name or remove it.")
    try:
        with open_checkpoint(source, progress=progress) as checkpoint:
            kind = format or ("safetensors" if checkpoint.format == "orbax" else "orbax")
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
                partial = Path(scratch) / "checkpoint"
                partial.mkdir()
                _write_description(checkpoint, partial)
                _write_tensors(checkpoint, partial, kind, shard_bytes, progress)
                # The rename fails when somebody else made the directory in the meantime.
                partial.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror or error}); check space and rights."
        ) from None
    return target


def conversion_note(directory: Path) -> str:
    """What to say after the name of a directory that `convert` wrote: nothing, or that no usable tokenizer came along.

    Raises `CheckpointError` when the directory cannot be opened.
    """
    with open_checkpoint(directory) as checkpoint:
        try:
            checkpoint.tokenizer()
        except CheckpointError:
            return ", without a tokenizer, which generating needs; put the model's tokenizer.json there"
    return ""


def _write_description(checkpoint: Checkpoint, directory: Path) -> None:
    config = dict(checkpoint.config)
    if "dtype" not in config and "torch_dtype" not in config:
        sizes: Counter[str] = Counter()
        for info in checkpoint.tensors.values():
            sizes[info.dtype.name] += info.nbytes
        config["torch_dtype"] = sizes.most_common(1)[0][0] if sizes else "float32"
    _write_json(directory / "config.json", config)
    if checkpoint.generation_config:
        _write_json(directory / "generation_config.json", checkpoint.generation_config)
    if checkpoint.directory is not None:
        for name in TOKENIZER_FILES:
            if (path := child(checkpoint.directory, name)).is_file():
                shutil.copyfile(path, directory / name)
        return
    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError:
        return  # `conversion_note` tells that there is none
    tokenizer.save(directory)


def _write_tensors(
    checkpoint: Checkpoint, directory: Path, kind: str, shard_bytes: int, progress: Progress | None
) -> None:
    read = _reporting(checkpoint, progress)
    if kind == "safetensors":
        write_safetensors(directory, checkpoint.tensors, read, shard_bytes)
    else:
        write_orbax(directory, {name: read(name) for name in checkpoint.tensors})


def _reporting(checkpoint: Checkpoint, progress: Progress | None) -> Callable[[str], np.ndarray]:
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    done = 0

    def read(name: str) -> np.ndarray:
        nonlocal done
        result = checkpoint.read(name)
        done += checkpoint.tensors[name].nbytes
        if progress:
            progress("Converting", done, total)
        return result

    return read


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
