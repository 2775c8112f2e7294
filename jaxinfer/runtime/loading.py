"""From a checkpoint to a decoder config and parameters on the device."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from checkpoints import Checkpoint
from jaxinfer.models import DecoderConfig, ModelError, assemble_params, family_of
from jaxinfer.runtime.programs import Progress
from jaxinfer.runtime.quantizing import FLOAT, keep_quantized, weight_formats
from jaxinfer.runtime.steps import Params


def decoder_config(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    weight_dtype: str = FLOAT,
    attention: str = "auto",
) -> DecoderConfig:
    """The decoder that a checkpoint describes.

    dtype: "float32", "bfloat16" or "auto": float32 on CPU, elsewhere bfloat16. kv_dtype, attention: see DecoderConfig;
    a kv_dtype of "auto" is `default_kv_dtype`.
    weight_dtype: one of WEIGHT_DTYPES.
    Raises ModelError when the checkpoint describes no model that this engine runs.
    """
    family = family_of(checkpoint.config)
    config = family.decoder(checkpoint.config)
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if kv_dtype == "auto":
        kv_dtype = default_kv_dtype(dtype)
    config = config.replace(dtype=dtype, kv_dtype=kv_dtype, attention=attention)
    return config.replace(weights=weight_formats(checkpoint, family, config, weight_dtype))


def default_kv_dtype(dtype: str) -> str:
    """The `kv_dtype` of a model in `dtype` on the default device: auto, which is `dtype`, but float32 on a CPU.

    There XLA would convert whole pools of bfloat16 to float32 and back in every layer of every step.
    """
    return "float32" if jax.default_backend() == "cpu" and dtype == "bfloat16" else "auto"


def load_params(checkpoint: Checkpoint, config: DecoderConfig, on_progress: Progress | None = None) -> Params:
    """The checkpoint's tensors as parameters of `Decoder(config)`, one tensor at a time.

    Raises ModelError when tensors are missing, unexpected or misshapen, CheckpointError when one cannot be read.
    """
    family = family_of(checkpoint.config)

    def place(tensor: np.ndarray) -> jax.Array:
        # One copy, since the reader's array may be a view of the file; jnp.array would make two.
        return jax.device_put(tensor, may_alias=False)

    def report(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress("Loading", done, total)

    shapes = {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}
    return assemble_params(
        config,
        family.rules,
        family.ignored,
        family.copies,
        shapes,
        checkpoint.read,
        place,
        report,
        prefixes=family.prefixes,
        keep=partial(keep_quantized, checkpoint, config),
    )


def check_tokenizer(vocab_size: int, config: DecoderConfig) -> None:
    """Raise ModelError when the tokenizer knows more ids than the model has embeddings."""
    if vocab_size > config.vocab_size:
        raise ModelError(
            f"The tokenizer has {vocab_size} token ids, but the model has embeddings for {config.vocab_size}; "
            "they do not belong together."
        )
