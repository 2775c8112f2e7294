"""Checkpoint readers, the registry of named models and tokenizers; knows nothing of the engine."""

from checkpoints._checkpoint import Checkpoint, TensorInfo
from checkpoints._convert import TARGET_FORMATS, conversion_note, convert
from checkpoints._errors import CheckpointError
from checkpoints._named_models import (
    DEFAULT_MODEL,
    NAMED_MODELS,
    NamedModel,
    Progress,
    cache_directory,
    fetch_named_model,
    named_model_path,
)
from checkpoints._open import open_checkpoint
from checkpoints._progress import progress_bar
from checkpoints._quantized import QuantizedTensor
from checkpoints._tokenizer import Tokenizer

__all__ = [
    "DEFAULT_MODEL",
    "NAMED_MODELS",
    "TARGET_FORMATS",
    "Checkpoint",
    "CheckpointError",
    "NamedModel",
    "Progress",
    "QuantizedTensor",
    "TensorInfo",
    "Tokenizer",
    "cache_directory",
    "conversion_note",
    "convert",
    "fetch_named_model",
    "named_model_path",
    "open_checkpoint",
    "progress_bar",
]
