"""Open a directory in the Hugging Face or Orbax layout as a checkpoint."""

from __future__ import annotations

from pathlib import Path

from checkpoints._checkpoint import Checkpoint, Format, TensorStore
from checkpoints._errors import CheckpointError
from checkpoints._files import child, read_json, read_optional_json
from checkpoints._hf_tokenizer import hf_tokenizer
from checkpoints._orbax_store import PARAMS, OrbaxStore
from checkpoints._safetensors_store import INDEX, SINGLE, SafetensorsStore


def open_directory(directory: Path, source: str) -> Checkpoint:
    """Open a checkpoint directory; raises `CheckpointError` when it holds none that can be read."""
    store: TensorStore
    format: Format
    _require_weights(directory)
    config_path = child(directory, "config.json")
    if not config_path.is_file():
        raise CheckpointError(f"{directory}: config.json is missing; copy it from where the weights come from.")
    config = read_json(config_path)
    generation_config = read_optional_json(directory, "generation_config.json")
    if child(directory, SINGLE).is_file() or child(directory, INDEX).is_file():
        store, format = SafetensorsStore(directory), "safetensors"
    else:
        store, format = OrbaxStore(directory), "orbax"
    return Checkpoint(
        source=source,
        format=format,
        config=config,
        generation_config=generation_config,
        store=store,
        load_tokenizer=lambda: hf_tokenizer(directory, config, generation_config),
        directory=directory,
    )


def _require_weights(directory: Path) -> None:
    if any(child(directory, name).exists() for name in (SINGLE, INDEX, PARAMS)):
        return
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise CheckpointError(
            f"{directory}: the weights are pickled PyTorch files, which can run code and are refused; "
            "convert them to safetensors (save_pretrained with safe_serialization=True)."
        )
    files = sorted(path.name for path in directory.glob("*.gguf"))
    if files:
        raise CheckpointError(f"{directory}: the directory holds GGUF files; name one of them, such as {files[0]}.")
    raise CheckpointError(
        f"{directory}: there is no {SINGLE}, no {INDEX} and no {PARAMS} folder; give a checkpoint directory."
    )
