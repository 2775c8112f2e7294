"""Write any checkpoint as an Orbax directory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from checkpoints._checkpoint import Checkpoint
from checkpoints._errors import CheckpointError
from checkpoints._files import child
from checkpoints._hf_tokenizer import TOKENIZER_FILES
from checkpoints._named_models import Progress
from checkpoints._open import open_checkpoint
from checkpoints._orbax_store import write_orbax


def convert(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, progress: Progress | None = None
) -> Path:
    """Write a checkpoint as an Orbax directory and return it.

    The directory holds the tensors as a flat dictionary by Hugging Face name (quantized GGUF tensors as float32),
    config.json, generation_config.json and the tokenizer.  It appears whole or not at all; one that exists is
    refused.  The model is held in memory while it is written.  Raises `CheckpointError`.
    """
    target = Path(os.fspath(destination)).expanduser()
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: it exists already and is not overwritten; give another name or remove it.")
    try:
        with open_checkpoint(source, progress=progress) as checkpoint:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
                partial = Path(scratch) / "checkpoint"
                partial.mkdir()
                _write(checkpoint, partial, progress)
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


def _write(checkpoint: Checkpoint, directory: Path, progress: Progress | None) -> None:
    _write_json(directory / "config.json", checkpoint.config)
    if checkpoint.generation_config:
        _write_json(directory / "generation_config.json", checkpoint.generation_config)
    if checkpoint.directory is not None:
        _copy_tokenizer(checkpoint.directory, directory)
    else:
        checkpoint.tokenizer().save(directory)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    done = 0
    tensors = {}
    for name, info in checkpoint.tensors.items():
        tensors[name] = checkpoint.read(name)
        done += info.nbytes
        if progress:
            progress("Reading tensors", done, total)
    write_orbax(directory, tensors)


def _copy_tokenizer(source: Path, directory: Path) -> None:
    for name in TOKENIZER_FILES:
        if (path := child(source, name)).is_file():
            shutil.copyfile(path, directory / name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
