"""Find a checkpoint by path or name and open it."""

from __future__ import annotations

import os
from pathlib import Path

from checkpoints._checkpoint import Checkpoint
from checkpoints._errors import CheckpointError
from checkpoints._gguf import open_gguf
from checkpoints._named_models import NAMED_MODELS, Progress, fetch_named_model


def open_checkpoint(path_or_name: str | os.PathLike[str], *, progress: Progress | None = None) -> Checkpoint:
    """Open a checkpoint: a `.gguf` file or a named model.

    `progress(description, done, total)` is called with byte counts while something is downloaded.  Raises
    `CheckpointError`, whose text is one sentence, when there is nothing to open or it cannot be read.
    """
    source = os.fspath(path_or_name)
    path = Path(source).expanduser()
    if path.is_file():
        return open_gguf(path, source)
    if source in NAMED_MODELS:
        return open_gguf(fetch_named_model(source, progress=progress), source)
    raise CheckpointError(
        f"{source}: no such file or directory, and no model of that name; the named models are {', '.join(NAMED_MODELS)}."
    )
