"""Find a checkpoint by path or name and open it."""

from __future__ import annotations

import os
from pathlib import Path

from checkpoints._checkpoint import Checkpoint
from checkpoints._directory import open_directory
from checkpoints._errors import CheckpointError
from checkpoints._gguf import open_gguf
from checkpoints._hub import fetch_hub_model, is_hub_id
from checkpoints._named_models import NAMED_MODELS, Progress, fetch_named_model


def open_checkpoint(path_or_name: str | os.PathLike[str], *, progress: Progress | None = None) -> Checkpoint:
    """Open a `.gguf` file, a safetensors or Orbax directory, a named model or a hub id, looked for in that order.

    `progress(description, done, total)` is called with byte counts while a named model is downloaded; without it
    nothing is shown.  Raises `CheckpointError`, whose text is one sentence, when there is nothing to open or it cannot
    be read.
    """
    if not isinstance(path_or_name, (str, os.PathLike)) or not isinstance(os.fspath(path_or_name), str):
        raise CheckpointError(f"a model is named by text or a path, not by {type(path_or_name).__name__}.")
    source = os.fspath(path_or_name)
    if not source:
        raise CheckpointError("the name of the model is empty; give a path or the name of a model.")
    path = Path(source).expanduser()
    try:
        is_file, is_directory = path.is_file(), path.is_dir()
    except (OSError, ValueError):
        raise CheckpointError(f"{source[:200]!r}: this cannot be a path; give a path or the name of a model.") from None
    if is_file:
        if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
            raise CheckpointError(
                f"{source}: pickled PyTorch files can run code and are refused; convert to safetensors."
            )
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{source}: a single safetensors file has no configuration; give its directory.")
        return open_gguf(path, source)
    if is_directory:
        return open_directory(path, source)
    if source in NAMED_MODELS:
        return open_gguf(fetch_named_model(source, progress=progress), source)
    if is_hub_id(source):
        return open_directory(fetch_hub_model(source, show_progress=progress is not None), source)
    raise CheckpointError(
        f"{source}: no such file or directory, and no model of that name; "
        f"give a path, an organisation/name of the hub, or one of {', '.join(NAMED_MODELS)}."
    )
